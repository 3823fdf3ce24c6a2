"""Images in the exact flow: sampler and trainer have the same bits, from features computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.models.test_images import encode, model, picture

from jetrl.errors import UserError
from jetrl.models.packed import Stems
from jetrl.models.policy import Policy
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.inputs import PromptTooLong
from jetrl.session.parity import random_prompts
from jetrl.training.micro_batches import batch_logprobs
from jetrl.training.packing import pack
from jetrl.types import Completion, Prompt, PromptInputs, Sample, SamplingParams, Score

PARAMS = SamplingParams(n=3, max_tokens=10, temperature=0.9, ignore_eos=True, seed=4)
LONG = "What is it? " * 9  # so that prompts have a whole block of 128 tokens


@pytest.fixture(scope="module", params=["idefics3", "qwen2_5_vl", "qwen3_vl"])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    path = model(tmp_path_factory.mktemp("models") / "tiles", request.param)
    return Policy.from_pretrained(path, "unified")


@pytest.fixture(scope="module")
def prompts(policy: Policy) -> list[PromptInputs]:
    return [
        encode(policy, LONG + "<image> or is it <image>?", [picture(1), picture(2, 40, 9)]),
        encode(policy, "<image>", [picture(3)]),
        encode(policy, LONG + "<image> or is it <image>?", [picture(4), picture(2, 40, 9)]),
        encode(policy, "no image", []),
    ]


def samples_of(prompts: Sequence[PromptInputs], done: Sequence[Completion]) -> list[Sample]:
    each = len(done) // len(prompts)
    return [
        Sample(Prompt(str(i), text="?"), i // each, prompts[i // each], completion, Score(0.0))
        for i, completion in enumerate(done)
    ]


def num_different(policy: Policy, samples: Sequence[Sample], share: bool) -> int:
    """Return the tokens whose log-prob in a packed batch has other bits than the sampler's."""
    different = 0
    for batch in pack(samples, 1000, share_prompts=share):
        assert not share or (Stems.of(batch) is not None) == (len(samples) > 1)
        with torch.no_grad():
            found, _ = batch_logprobs(policy, batch, PARAMS.temperature)
        drawn = batch.rollout_logprobs[batch.loss_mask]
        different += int((found.numpy().view(np.int32) != drawn.view(np.int32)).sum())
    return different


def test_sampler_and_trainer_have_the_same_bits(
    policy: Policy, prompts: list[PromptInputs]
) -> None:
    assert min(len(prompts[0]), len(prompts[2])) > 128
    expected = RolloutEngine(policy, page_size=8).generate(prompts, PARAMS)
    for options in (
        {"max_batch_size": 1},
        {"max_batch_size": 2, "max_prefill_tokens": 16},
        {"max_batch_size": 8, "num_pages": 40},  # two sequences at most, with pre-emption
        {"page_size": 16, "speculation": "text"},
    ):
        engine = RolloutEngine(policy, **{"page_size": 8, **options})
        assert engine.generate(prompts, PARAMS) == expected, options
        (alone,) = (engine.generate([prompts[2]], PARAMS) for _ in range(1))
        assert alone == expected[6:9]
    samples = samples_of(prompts, expected)
    assert [num_different(policy, samples, share) for share in (False, True)] == [0, 0]
    assert num_different(policy, samples[4:5], False) == 0


@pytest.mark.parametrize("family", ["idefics3", "qwen2_5_vl", "qwen3_vl"])
def test_features_are_computed_once_and_survive_an_update(family: str, tmp_path: Path) -> None:
    policy = Policy.from_pretrained(model(tmp_path / "model", family), "unified")
    asked = [encode(policy, "<image>?<image>", [picture(1), picture(2)])] * 2
    for _ in range(2):
        samples = samples_of(asked, RolloutEngine(policy, page_size=8).generate(asked, PARAMS))
        assert num_different(policy, samples, False) == 0
        (batch,) = pack(samples, 1000)
        logprobs, _ = batch_logprobs(policy, batch)
        logprobs.sum().backward()
        for weight in policy.master_weights().values():
            assert weight.grad is not None
            weight.data -= 0.05 * weight.grad.sign()
            weight.grad = None
        policy.requantize()
    assert policy.tower is not None
    assert policy.tower.computed == 2


def test_tokens_of_images_count_for_the_context(
    policy: Policy, prompts: list[PromptInputs]
) -> None:
    length = len(prompts[1])
    assert length >= 4 + 2
    done = RolloutEngine(policy, max_model_len=length + 3).generate(prompts[1:2], PARAMS)
    assert {(len(each.token_ids), each.finish_reason) for each in done} == {(3, "length")}
    expected = RolloutEngine(policy).generate(prompts[1:2], PARAMS)
    assert [each.token_ids for each in done] == [each.token_ids[:3] for each in expected]
    with pytest.raises(PromptTooLong, match=f"has {length} tokens: no room"):
        RolloutEngine(policy, max_model_len=length).generate(prompts[1:2], PARAMS)


def test_token_ids_have_no_places_of_images(policy: Policy, prompts: list[PromptInputs]) -> None:
    places = policy.config.place_tokens
    ids = list(prompts[1].token_ids)
    assert places.intersection(ids)
    with pytest.raises(UserError, match=r"prompt 1: token \d+ is the place of an image"):
        RolloutEngine(policy).generate([[5, 6], ids], PARAMS)
    drawn = {token for prompt in random_prompts(policy, 20, 9, seed=0) for token in prompt}
    assert len(drawn) == policy.config.vocab_size - len(places)
    assert drawn.isdisjoint(places)


def test_an_iterator_of_prompts_keeps_their_images(
    policy: Policy, prompts: list[PromptInputs]
) -> None:
    with torch.no_grad():
        found, expected = policy.logprobs(iter(prompts)), policy.logprobs(prompts)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_swapped_images_are_noticed(policy: Policy, prompts: list[PromptInputs]) -> None:
    samples = samples_of([prompts[1]], RolloutEngine(policy).generate([prompts[1]], PARAMS))
    (span,) = prompts[1].images[:1]
    swapped = tuple(replace(each, image=picture(9)) for each in prompts[1].images)
    assert span.image != picture(9)
    others = [replace(s, inputs=replace(s.inputs, images=swapped)) for s in samples]
    assert num_different(policy, samples, False) == 0
    assert num_different(policy, others, False) > 20
