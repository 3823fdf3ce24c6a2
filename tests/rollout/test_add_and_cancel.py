"""Groups that are added and sequences that are cancelled while others run, as an endpoint does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from jetrl.errors import UserError
from jetrl.models.policy import Policy
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.inputs import make_groups
from jetrl.rollout.sequence import RunningSequence
from jetrl.types import PromptInputs, SamplingParams

PROMPTS = [[5, 6, 7], [9] * 17, [11, 12, 13, 14]]
PARAMS = SamplingParams(n=3, max_tokens=20, temperature=0.9, stop_token_ids=(33, 34), seed=6)
EACH = (
    PARAMS,
    replace(PARAMS, temperature=0.0, max_tokens=9, seed=2**62 + 7),
    replace(PARAMS, top_k=4, top_p=0.8, min_p=0.1, stop_token_ids=tuple(range(30, 60)), seed=1),
)
AHEAD = [(1, 0), (4, 1)]


def group(policy: Policy, prompt: list[int], params: SamplingParams, first: int) -> Any:
    return make_groups(policy, [PromptInputs(tuple(prompt))], params, 128, first=first)[0]


def outcome(sequence: RunningSequence) -> tuple[Any, ...]:
    return sequence.generated, sequence.logprobs, sequence.finish_reason


def engine_of(policy: Policy, ahead: tuple[int, int], **sizes: int) -> RolloutEngine:
    engine = RolloutEngine(policy, page_size=4, **{"num_pages": 60, **sizes})
    engine._repeats, engine._ahead = ahead
    return engine


@pytest.fixture(scope="module")
def expected(policy: Policy) -> list[Any]:
    """Each group, alone."""
    found = []
    for prompt, params in zip(PROMPTS, EACH, strict=True):
        out = RolloutEngine(policy).generate([prompt], params)
        found += [(list(c.token_ids), list(c.logprobs), c.finish_reason) for c in out]
    return found


def run(
    policy: Policy,
    engine: RolloutEngine,
    each: tuple[SamplingParams, ...] = EACH,
    cancels: Mapping[int, int] = {},
) -> list[RunningSequence]:
    """Add a group every second step and cancel sequences, {index: after the step}."""
    ended: list[int] = []
    step = 0
    while step < 6 or len(ended) < 9:
        if step in (0, 2, 4):
            engine.add(group(policy, PROMPTS[step // 2], each[step // 2], step // 2 * 3))
        if any(not s.finished for s in engine.sequences):
            ended += engine.step()
        for index, after in cancels.items():
            if step == after and not engine.sequences[index].finished:
                engine.cancel(index)
                assert not engine.sequences[index].pages
        step += 1
        if all(s.finished for s in engine.sequences) and len(engine.sequences) == 9:
            break
    sequences = list(engine.sequences)
    assert engine.pages_in_use == 0
    engine.finish()
    assert engine.stats.sequences == 9
    return sequences


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("sizes", [{}, {"num_pages": 14, "max_batch_size": 4}], ids=str)
def test_groups_with_parameters_of_their_own(
    policy: Policy, expected: list[Any], ahead: tuple[int, int], sizes: dict[str, int]
) -> None:
    sequences = run(policy, engine_of(policy, ahead, **sizes))
    assert [outcome(s) for s in sequences] == expected


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize(
    ("cancels", "sizes"),
    [
        ({0: 0}, {}),
        ({0: 0, 1: 0, 2: 0}, {}),
        ({0: 1, 1: 1}, {"max_batch_size": 2, "max_prefill_tokens": 6}),
        ({7: 5, 3: 4}, {"max_batch_size": 2, "max_prefill_tokens": 6}),
    ],
    ids=str,
)
def test_a_cancelled_sequence_changes_no_other(
    policy: Policy,
    expected: list[Any],
    ahead: tuple[int, int],
    sizes: dict[str, int],
    cancels: dict[int, int],
) -> None:
    sequences = run(policy, engine_of(policy, ahead, **sizes), cancels=cancels)
    for sequence, wanted in zip(sequences, expected, strict=True):
        if sequence.finish_reason == "cancelled":
            assert sequence.index in cancels
            assert sequence.generated == wanted[0][: len(sequence.generated)]
        else:
            assert outcome(sequence) == wanted
    assert any(s.finish_reason == "cancelled" for s in sequences)


def test_what_does_not_go_together_is_refused(policy: Policy) -> None:
    engine = engine_of(policy, (1, 0), num_pages=8)
    engine.add(group(policy, PROMPTS[0], PARAMS, 0))
    with pytest.raises(UserError, match="KV cache too small"):
        engine.add(group(policy, PROMPTS[1], PARAMS, 3))
    engine.finish()
    drafted = RolloutEngine(policy, speculation="text")
    drafted.add(group(policy, PROMPTS[0], PARAMS, 0))
    with pytest.raises(UserError, match="with speculation"):
        drafted.add(group(policy, PROMPTS[0], replace(PARAMS, top_k=3), 3))
    drafted.finish()
    assert len(drafted.generate(PROMPTS[:1], PARAMS)) == 3


@pytest.mark.parametrize("ahead", AHEAD)
def test_an_endless_call_keeps_nothing_of_ended_sequences(
    policy: Policy, expected: list[Any], ahead: tuple[int, int]
) -> None:
    engine = engine_of(policy, ahead, max_batch_size=4)
    for turn in range(4):
        first = 9 * turn
        for number, prompt in enumerate(PROMPTS):
            engine.add(group(policy, prompt, EACH[number], first + 3 * number))
        cancelled = first + turn
        if turn:
            engine.cancel(cancelled)
            engine.forget(cancelled)
        found: dict[int, Any] = {}
        while engine.num_unfinished:
            for index in engine.step():
                if index != cancelled or not turn:
                    found[index - first] = outcome(engine.sequences[index])
                    engine.forget(index)
        missing = {turn} if turn else set()
        assert found == {i: x for i, x in enumerate(expected) if i not in missing}
        assert engine.pages_in_use == 0
    assert len(engine.sequences) == 36
    # Launched ahead, the last draws of a turn are dropped in the next one.
    assert not any(sequence.generated for sequence in engine.sequences[:27])
    engine.finish()


def test_reserved_pages_do_not_follow_the_first_prompt(policy: Policy) -> None:
    engine = RolloutEngine(policy, max_batch_size=3, page_size=4)
    assert engine.reserve() == 3 * 128 // 4
    engine.add(group(policy, PROMPTS[0], PARAMS, 0))
    engine.add(group(policy, PROMPTS[1], replace(PARAMS, max_tokens=128), 3))
    engine.finish()
    assert engine.reserve() == 96, "the same cache again"
