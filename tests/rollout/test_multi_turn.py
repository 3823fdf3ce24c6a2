"""Turns: an environment answers in the middle of a completion, and the bits still agree."""

from __future__ import annotations

import random

import pytest

from jetrl.errors import UserError
from jetrl.models.policy import Policy
from jetrl.models.tiny import make_tiny
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.options import EnvironmentReply, GenerateOptions
from jetrl.types import SamplingParams

PROMPTS = ["12+30=", "what is it?", "a", "the last of the four prompts"]
STOP_IDS = tuple(range(5, 45))  # of 98: a turn is a few tokens long


class Scripted:
    """Answers `==n` to turn n of sequence s, up to three times, with `delay` answers held back."""

    def __init__(
        self, max_turns=4, delay=0, fails=(), reply=lambda s, n: "=" * (1 + s % 5) + str(n)
    ):
        self.max_turns = max_turns
        self.delay, self.fails, self.reply = delay, fails, reply
        self.asked, self.open, self.closed = [], [], 0
        self.random = random.Random(0)

    def ask(self, sequence, turns, completion):
        self.asked.append((sequence, turns, completion))
        self.open.append((sequence, len(turns)))
        self.random.shuffle(self.open)

    def answers(self, wait):
        keep = self.delay if not wait else max(0, len(self.open) - 1)
        ready, self.open = self.open[keep:], self.open[:keep]
        return [self.answer(*item) for item in ready]

    def answer(self, sequence, turn):
        if sequence in self.fails:
            return EnvironmentReply(sequence, None, "the tool is broken")
        return EnvironmentReply(
            sequence, self.reply(sequence, turn) if turn < sequence % 3 + 1 else None
        )

    def close(self):
        self.closed += 1


def generate(policy, environment, max_tokens=40, n=3, seed=3, repeats=1, ahead=0, **sizes):
    params = SamplingParams(n=n, max_tokens=max_tokens, seed=seed, stop_token_ids=STOP_IDS)
    engine = RolloutEngine(policy, **sizes)
    engine._repeats, engine._ahead = repeats, ahead  # as on a GPU
    out = engine.generate(PROMPTS, params, options=GenerateOptions(environment=environment))
    assert engine.pages_in_use == 0
    return out, engine


def test_turns_texts_and_spans_tell_the_same_story(policy):
    environment = Scripted()
    out, _ = generate(policy, environment)
    assert environment.closed == 1
    decode = policy.tokenizer.decode
    for index, completion in enumerate(out):
        asked = [(turns, text) for s, turns, text in environment.asked if s == index]
        assert [len(turns) for turns, _ in asked] == list(range(len(asked)))
        replied = completion.turns[:-1]
        assert len(replied) == len(completion.environment)
        bounds = [0, *(p for span in completion.environment for p in span), None]
        for k, turn in enumerate(replied):
            assert asked[k] == (completion.turns[:k], turn.completion)
            start, end = completion.environment[k]
            assert decode(completion.token_ids[start:end]) == turn.reply
        said = [
            decode(
                completion.token_ids[bounds[2 * k] : bounds[2 * k + 1]], skip_special_tokens=True
            )
            for k in range(len(completion.turns))
        ]
        assert said == [turn.completion for turn in completion.turns]
        assert completion.text == "".join(t.completion + (t.reply or "") for t in completion.turns)


def test_a_reply_that_leaves_no_room_cuts_the_completion_off(policy):
    environment = Scripted(reply=lambda s, n: "x" * 40)
    out, _ = generate(policy, environment, max_tokens=40)
    stopped = [c for c in out if c.turns and c.finish_reason == "length"]
    assert stopped
    assert all(c.environment == () and len(c.turns) == 1 for c in out)


def test_a_reply_that_is_no_text_for_the_model_ends_its_own_completion(policy):
    unusable = {1: "\ud83d", 3: "日", 8: ""}
    wanted, _ = generate(policy, Scripted(delay=2))
    script = Scripted()

    def reply(sequence, turn):
        return unusable.get(sequence, script.reply(sequence, turn))

    out, _ = generate(policy, Scripted(delay=2, fails={4}, reply=reply))
    assert out[4].failure == "the tool is broken"
    assert (out[4].finish_reason, out[4].environment) == ("stop", ())
    failed = [index for index, completion in enumerate(out) if completion.unusable_reply]
    assert failed == [index for index in unusable if wanted[index].environment]
    assert failed, "none of these was asked"
    for index, completion in enumerate(out):
        if index in failed:
            assert "reply" in completion.failure
            assert completion.failure.isprintable()
            assert (completion.finish_reason, completion.environment) == ("stop", ())
            assert completion.token_ids == wanted[index].token_ids[: len(completion.token_ids)]
        elif index != 4:
            assert completion == wanted[index]


def test_special_tokens_in_a_reply_are_text_unless_they_are_asked_for(make_policy):
    policy = make_policy()
    replies = Scripted(reply=lambda s, n: "a<eos>b")

    def told():
        out, _ = generate(policy, replies)
        return {c.token_ids[slice(*span)] for c in out for span in c.environment}

    (as_text,) = told()
    assert policy.tokenizer.decode(as_text) == "a<eos>b"
    assert len(as_text) == 7
    policy.plain_text = "none"
    assert {len(tokens) for tokens in told()} == {3}


def test_a_reply_with_the_place_of_an_image_fails(tmp_path):
    policy = Policy.from_pretrained(make_tiny(tmp_path / "model", "qwen2_5_vl"), "unified")
    replies = Scripted(reply=lambda s, n: "look: <|image_pad|>")
    out, _ = generate(policy, replies)
    assert any(c.environment for c in out)
    assert not any(c.failure for c in out)  # it is text
    policy.plain_text = "none"
    out, _ = generate(policy, replies)
    failures = {c.failure for c in out if c.unusable_reply}
    assert failures == {"the environment's reply has the place of an image or a video"}
    assert not any(c.environment for c in out)


def test_what_cannot_be_written_is_a_user_error_and_frees_the_pages(policy, make_policy):
    environment = Scripted(reply=lambda s, n: {"role": "tool", "content": "42"})
    engine = RolloutEngine(policy)
    params = SamplingParams(n=3, max_tokens=40, stop_token_ids=STOP_IDS)
    with pytest.raises(UserError, match=r"reply .*'tool'.* no chat template"):
        engine.generate(PROMPTS, params, options=GenerateOptions(environment=environment))
    assert environment.closed == 1
    assert engine.pages_in_use == 0
    with pytest.raises(UserError, match=r"task with turns.*no tokenizer"):
        RolloutEngine(make_policy(tokenizer=False)).generate(
            [[5, 6]], params, options=GenerateOptions(environment=Scripted())
        )
