"""The memory plan of a run on several GPUs: what is divided, what is whole, and what fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.distributed.ranks import run_ranks

from jetrl.distributed.shards import shard_of
from jetrl.distributed.world import world
from jetrl.errors import UserError
from jetrl.memory.fitting import Fitted, check_fits
from jetrl.memory.plan import MemoryPlan, OtherModels, Workload, memory_plan
from jetrl.models.families import SHAPES, ModelConfig, parameter_shapes
from jetrl.models.layer import RMSNorm
from jetrl.models.policy import Policy
from jetrl.precision.linear import Linear
from jetrl.precision.plan import PrecisionPlan
from jetrl.settings.loading import load_config

GIB = 2**30
# What is free on an empty card: nvidia-smi shows 140.4 GiB of an H200 and 79.6 GiB of an H100.
H200, H100 = int(139.8 * GIB), int(78.8 * GIB)
LOAD = Workload(sequences=128, tokens=2304, trained=128, prompts=16 * 256)


def settings(*overrides: str) -> Any:
    common = ["sft.steps=0", "eval.every=0", "precision.preset=unified"]
    sizes = ["rollout.samples_per_prompt=8", "train.tokens_per_micro_batch=16384"]
    return load_config("demo", [*common, *sizes, "train.optimizer_states=compact", *overrides])


def shape(name: str) -> ModelConfig:
    return ModelConfig.from_hf(SHAPES[name])


def row(plan: MemoryPlan, what: str, moment: str = "rollout") -> int:
    [match] = [r for r in plan.rows if r.what.startswith(what)]
    return match.bytes.get(moment, 0)  # type: ignore[call-overload, no-any-return]


def fit(name: str, cards: int, free: int = H200, *overrides: str) -> Fitted:
    return check_fits(settings(*overrides), shape(name), OtherModels(), LOAD, "cuda", free, cards)


@pytest.mark.parametrize("cards", [2, 3, 4, 8])
def test_masters_moments_and_gradients_are_those_of_the_rank_with_the_most(cards: int) -> None:
    config = shape("qwen3-8b")
    of_ranks = []
    for rank in range(cards):
        total = 0
        for rows, *columns in parameter_shapes(config).values():
            shard = shard_of(rows, rank, cards) if columns else None
            own = rows if shard is None else shard.own_rows.stop - shard.own_rows.start
            total += own * (columns[0] if columns else 1)
        of_ranks.append(total)
    plan = memory_plan(settings(), config, load=LOAD, cards=cards)
    one = memory_plan(settings(), config, load=LOAD)
    assert row(plan, "master weights") == 4 * max(of_ranks)
    assert row(plan, "gradients, FP32", "optimizer") == 4 * max(of_ranks)
    assert row(plan, "optimizer states") == pytest.approx(3 * max(of_ranks), rel=1e-3)
    assert row(plan, "quantized weights") == row(one, "quantized weights")
    assert row(plan, "activations", "backward") == row(one, "activations", "backward")


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
    token_ids, ends = torch.arange(8), torch.tensor([0, 8])
    logprobs, _ = policy.train_logprobs(token_ids, ends, torch.arange(1, 8))
    logprobs.sum().backward()
    gradients.end_micro_batch()
    gradients.end_update()
    masters = policy.master_weights().values()
    linears = [m for m in policy.decoder.modules() if isinstance(m, Linear | RMSNorm)]
    weights = [policy.decoder.embedding, *(module.quantized for module in linears)]
    quantized = {id(t): t.nbytes for weight in weights for t in weight.tensors()}
    held = sum(quantized.values()) + policy.decoder.rotary_table.nbytes
    return (
        sum(master.nbytes for master in masters),
        held,
        sum(master.grad.nbytes for master in masters if master.grad is not None),
    )


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_hold_what_is_planned(size: int) -> None:
    of_ranks = run_ranks(size, _bytes_on_this_rank)
    plan = memory_plan(settings(), shape("tiny"), load=LOAD, cards=size, device="cpu")
    masters, quantized, gradients = (max(sizes) for sizes in zip(*of_ranks, strict=True))
    assert row(plan, "master weights") == masters
    assert row(plan, "quantized weights") == quantized
    assert row(plan, "gradients, FP32", "optimizer") == gradients


def test_qwen3_14b_trains_on_two_cards_of_141_gb_and_not_on_one() -> None:
    with pytest.raises(UserError, match=r"no setting by itself makes it fit; it fits on 2 GPUs"):
        fit("qwen3-14b", 1)
    two = fit("qwen3-14b", 2)
    assert two.tokens >= 8192
    assert two.plan.peak < H200
    assert fit("qwen3-14b", 2, H200, "train.activation_checkpointing=true").tokens == 16384


def test_qwen3_32b_trains_on_four_cards_of_141_gb() -> None:
    recomputed = "train.activation_checkpointing=true"
    four = fit("qwen3-32b", 4, H200, recomputed)
    assert four.tokens >= 4 * 2304
    with pytest.raises(UserError) as error:
        fit("qwen3-32b", 2, H200, recomputed)
    assert "does not fit on 2 GPUs" in str(error.value)
    assert "GiB on each, and 139.8 GiB are free" in str(error.value)
    assert "it fits on 4 GPUs like this one (torchrun --nproc-per-node): " in str(error.value)
    with pytest.raises(UserError) as error:
        fit("qwen3-32b", 4)
    assert "it fits with train.activation_checkpointing=true: " in str(error.value)
    assert "\nit fits on 8 GPUs like this one" in str(error.value)


def test_the_micro_batches_of_fewer_gpus_are_kept_where_their_bits_are_wanted() -> None:
    alone = fit("qwen3-8b", 1)
    assert alone.tokens < 16384
    assert fit("qwen3-8b", 4).tokens == 16384
    same = fit("qwen3-8b", 4, H200, "distributed.same_bits_down_to=1")
    assert same.tokens == alone.tokens
    assert same.plan.peak < alone.plan.peak
    with pytest.raises(UserError) as error:
        fit("qwen3-14b", 4, H200, "distributed.same_bits_down_to=1")
    assert "does not fit on the GPU" in str(error.value)
    assert "it fits on 2 GPUs like this one (torchrun --nproc-per-node), with " in str(error.value)
    assert "distributed.same_bits_down_to=2" in str(error.value)
    with pytest.raises(UserError, match=r"set distributed\.same_bits_down_to=1"):
        fit("qwen3-8b", 1, H200, "distributed.same_bits_down_to=2")
