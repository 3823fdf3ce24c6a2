"""Whole runs on mixed tasks in an order by pass rate, and on a task that teaches nothing."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.small import SMALL, task_of, trained, without_last_checkpoint

from jetrl import load_config, train
from jetrl.cli.opening import open_policy
from jetrl.models.chat import encode_prompt
from jetrl.models.tiny import character_tokenizer
from jetrl.runs.directory import RunDirectory
from jetrl.runs.metrics import reproducible
from jetrl.types import Prompt

WORDS = "sft.steps=0 rollout.samples_per_prompt=2 rollout.max_tokens=4 train.updates_per_step=1"
TINY = [*SMALL, *WORDS.split(), "checkpoint.every=1", "checkpoint.keep_last=3"]
run = partial(trained, TINY)


def test_mixed_by_weight_in_an_order_by_pass_rate_and_resumed(tmp_path: Path) -> None:
    name = task_of(tmp_path, "return float(len(completion) % 2)")
    mixed = [
        "task=mix",
        f"task.options.tasks=[{{name='{name}', label='mine', weight=3}}, {{name='arithmetic'}}]",
        "data.order=pass_rate",
        "eval.every=3",
        "eval.prompts=2",
    ]
    uncut = run(tmp_path, "uncut", *mixed, "loop.steps=3")
    without_last_checkpoint(uncut.run_path, tmp_path / "cut")
    resumed = run(tmp_path, "cut", *mixed, "loop.steps=3", resume=True)
    records = [RunDirectory.open(r.run_path) for r in (uncut, resumed)]
    drawn = [[r["prompt_id"] for s in (2, 3) for r in record.rollouts(s)] for record in records]
    assert drawn[0] == drawn[1]
    last = [reproducible(record.metrics()[-1]) for record in records]
    assert last[0] == last[1]
    for step in records[0].rollout_steps():
        ids = [r["prompt_id"].partition("/")[0] for r in records[0].rollouts(step)]
        assert sorted(ids) == ["arithmetic"] * 2 + ["mine"] * 6
    for name in ("reward/task/mine", "response_length/task/arithmetic", "eval/mix/mean"):
        assert name in last[0]
    assert {"eval/mine/mean", "eval/arithmetic/pass_at_k"} <= set(last[0])


def test_a_run_that_learns_nothing_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = "task=" + task_of(tmp_path, "return 0.0")
    done = run(tmp_path, "idle", task, "loop.steps=6", "report.enabled=true")
    printed = capsys.readouterr().out
    words = "over 5 steps: every completion got the reward 0"
    assert printed.count(f"warning: {words}") == 1
    assert words in (done.run_path / "log.txt").read_text()
    page = (done.run_path / "report.html").read_text()
    assert "<h2>Warnings</h2>" in page
    assert words in page


def test_rows_that_changed_are_noticed_by_a_resumed_run(
    tmp_path: Path, caplog: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    file = tmp_path / "rows.jsonl"
    words = ("task=dataset", f"task.path={file}", "task.options.format=text")
    for steps, changed in ((1, {}), (2, {}), (3, {"answer": "9"})):
        assert "not those of the checkpoint" not in caplog.text
        file.write_text("".join(json.dumps(row | changed) + "\n" for row in rows))
        run(tmp_path, "cut", *words, f"loop.steps={steps}", resume=steps > 1)
    assert "not those of the checkpoint" in caplog.text
    assert "not those of the checkpoint" in capsys.readouterr().out


def test_epochs_become_steps_and_a_resume_may_ask_for_more(tmp_path: Path) -> None:
    task = "task=" + task_of(tmp_path, "return float(len(completion) % 2)")
    done = run(tmp_path, "epochs", task, "loop.epochs=0.4")  # of 20 prompts, 4 per step
    kept = load_config(done.run_path / "config.toml").loop
    assert (done.steps, kept.steps, kept.epochs) == (2, 2, 0.4)
    resumed = load_config(done.run_path / "config.toml", ["loop.steps=3"])
    assert (resumed.loop.epochs, train(resumed, resume=True).steps) == (None, 3)


def test_template_arguments_are_those_of_the_run_and_of_its_model(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}{% if not think %}=!{% endif %}"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "rows.json").write_text(json.dumps([{"prompt": "1+1", "completion": "2"}] * 4))
    words = [f"model.tokenizer={tmp_path}/tokenizer", f"task={tmp_path}/rows.json", "sft.steps=1"]
    words += ["task.options.checker=zero", "model.template_args.think=false", "loop.steps=1"]
    words += ["task.split=all", "task.eval_split=all"]  # of one prompt, none can be held out
    done = run(tmp_path, "args", *words)
    (asked,) = {tuple(r["prompt_token_ids"]) for r in RunDirectory.open(done.run_path).rollouts(1)}
    assert tokenizer.decode(asked) == "1+1=!"
    assert done.chats
    prompt = Prompt("0", messages=({"role": "user", "content": "1+1"},))
    for path in (done.run_path, done.model_path):
        assert encode_prompt(open_policy(path, None, "cpu").tokenizer, prompt).token_ids == asked
