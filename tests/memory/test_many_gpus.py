"""The memory plan of a run on several GPUs: what is divided, what is whole, and what fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.shapes import SHAPES
from tests.distributed.ranks import run_ranks
from tests.memory.test_plan import held, row

from jetrl.distributed.world import world
from jetrl.errors import UserError
from jetrl.memory.fitting import Fitted, check_fits
from jetrl.memory.plan import MemoryPlan, OtherModels, PlannedRun, Workload
from jetrl.models.families import ModelConfig
from jetrl.models.packed import pack
from jetrl.models.policy import Policy
from jetrl.precision.plan import PrecisionPlan
from jetrl.settings.loading import load_config

GIB = 2**30
H200 = int(139.8 * GIB)  # free on an empty one
LOAD = Workload(sequences=128, tokens=2304, trained=128, prompts=16 * 256)


def settings(*overrides: str) -> Any:
    common = ["sft.steps=0", "eval.every=0", "precision.preset=unified"]
    sizes = ["rollout.samples_per_prompt=8", "train.tokens_per_micro_batch=16384"]
    return load_config("demo", [*common, *sizes, "train.optimizer_states=compact", *overrides])


def shape(name: str) -> ModelConfig:
    return ModelConfig.from_hf(SHAPES[name])


def fit(name: str, cards: int, *overrides: str) -> Fitted:
    run = PlannedRun(settings(*overrides), shape(name), OtherModels(), LOAD, cards)
    return check_fits(run, H200)


def test_prompts_are_divided_and_the_samples_of_a_prompt_stay_together() -> None:
    one = settings("rollout.max_batch_size=24")
    load = Workload(sequences=56, tokens=512, trained=56, prompts=700)
    assert load.of_a_rank(one, 1).sequences == 24
    assert load.of_a_rank(one, 4).sequences == 16  # two prompts of seven
    assert load.of_a_rank(one, 8).sequences == 8
    assert load.of_a_rank(one, 4).prompts == 175
    assert load.of_a_rank(one, 4).trained == 56


def _bytes_on_this_rank() -> tuple[int, int, int]:
    """The bytes of master weights, quantized weights and gradients of a policy after a backward."""
    policy = Policy.from_config(SHAPES["tiny"], PrecisionPlan.preset("unified"))
    gradients = policy.weights.gradients
    gradients.begin_update()
    gradients.begin_micro_batch([8] * world().size)
    inputs, ends = pack([range(8)], policy.device)
    logprobs, _ = policy.train_logprobs(inputs, ends, torch.arange(1, 8))
    logprobs.sum().backward()
    gradients.end_micro_batch()
    gradients.end_update()
    masters = policy.master_weights().values()
    return (
        sum(master.nbytes for master in masters),
        held(policy),
        sum(master.grad.nbytes for master in masters if master.grad is not None),
    )


def _same_after_a_failure() -> bool:
    """Return whether gradients are the same after an update in which rank 1 made none."""
    policy = Policy.from_config(SHAPES["tiny"], PrecisionPlan.preset("unified"))
    gradients, masters = policy.weights.gradients, policy.master_weights().values()

    def update(fails: bool = False) -> list[torch.Tensor | None]:
        for master in masters:
            master.grad = None
        gradients.begin_update()
        gradients.begin_micro_batch([8] * world().size)
        if not fails or world().rank != 1:
            inputs, ends = pack([range(world().rank, world().rank + 8)], policy.device)
            logprobs, _ = policy.train_logprobs(inputs, ends, torch.arange(1, 8))
            logprobs.sum().backward()
        gradients.end_micro_batch(failed=fails)
        gradients.end_update()
        return [master.grad for master in masters]

    before, _, after = update(), update(fails=True), update()
    pairs = list(zip(before, after, strict=True))
    return all(a is b is None or torch.equal(a, b) for a, b in pairs) and before[0] is not None


def test_a_rank_without_gradients_stops_nobody() -> None:
    assert run_ranks(2, _same_after_a_failure) == [True, True]


def test_ranks_hold_what_is_planned() -> None:
    of_ranks = run_ranks(2, _bytes_on_this_rank)
    run = PlannedRun(settings(), shape("tiny"), OtherModels(), LOAD, cards=2, device="cpu")
    plan = MemoryPlan(run, None, run.tokens)
    masters, quantized, gradients = (max(sizes) for sizes in zip(*of_ranks, strict=True))
    assert row(plan, "master weights") == masters
    assert row(plan, "quantized weights") == quantized
    assert row(plan, "gradients, FP32", "optimizer") == gradients


def refused(name: str, cards: int, *overrides: str) -> str:
    with pytest.raises(UserError) as error:
        fit(name, cards, *overrides)
    return str(error.value)


def test_what_trains_on_how_many_cards_of_141_gb() -> None:
    recomputed = "train.activation_checkpointing=true"
    assert "it fits on 2 GPUs" in refused("qwen3-14b", 1)
    two = fit("qwen3-14b", 2)
    assert two.tokens >= 8192
    assert two.plan.peak < H200
    assert fit("qwen3-14b", 2, recomputed).tokens == 16384
    assert fit("qwen3-32b", 4, recomputed).tokens >= 4 * 2304
    text = refused("qwen3-32b", 2, recomputed)
    assert "does not fit on 2 GPUs" in text
    assert "GiB on each, and 139.8 GiB are free" in text
    assert "it fits on 4 GPUs like this one (torchrun --nproc-per-node): " in text
    text = refused("qwen3-32b", 4)
    assert "it fits with train.activation_checkpointing=true: " in text
    assert "\nit fits on 8 GPUs like this one" in text


def test_the_micro_batches_of_fewer_gpus_are_kept_where_their_bits_are_wanted() -> None:
    alone = fit("qwen3-8b", 1)
    assert alone.tokens < 16384
    assert fit("qwen3-8b", 4).tokens == 16384
    same = fit("qwen3-8b", 4, "distributed.same_bits_down_to=1")
    assert same.tokens == alone.tokens
    assert same.plan.peak < alone.plan.peak
    text = refused("qwen3-14b", 4, "distributed.same_bits_down_to=1")
    assert "does not fit on the GPU" in text
    assert "it fits on 2 GPUs like this one (torchrun --nproc-per-node), with " in text
    assert "distributed.same_bits_down_to=2" in text
    too_many = refused("qwen3-8b", 1, "distributed.same_bits_down_to=2")
    assert "set distributed.same_bits_down_to=1" in too_many
