"""Users pass to `generate` prompts as text, messages or tokens, and bad ones are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from jetrl.errors import UserError
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.options import GenerateOptions
from jetrl.types import Prompt, SamplingParams

PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(policy):
    return RolloutEngine(policy, num_pages=30, page_size=8)


def test_kinds_of_prompts_are_one(engine, policy):
    ids = policy.tokenizer.encode("12+7=", add_special_tokens=False)
    as_ids = engine.generate([ids], PARAMS)
    assert engine.generate(["12+7="], PARAMS) == as_ids
    assert engine.generate([Prompt(id="q", text="12+7=")], PARAMS) == as_ids
    assert engine.generate(np.array([ids]), PARAMS) == as_ids
    assert engine.generate([], PARAMS) == []
    params = SamplingParams(stop_token_ids=torch.tensor([5]), temperature=torch.tensor(0.5))
    assert params == SamplingParams(stop_token_ids=(5,), temperature=0.5)
    rows = [policy.logprobs(of)[0].tolist() for of in ([ids], torch.tensor([ids]), iter([ids]))]
    assert rows[0] == rows[1] == rows[2] == policy.logprobs([ids], temperature=0)[0].tolist()


@pytest.mark.parametrize("length", [1, 3])
def test_stop_strings_cut_the_text_and_keep_the_tokens(engine, length):
    """A token is a character here, so `length` is also how many tokens the string spans."""
    (free,) = engine.generate(["ab"], PARAMS)
    stop = free.text[6 : 6 + length]
    at = free.text.index(stop)
    params = SamplingParams(max_tokens=16, ignore_eos=True, stop=("never there", stop))
    (out,) = engine.generate(["ab"], params)
    assert out.finish_reason == "stop"
    assert out.text == free.text[:at]
    assert out.token_ids == free.token_ids[: len(out.token_ids)]
    assert len(out.token_ids) < 16


@pytest.mark.parametrize(
    "prompts, message",
    [
        ([[5], []], "prompt 1 is empty"),
        ([[5], [6, 98]], r"prompt 1: token id 98 is outside .* \[0, 98\)"),
        ([[5], [-1]], "prompt 1: token id -1"),
        ([[5], [7] * 128], "prompt 1 has 128 tokens.*context of 128"),
        ([5, 6], "prompt 0: 5 is not a list of token ids"),
        ([[5], [6.5]], "prompt 1: .* is not a list of token ids"),
        ("text", "put the one prompt into a list"),
        (BatchEncoding({"input_ids": [[5]]}), "not a table: give its 'input_ids'"),
        (["ok", "é"], "prompt '1'.*no token for 'é'"),
        ([Prompt(id="q7", messages=({"role": "user", "content": "a"},))], "'q7'.*chat template"),
    ],
    ids=str,
)
def test_bad_prompts_are_named(engine, prompts, message):
    with pytest.raises(UserError, match=message):
        engine.generate(prompts, PARAMS)
    assert engine.pages_in_use == 0


def test_text_needs_a_tokenizer(make_policy):
    bare = RolloutEngine(make_policy(tokenizer=False))
    assert bare.generate([[5]], PARAMS)[0].text == ""
    with pytest.raises(UserError, match=r"prompt '0'.*tokenizer"):
        bare.generate(["ab"], PARAMS)
    with pytest.raises(UserError, match=r"stop strings .*tokenizer"):
        bare.generate([[5]], SamplingParams(stop=("x",)))
    with pytest.raises(UserError, match="stop_token_ids: token id 98"):
        bare.generate([[5]], SamplingParams(stop_token_ids=(98,)))


@pytest.mark.parametrize(
    "wrong",
    [
        *({"temperature": 1e-40}, {"top_k": 2**64}, {"n": 2.0}, {"max_tokens": "8"}, {"seed": 1.5}),
        *({"min_p": 1.0}, {"min_p": -0.1}, {"min_p": float("nan")}, {"top_p": float("nan")}),
        *({"temperature": None}, {"top_p": "1"}, {"stop": None}, {"stop_token_ids": [5.0]}),
    ],
    ids=str,
)
def test_parameters_that_nothing_could_be_drawn_with_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"SamplingParams: {name} must be"):
        SamplingParams(**wrong)


def test_a_cache_too_small_for_one_sequence(policy):
    engine = RolloutEngine(policy, num_pages=3, page_size=8)
    prompts = [[5] * 4, [6] * 10]
    assert len(engine.generate(prompts, SamplingParams(max_tokens=15))) == 2
    with pytest.raises(UserError, match=r"raise rollout.num_pages to at least 4"):
        engine.generate(prompts, PARAMS)


def test_sizes_that_no_engine_has_are_refused(policy):
    for wrong in ({"num_pages": 0}, {"max_batch_size": "8"}, {"page_size": 2.5}):
        (name,) = wrong
        with pytest.raises(UserError, match=f"{name} must be an integer of at least 1"):
            RolloutEngine(policy, **wrong)
    with pytest.raises(UserError, match="max_model_len 129: the model's context is 128"):
        RolloutEngine(policy, max_model_len=129)
    engine = RolloutEngine(policy, max_model_len=10)
    (out,) = engine.generate([[5] * 8], PARAMS)
    assert len(out.token_ids) == 2
    with pytest.raises(UserError, match=r"prompt 0 has 10 tokens.*context of 10"):
        engine.generate([[5] * 10], PARAMS)


def test_a_limit_for_each_completion(policy):
    engine = RolloutEngine(policy, page_size=8)
    params = SamplingParams(n=2, max_tokens=50, ignore_eos=True)
    out = engine.generate([[5, 6], [7]], params, options=GenerateOptions(max_tokens=[3, 1, 9, 2]))
    assert [len(c.token_ids) for c in out] == [3, 1, 9, 2]
    whole = engine.generate([[5, 6], [7]], params)
    assert all(
        w.token_ids[: len(c.token_ids)] == c.token_ids for w, c in zip(whole, out, strict=True)
    )
    for wrong in ([3, 1, 9], [3, 0, 9, 2]):
        with pytest.raises(UserError, match="max_tokens: 4 numbers"):
            engine.generate([[5, 6], [7]], params, options=GenerateOptions(max_tokens=wrong))
