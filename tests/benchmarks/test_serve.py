"""The benchmarks of the endpoint and of distillation, tried out on the CPU."""

from __future__ import annotations

import argparse

from benchmarks.flow import Choices, policy_of
from benchmarks.loads import Load

from benchmarks import serve, train, vllm_serve
from jetrl.rollout.engine import RolloutEngine

CHOICES = Choices("tiny", "cpu", 1, 1e-3, 48, None, {})


def test_the_server_answers_as_generate_does() -> None:
    args = argparse.Namespace(prompt_length=8, response_length=6, each=2, rounds=1)
    rows = serve.measure(policy_of("int8", CHOICES), 3, args)
    assert [(row["answers"], row["requests"], row["different"]) for row in rows] == [
        ("whole", 6, 0),
        ("stream", 6, 0),
    ]
    for row in rows:
        assert 6 * 3 <= row["tokens"] <= 6 * 6
        assert row["of_generate"] > 0


def test_another_server_gets_the_same_load() -> None:
    policy = policy_of("int8", CHOICES)
    asked = serve.Asked.random(policy.config.vocab_size, 6, 8, 6, return_tokens_as_token_ids=True)
    engine = RolloutEngine(policy, max_batch_size=3, num_pages=4, max_model_len=14)
    with serve.serving(engine, 3) as port:
        rows = list(vllm_serve.measure(port, asked, clients=3, rounds=1))
    assert [(row["answers"], row["requests"]) for row in rows] == [("whole", 6), ("stream", 6)]
    assert all(row["tokens"] == sum(asked.lengths) for row in rows)


def test_the_parts_of_an_update_that_learns_from_a_teacher() -> None:
    choices = Choices("tiny", "cpu", 1, 1e-3, 48, None, {}, teacher="vocabulary")
    load = Load(prompts=2, samples=2, prompt_length=8, response_length=16)
    row = train.measure(policy_of("int8", choices), load, choices, 1e12, profiled=False)
    assert (row["teacher"], row["different"], row["compared_tokens"]) == ("vocabulary", 0, 64)
    parts = row["distillation_ms"]
    whole = parts["KL forward"] + parts["KL backward"]
    assert min(parts.values()) > 0
    assert parts["softmaxes"] < whole < parts["backward"] + parts["KL forward"]
    assert whole + parts["teacher forward"] < parts["update"]
