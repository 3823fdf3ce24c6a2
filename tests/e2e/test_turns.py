"""A task with turns through whole runs: the calculator of the examples, with a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.small import metrics, without_last_checkpoint

from jetrl import load_config, train
from jetrl.runs.directory import RunDirectory

EXAMPLES = Path(__file__).parents[2] / "examples"
WORDS = """
    task.options.limit=10 sft.steps=25 sft.until=none sft.examples_per_step=16 sft.lr=1e-2
    rollout.prompts_per_step=4 rollout.samples_per_prompt=4 rollout.max_tokens=24 eval.prompts=4
    train.updates_per_step=1 checkpoint.every=1 checkpoint.keep_last=2 report.enabled=true
    model.config.num_hidden_layers=1
"""
TINY = [f"task.name={EXAMPLES / 'calculator_tool.py'}:CalculatorTool", *WORDS.split()]


def settings(path: Path, *overrides: str, name: str = "run") -> Any:
    words = [*TINY, f"run.dir={path}", f"run.name={name}", *overrides]
    return load_config(EXAMPLES / "calculator.toml", words)


def test_turns_are_exact_recorded_shown_and_resumed(tmp_path: Path) -> None:
    uncut = train(settings(tmp_path, "loop.steps=2", name="uncut"))
    run = RunDirectory.open(uncut.run_path)
    records = [record for step in (1, 2) for record in run.rollouts(step)]
    gone_on = [record for record in records if len(record["turns"]) > 1]
    assert gone_on, "no call of the calculator was written: train the test longer"
    for record in gone_on:
        for start, end in record["environment"]:
            assert record["logprobs"][start:end] == [0.0] * (end - start)
        for turn in record["turns"][:-1]:
            assert "<<" in turn["completion"]
            assert turn["reply"].endswith(".")
    for line in run.metrics("rl")[1:]:
        own = [r for r in records if r["step"] == line["step"]]
        told = sum(end - start for r in own for start, end in r["environment"])
        drawn = sum(len(r["token_ids"]) for r in own) - told
        assert line["mismatch/num_tokens"] == drawn
        assert line["mismatch/num_different"] == 0
        assert line["response_length/turns"] == sum(len(r["turns"]) for r in own) / len(own)
        assert line["response_length/sampled"] == drawn / len(own)
    assert 'class="reply">reply: ' in (uncut.run_path / "report.html").read_text()

    without_last_checkpoint(run.path, tmp_path / "cut")
    resumed = train(settings(tmp_path, "loop.steps=2", name="cut"), resume=True)
    assert metrics(resumed.run_path)[-1] == metrics(run.path)[-1]
