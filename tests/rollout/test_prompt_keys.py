"""A prompt is what its record hashes: equal tokens with another key share nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from jetrl.models.policy import Policy
from jetrl.rollout import speculation
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.options import GenerateOptions, Partial
from jetrl.rollout.sequence import sequence_keys
from jetrl.session.prompt_order import PromptDigest
from jetrl.session.ranks import samples_digest
from jetrl.session.sampling import EncodedPrompt
from jetrl.training.packing import pack, shares_prompts
from jetrl.types import Completion, Prompt, PromptInputs, Sample, SamplingParams, Score

TOKENS = tuple(range(5, 25))


@dataclass(frozen=True)
class Pictured(PromptInputs):
    """Tokens and a picture, as the inputs of an image model would be."""

    picture: bytes = b""

    def content(self) -> bytes:
        return super().content() + self.picture


TEXT = PromptInputs(TOKENS)
CAT, DOG = Pictured(TOKENS, picture=b"cat"), Pictured(TOKENS, picture=b"dog")
PARAMS = SamplingParams(max_tokens=12, temperature=0.9, ignore_eos=True, seed=2)


def samples_of(*prompts: PromptInputs) -> list[Sample]:
    done = Completion((1, 2), (-0.5, -0.5), "stop")
    return [Sample(Prompt(id="p", text="?"), 0, inputs, done, Score(0.0)) for inputs in prompts]


def test_the_first_tokens_keep_what_belongs_to_them() -> None:
    assert CAT.first(8) == Pictured(TOKENS[:8], picture=b"cat")
    assert len({prompt.first(8).key() for prompt in (TEXT, CAT, DOG)}) == 3


def test_random_keys_are_of_the_record() -> None:
    text, cat, dog, again = sequence_keys([TEXT, CAT, DOG, CAT], 2)
    assert len({*text, *cat, *dog, *again}) == 8, "the second cat is another occurrence"
    assert sequence_keys([CAT], 2) == [cat]


def test_the_engine_draws_and_continues_by_the_record(policy: Policy) -> None:
    engine = RolloutEngine(policy, page_size=8)
    tokens, text, cat, dog = engine.generate([list(TOKENS), TEXT, CAT, DOG], PARAMS)
    assert len({c.token_ids for c in (tokens, text, cat, dog)}) == 4
    assert engine.generate([TEXT], PARAMS) == [tokens]
    assert engine.generate([DOG, CAT], PARAMS) == [dog, cat]
    # One at a time: the second prompt is cut off, and keeps its record.
    single = RolloutEngine(policy, page_size=8, max_batch_size=1)
    partial = Partial(enough=1, version=3)
    single.generate([CAT, DOG], PARAMS, options=GenerateOptions(partial=partial))
    (left,) = single.unfinished.values()
    assert left.inputs is DOG


def groups_of(policy: Policy, monkeypatch: pytest.MonkeyPatch, *prompts: PromptInputs) -> set[int]:
    """Return the keys under which the text of prompts is kept for drafts."""
    groups: set[int] = set()

    def remember(text: Any, places: Any, tokens: Any, keys: Any, lag: int) -> None:
        groups.update(keys.tolist())

    monkeypatch.setattr(speculation, "remember", remember)
    engine = RolloutEngine(policy, page_size=8, speculation="text")
    engine.generate(prompts, PARAMS)
    drafts = engine._pool.speculation
    assert drafts is not None
    assert groups == {*drafts.text.group.tolist()} - {0}
    return groups


def test_drafts_are_of_the_record(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(groups_of(policy, monkeypatch, CAT, CAT)) == 1
    assert len(groups_of(policy, monkeypatch, TEXT, CAT, DOG)) == 3


def test_stems_are_of_the_record() -> None:
    cat, dog = (replace(prompt, token_ids=TOKENS * 7) for prompt in (CAT, DOG))  # a block, and more
    same, other = samples_of(cat, cat), samples_of(cat, dog)
    assert shares_prompts("auto", same)
    assert not shares_prompts("auto", other)
    for samples, ids in ((same, [0, 0]), (other, [0, 1])):
        (batch,) = pack(samples, 1000, share_prompts=True)
        assert batch.stem_ids is not None
        assert batch.stem_ids.tolist() == ids


def test_ranks_and_resumed_runs_compare_the_record() -> None:
    digests = {
        PromptDigest([EncodedPrompt(Prompt(id="p", text="?"), inputs)]).state()
        for inputs in (TEXT, CAT, DOG)
    }
    assert len(digests) == 3
    assert len({samples_digest(samples_of(inputs)) for inputs in (TEXT, CAT, DOG)}) == 3
