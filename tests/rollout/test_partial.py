"""Partial rollouts: cut off when enough is complete, gone on with under other weights."""

from __future__ import annotations

import pytest
import torch

from jetrl.errors import UserError
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.options import GenerateOptions, Partial
from jetrl.types import Completion, PromptInputs, SamplingParams, Unfinished

PROMPTS = [[5, 6, 7], [9] * 17, [11, 12, 13, 14], [20], [40, 41, 42, 43]]
PARAMS = SamplingParams(n=3, max_tokens=30, temperature=0.9, stop_token_ids=(33, 34, 35), seed=6)


def groups_of(left, n=PARAMS.n):
    """The unfinished ones by the prompt they belong to."""
    groups = {}
    for index, cut in left.items():
        groups.setdefault(index // n, []).append(cut)
    return list(groups.values())


@pytest.fixture
def cut(make_policy):
    """Return policy, engine, completions and unfinished sequences of a call that ended early.

    Two of its prompts are complete.
    """
    policy = make_policy()
    engine = RolloutEngine(policy, page_size=4, max_batch_size=7)
    out = engine.generate(
        PROMPTS, PARAMS, options=GenerateOptions(partial=Partial(enough=2, version=4))
    )
    return policy, engine, out, engine.unfinished


def test_a_call_ends_when_enough_is_complete(cut):
    policy, engine, out, left = cut
    assert engine.pages_in_use == 0
    complete = [
        p
        for p in range(len(PROMPTS))
        if all(c.finish_reason != "cancelled" for c in out[p * 3 : p * 3 + 3])
    ]
    assert len(complete) == 2
    assert sorted(left) == [i for i, c in enumerate(out) if c.finish_reason == "cancelled"]
    whole = RolloutEngine(policy).generate(PROMPTS, PARAMS)
    for index, (mine, theirs) in enumerate(zip(out, whole, strict=True)):
        assert mine.token_ids == theirs.token_ids[: len(mine.token_ids)]
        assert (mine.versions == ()) == (index not in left)
        if index in left:
            assert mine.versions == (4,) * len(mine.token_ids)
        else:
            assert mine == theirs


@pytest.mark.parametrize("sizes", [{}, {"num_pages": 16, "max_batch_size": 3}], ids=str)
def test_it_goes_on_under_new_weights(cut, sizes):
    policy, _, _, left = cut
    with torch.no_grad():
        for master in policy.master_weights().values():
            master.mul_(1.1)
    policy.requantize()
    resume = groups_of(left)
    engine = RolloutEngine(policy, page_size=4, **sizes)
    partial = Partial(enough=len(resume) + 1, resume=resume, version=5)
    out = engine.generate([[60, 61]], PARAMS, options=GenerateOptions(partial=partial))
    assert len(out) == len(left) + 3
    assert not engine.unfinished
    fresh = RolloutEngine(policy).generate([[60, 61]], PARAMS)
    assert out[len(left) :] == fresh, "a new prompt draws what it draws alone"
    for cut_off, done in zip((c for group in resume for c in group), out, strict=False):
        old = cut_off.completion
        count = len(old.token_ids)
        assert done.token_ids[:count] == old.token_ids
        assert done.logprobs[:count] == old.logprobs
        assert done.versions == (4,) * count + (5,) * (len(done.token_ids) - count)
        assert done.finish_reason in ("stop", "length")
        prompt = list(cut_off.prompt_token_ids)
        (trainer,) = policy.logprobs([prompt + list(done.token_ids)], PARAMS.temperature)
        theirs = trainer.detach()[len(prompt) - 1 + count :]
        mine = torch.tensor(done.logprobs[count:])
        assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32))
    assert sum(bool(cut_off.completion.token_ids) for cut_off in left.values()) >= 3


@pytest.mark.parametrize("begun", ["SUS", "USU", "UUS", "SSU", "USSU", "SUSUSU"])
@pytest.mark.parametrize("sizes", [{}, {"num_pages": 10, "max_batch_size": 2}], ids=str)
def test_a_group_of_begun_and_new_members_continues(make_policy, begun, sizes):
    """Each draws what it draws when it is continued without the others."""
    policy = make_policy()
    prompt, params = (
        PromptInputs((5, 6, 7, 8, 9)),
        SamplingParams(max_tokens=30, temperature=0.9, seed=6),
    )
    old = Completion((3, 4, 5), (-1.0, -2.0, -3.0), "cancelled", "", versions=(4, 4, 4))
    new = Completion((), (), "cancelled")
    group = [Unfinished(prompt, key, old if kind == "S" else new) for key, kind in enumerate(begun)]

    def resumed(groups, **sizes):
        partial = Partial(enough=len(groups) + 1, resume=groups, version=5)
        engine = RolloutEngine(policy, page_size=4, **sizes)
        out = engine.generate([], params, options=GenerateOptions(partial=partial))
        assert engine.pages_in_use == 0
        return out

    alone = [resumed([[member]])[0] for member in group]
    assert resumed([group], **sizes) == alone


def test_a_mixed_group_counts_as_one_prompt(make_policy):
    prompt, long = PromptInputs((5, 6, 7)), SamplingParams(max_tokens=6, temperature=0.9, seed=6)
    old = Completion((3, 4), (-1.0, -2.0), "cancelled", "", versions=(4, 4))
    begun, new = Unfinished(prompt, 1, old), Unfinished(prompt, 2, Completion((), (), "cancelled"))
    engine = RolloutEngine(make_policy(), page_size=4)
    partial = Partial(enough=1, resume=[[begun, new]], version=5)
    out = engine.generate([], long, options=GenerateOptions(partial=partial))
    assert [c.finish_reason for c in out] == ["length", "length"]


def test_bad_partial_calls(cut):
    _, engine, _, left = cut
    few = SamplingParams(n=3, max_tokens=2)
    with pytest.raises(UserError, match="raise max_tokens"):
        engine.generate([], few, options=GenerateOptions(partial=Partial(1, groups_of(left))))
    with pytest.raises(UserError, match="partial rollout"):
        engine.generate(
            PROMPTS, PARAMS, options=GenerateOptions(max_tokens=[5] * 15, partial=Partial(1))
        )
