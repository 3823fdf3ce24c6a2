"""The benchmarks of a step, tried out on the CPU: their parts are those of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jetrl.bench._flow import Choices, Flow, policy_of
from jetrl.bench._load import Load, flops
from jetrl.bench.shapes import SHAPES
from jetrl.bench.step import compare, main, measure
from jetrl.bench.train import measure as measure_training
from jetrl.errors import UserError
from jetrl.models.families import ModelConfig

LOAD = Load(prompts=2, samples=2, prompt_length=20, response_length=12)
CHOICES = Choices("tiny", "cpu", None, 1e-3, None, None, {})


def test_flops_of_a_step_by_hand() -> None:
    """Every product of the tiny model, token by token."""
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


def test_a_row_of_an_earlier_run_is_compared_with(tmp_path: Path, capsys: Any) -> None:
    base = measure(policy_of("bf16", CHOICES), LOAD, CHOICES, limit=1e12)
    earlier = {"benchmark": "step", "device": "a card", "command": "jetrl bench step"}
    file = tmp_path / "bf16.json"
    file.write_text(json.dumps({**earlier, "date": "2026-11-21", "rows": [base]}))
    words = "--shape tiny --device cpu --plan unified --prompts 2 --samples 2 --prompt-length 20"
    main([*words.split(), "--response-length", "12", "--beside", str(file)])
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["bf16", "unified"]
    assert "times bf16: {'rollout':" in out
    file.write_text(json.dumps({"benchmark": "train", "device": "a card"}))
    with pytest.raises(UserError, match="jetrl bench step on a"):
        main(["--device", "cpu", "--beside", str(file)])


def test_the_training_phase_compares_all_tokens() -> None:
    policy = policy_of("unified", CHOICES)
    row = measure_training(policy, LOAD, CHOICES, limit=1e12, profiled=False)
    assert (row["different"], row["compared_tokens"]) == (0, 48)


def test_a_micro_batch_holds_the_sequences_that_were_asked_for() -> None:
    choices = Choices("tiny", "cpu", 1, 1e-3, 70, None, {"updates_per_step": 1})
    flow = Flow(policy_of("bf16", choices), LOAD, choices)
    flow.fit()
    assert flow.chosen["micro_batch_tokens"] == 64
    assert flow.trainer.micro_batch_size.tokens == 64


def test_words_that_do_not_fit_are_named(tmp_path: Path, capsys: Any) -> None:
    line = "--shape tiny --device cpu --layers 1 --plan bf16 --prompts 1 --response-length 8"
    words = line.split()
    with pytest.raises(UserError, match=r"train\.nosuch"):
        main([*words, "--train", "nosuch=1"])
    with pytest.raises(UserError, match=r"train\.lr"):
        main([*words, "--train", "lr"])
    with pytest.raises(UserError, match="no such file"):
        main([*words, "--beside", str(tmp_path / "none.json")])
    with pytest.raises(SystemExit):
        main([*words, "--load", "8x8x256"])
    assert "--load: invalid" in capsys.readouterr().err
