"""Images on a GPU: decode with offsets in graphs, and the bits of sampler and trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.models.test_images import encode, model, picture
from tests.rollout.test_images import samples_of

from jetrl.models.packed import Stems
from jetrl.models.policy import Policy
from jetrl.models.source import ModelSource
from jetrl.precision import PrecisionPlan
from jetrl.rollout.engine import RolloutEngine
from jetrl.training.micro_batches import batch_logprobs
from jetrl.training.packing import pack
from jetrl.types import PromptInputs, Sample, SamplingParams

pytestmark = pytest.mark.gpu

PARAMS = SamplingParams(n=4, max_tokens=80, temperature=0.9, ignore_eos=True, seed=4)
LONG = "What is it? " * 20  # so that prompts have whole blocks and pages
SIZES = {"hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "num_layers": 3}
FAMILIES = ("idefics3", "qwen2_5_vl", "qwen3_vl")


def policy_of(family: str, path: Path, preset: str) -> Policy:
    return Policy.from_pretrained(model(path / "model", family, **SIZES), preset, "cuda")


def prompts_of(policy: Policy) -> list[PromptInputs]:
    return [
        encode(policy, LONG + "<image> or is it <image>?", [picture(1), picture(2, 40, 9)]),
        encode(policy, "<image>", [picture(3)]),
        encode(policy, "<image>" + LONG, [picture(4)]),
        encode(policy, "no image", []),
    ]


def num_different(policy: Policy, samples: Sequence[Sample], share: bool) -> int:
    (batch,) = pack(samples, 16000, share_prompts=share)
    assert (Stems.of(batch) is not None) == share
    with torch.no_grad():
        found, _ = batch_logprobs(policy, batch, PARAMS.temperature)
    drawn = torch.from_numpy(batch.rollout_logprobs[batch.loss_mask])
    return int((found.cpu().view(torch.int32) != drawn.view(torch.int32)).sum())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("preset", ["int8", "unified"])
def test_sampler_and_trainer_have_the_same_bits(family: str, preset: str, tmp_path: Path) -> None:
    policy = policy_of(family, tmp_path, preset)
    prompts = prompts_of(policy)
    assert (prompts[0].offset < 0) == (family != "idefics3")
    for _ in range(2):
        expected = RolloutEngine(policy).generate(prompts, PARAMS)
        for options in (
            {"max_batch_size": 1},
            {"max_batch_size": 3, "max_prefill_tokens": 48},
            {"num_pages": 20},
            {"speculation": "text"},
        ):
            found = RolloutEngine(policy, **options).generate(prompts, PARAMS)
            assert found == expected, options
        samples = samples_of(prompts, expected)
        assert [num_different(policy, samples, share) for share in (False, True)] == [0, 0]
        # The same after an update.
        for batch in pack(samples, 4000):
            batch_logprobs(policy, batch)[0].sum().backward()
        for weight in policy.master_weights().values():
            assert weight.grad is not None
            weight.data -= 0.01 * weight.grad.sign()
            weight.grad = None
        policy.requantize()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_tower_repeats_its_bits(family: str, tmp_path: Path) -> None:
    path = model(tmp_path / "model", family, **SIZES)
    source = replace(ModelSource.from_path(path), trained_tower="all")
    policy = Policy(source, PrecisionPlan.preset("int8"), "cuda")
    prompts = prompts_of(policy)
    for _ in range(2):
        samples = samples_of(prompts, RolloutEngine(policy).generate(prompts, PARAMS))
        assert num_different(policy, samples, share=False) == 0
        repeats = []
        for _ in range(3):
            for batch in pack(samples, 4000):
                batch_logprobs(policy, batch)[0].sum().backward()
            repeats.append([policy.weights.masters[n].grad for n in policy.weights.of_tower])
            for weight in policy.master_weights().values():
                weight.grad = None
        for name, first, *others in zip(policy.weights.of_tower, *repeats, strict=True):
            assert first is not None
            assert all(torch.equal(first, other) for other in others), name
            policy.weights.masters[name].data -= 0.01 * first.sign()
        policy.requantize()


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_near_those_of_a_cpu(family: str, tmp_path: Path) -> None:
    there = policy_of(family, tmp_path, "bf16")
    here = Policy.from_pretrained(tmp_path / "model", "bf16")
    prompts = prompts_of(here)
    with torch.no_grad():
        pairs = zip(there.logprobs(prompts), here.logprobs(prompts), strict=True)
        for found, expected in pairs:
            # BF16 rounds by 2**-9; log-probs of random tokens are about -5.
            assert (found.cpu() - expected).abs().mean() < 0.05
