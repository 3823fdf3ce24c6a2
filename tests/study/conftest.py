"""A tiny study, run once for all tests: its commands run in this process, one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.study.processes import Child, Job

from jetrl.cli.main import main

TINY = """
[study]
name = "tiny"
title = "Pages and precision"
question = "Do page sizes matter?"
seeds = [0, 1]
out = "OUT"
points = 2

[settings]
recipe = "demo"
task.options = { max_operand = 4, digits = 1, mistakes = 0.5 }
model.config.num_hidden_layers = 1
model.config.max_position_embeddings = 64
rollout.prompts_per_step = 4
rollout.samples_per_prompt = 4
rollout.max_tokens = 6
eval.every = 0
train.lr = 1e-3
train.warmup_steps = 0
train.updates_per_step = 1
checkpoint.every = 2
loop.steps = 3
report.enabled = false

[start]
seed = 0
sft.steps = 60  # enough for rewards that vary
sft.until = "none"
sft.examples_per_step = 16
sft.lr = 3e-3

[arms.unified]
precision.preset = "unified"
twin = true

[arms.pages]
label = "pages of 8"
precision.preset = "unified"
rollout.page_size = 8
rollout.max_batch_size = 5
twin = true

[eval]
prompts = 4
samples = 2
exported = true

[collapse]
share = 0.0  # no run of three steps collapses
"""


class PoolInThisProcess:
    """A stand-in for the pool of processes: a command is done before `start` returns."""

    def __init__(self, cards: Sequence[str], jobs: int, threads: int) -> None:
        self.children: list[Child] = []
        self.commands: list[list[str]] = []

    has_place = property(lambda self: not self.children)

    def warm_up(self, most: int) -> None:
        pass

    def start(self, job: Job) -> None:
        words = list(job.words)
        self.commands.append(words)
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with (
            open(job.log, "a", encoding="utf-8") as log,
            contextlib.redirect_stdout(log),
            contextlib.redirect_stderr(log),
        ):
            code = self.run(words)
        process: Any = SimpleNamespace(returncode=code, pid=0, poll=lambda: code)
        self.children.append(Child(job, None, process))

    def run(self, words: list[str]) -> int:
        return main(words)

    def ended(self) -> list[Child]:
        gone, self.children = self.children, []
        return gone

    def stop(self) -> None:
        pass


@pytest.fixture(scope="package")
def tiny_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study file of a study that has been run; its folder is `out` beside it."""
    folder = tmp_path_factory.mktemp("study")
    file = folder / "tiny.toml"
    file.write_text(TINY.replace("OUT", str(folder / "out")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.study.running.Pool", PoolInThisProcess)
        patch.setattr("benchmarks.study.scheduler.POLL_S", 0.0)
        assert main(["study", str(file)]) == 0
    return file
