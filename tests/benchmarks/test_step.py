"""The benchmarks of a step, tried out on the CPU: their parts are those of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from benchmarks.flow import Choices, policy_of
from benchmarks.layer import LayerBench
from benchmarks.loads import Load, flops
from benchmarks.rollout import check
from benchmarks.shapes import SHAPES
from benchmarks.step import compare, measure
from benchmarks.step_parts import warmed
from tests.distributed.ranks import run_ranks

from benchmarks import train
from jetrl.errors import UserError
from jetrl.models.families import ModelConfig
from jetrl.rollout.engine import RolloutEngine
from jetrl.training import packing
from jetrl.types import SamplingParams

LOAD = Load(prompts=2, samples=2, prompt_length=20, response_length=12)
CHOICES = Choices("tiny", "cpu", None, 1e-3, None, None, {})


def test_flops_of_a_step_by_hand() -> None:
    config = ModelConfig.from_hf(SHAPES["tiny"])
    layer = 256 * (2 + 2 * 1) * 128 + 2 * 128 * 256 + 3 * 256 * 512
    layers, head = 2 * layer, 256 * 256
    pairs = sum(range(1, 33))  # of a query and a key, in a sequence of 32 tokens
    attention = 2 * 2 * (2 * 128) * 2 * pairs  # layers, two products, width, multiply and add
    forward = 2 * (4 * 32 * layers + 4 * 12 * head) + 4 * attention
    counted = flops(config, LOAD)
    # The formula counts half a square where there is a triangle with its diagonal.
    assert counted["old_logprobs"] == pytest.approx(forward, rel=1 / 32)
    assert counted["update"] == pytest.approx(3 * forward + 0.5 * 4 * attention, rel=1 / 32)
    drawn = 2 * (layers * (2 * 20 + 4 * 12) + head * 4 * 12)
    assert drawn < counted["rollout"] < drawn + 4 * attention * 33 / 32


def test_the_check_of_a_rollout_counts_drawn_tokens() -> None:
    policy = policy_of("int8", CHOICES)
    prompts = [[1, 2, 3], [4, 5, 6]]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    completions = RolloutEngine(policy).generate(prompts, params)
    assert check(policy, prompts, completions) == {"checked_tokens": 8, "different": 0}


def test_flops_are_those_of_chosen_experts() -> None:
    config = ModelConfig.from_hf(SHAPES["tiny-experts"])
    block = config.layers[0].block
    load = Load(prompts=1, samples=1, prompt_length=1, response_length=1)
    attention = 256 * (2 + 2 * 1) * 128 + 2 * 128 * 256
    expert = 3 * 256 * block.width
    layer = attention + 8 * 256 + block.num_experts_per_tok * expert
    exact = 2 * (2 * 2 * layer + 256 * 256)
    assert flops(config, load)["old_logprobs"] == pytest.approx(exact, rel=0.01)
    of_layer = LayerBench("tiny-experts", "bf16", "bf16", 64, 1, rank=0, device="cpu").flops()
    assert of_layer["forward"] == pytest.approx(2 * 64 * layer, rel=0.01)


def test_training_adapters_needs_no_gradients_of_the_base() -> None:
    choices = replace(CHOICES, adapter_rank=2)
    policy = policy_of("int8", choices)
    row = train.measure(policy, LOAD, choices, limit=1.0, profiled=False)
    needed = flops(policy.config, LOAD, frozen=True)["update"]
    assert row["mfu"] * row["training_s"] == pytest.approx(needed, rel=0.1)


def test_the_plan_has_the_adapters_of_the_policy() -> None:
    choices = replace(CHOICES, shape="tiny-experts", adapter_rank=2)
    policy = policy_of("int8", choices)
    flow = warmed(policy, LOAD, choices)[0]
    planned = {row.what: row.bytes for row in flow.planned().rows}
    trained = sum(weight.numel() for weight in policy.master_weights().values())
    assert planned["master weights of the adapter, FP32"]["rollout"] == 4 * trained


def test_a_step_of_both_plans() -> None:
    base, row = (
        measure(policy_of(plan, CHOICES), LOAD, CHOICES, limit=1e12) for plan in ("bf16", "unified")
    )
    assert (row["different"], row["compared_tokens"]) == (0, 48)
    assert row["weights_changed"] > 0
    assert "old_logprobs" in base["seconds"]
    assert "old_logprobs" not in row["seconds"]
    assert row["step_s"] == pytest.approx(sum(row["seconds"].values()), abs=0.01)
    assert row["training_s"] == pytest.approx(
        sum(row["seconds"][part] for part in ("update", "optimizer", "requantize")), abs=0.01
    )
    assert compare(base, base)["step"] == 1.0


def test_a_step_with_images_compares_all_tokens() -> None:
    load = replace(LOAD, image_side=32)  # 16 tokens of 8 x 8 pixels
    choices = replace(CHOICES, shape="tiny-vl")
    policy = policy_of("int8", choices)
    row = measure(policy, load, choices, limit=1e12)
    assert (row["different"], row["compared_tokens"]) == (0, 48)
    assert "an image of 32^2 pixels" in row["load"]
    assert policy.tower is not None
    assert policy.tower.computed > load.prompts
    with pytest.raises(UserError, match="an image takes 16 tokens, and --prompt-length is 16"):
        measure(policy, replace(load, prompt_length=16), choices, limit=1e12)
    with pytest.raises(UserError, match="Qwen3ForCausalLM reads text only"):
        measure(policy_of("int8", CHOICES), load, CHOICES, limit=1e12)


TAIL = Load(prompts=3, samples=2, prompt_length=8, response_length=24, mean_length=8)


def _step(load: Load, plan: str, exchange: bool = False) -> Any:
    choices = Choices("tiny", "cpu", 1, 1e-3, 40, None, {}, warm_micro_batches=2)
    return measure(policy_of(plan, choices), load, choices, 1e12, digest=True, exchange=exchange)


def test_a_step_has_the_same_digests_on_two_ranks() -> None:
    alone = _step(TAIL, "unified")
    assert alone["ranks"] == 1
    assert alone["digests"]["warm"] != alone["digests"]["step"]
    assert "exchange" not in alone
    for row in run_ranks(2, _step, TAIL, "unified", True):
        assert (row["ranks"], row["digests"]) == (2, alone["digests"])
        assert row["compared_tokens"] == alone["compared_tokens"] == TAIL.drawn
        assert row["different"] == alone["different"] == 0
        assert "gather" in row["seconds"]
        assert row["exchange"]["rounds"] > 0
        assert row["exchange"]["gb_sent_a_round"] >= 0
        assert set(row["planned_gib"]) == {"rollout", "update"}


def test_the_warm_up_has_every_size_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    original, sizes = packing.pack, list[set[tuple[int, int]]]()

    def pack(*args: Any, **keywords: Any) -> list[packing.Batch]:
        found = original(*args, **keywords)
        sizes.append({(len(batch.sample_ids), len(set(batch.stem_ids))) for batch in found})
        return found

    monkeypatch.setattr(packing, "pack", pack)
    choices = Choices("tiny", "cpu", 1, 1e-3, 720, None, {"share_prompts": "true"})
    measure(policy_of("unified", choices), Load(5, 3, 128, 16), choices, 1e12)
    assert {(12, 4), (3, 1)} == sizes.pop() <= set.union(*sizes)
