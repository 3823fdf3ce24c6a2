"""A synthetic run: what a real one writes, with known numbers and hostile text in it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from jetrl.runs.metrics import eval_metric
from jetrl.runs.writer import RunWriter
from jetrl.settings.loading import Settings, load_config
from jetrl.types import Completion, Prompt, PromptInputs, Sample, Score, StepStats

PLAN = {"name": "unified", "rollout_linear": "fp8", "kv": "fp8", "first_layers_bf16": 0}
HOSTILE = "<script>alert('x')</script> & \"quoted\" \x1b[31mred $x_1^2$"


def settings_for(folder: Path, name: str = "demo", *overrides: str) -> Settings:
    return load_config(None, [f"run.dir={folder}", f"run.name={name}", *overrides])


def samples_of(step: int, num: int = 6) -> list[Sample]:
    draw = random.Random(step)
    return [
        Sample(
            prompt=Prompt(id=f"train-{k // 2}", text=f"{k + 3}+{step}=", answer=str(k + 3 + step)),
            group=k // 2,
            inputs=PromptInputs((5, 6, 7 + k)),
            completion=Completion(
                token_ids=(1, 2, 3),
                logprobs=tuple(math.log(draw.random()) for _ in range(3)),
                finish_reason="stop" if k else "length",
                text=HOSTILE if k == 1 else f"{k + 3 + step} because I can add",
            ),
            score=Score(float(k % 2), {"format": 0.5}),
            failure="timed out after 10 s" if k == 0 else "",
        )
        for k in range(num)
    ]


def metrics_of(step: int, *, mismatch: int = 0, evaluate: bool = False) -> dict[str, float]:
    """The metrics of an RL step of a run that goes well."""
    rise = 1 - math.exp(-step / 9)
    wobble = random.Random(step).uniform(-0.03, 0.03)
    metrics = {
        "reward/mean": 0.35 + 0.58 * rise + wobble,
        "reward/std": 0.45 * (1 - 0.6 * rise),
        "reward/zero_std_groups": 0.2 + 0.5 * rise,
        "response_length/mean": 14 - 6 * rise + 10 * wobble,
        "response_length/clip_ratio": 0.1 * (1 - rise),
        "policy/entropy": 1.1 - 0.8 * rise + wobble,
        "policy/grad_norm": 0.7 + 5 * abs(wobble),
        "policy/loss": wobble / 10,
        "mismatch/num_tokens": 4096,
        "mismatch/num_different": mismatch * (step % 7),
        "mismatch/mean_abs_logprob_diff": 0.02 * (mismatch > 0) * (1 + wobble),
        "timing/rollout_s": 2.1 - rise,
        "timing/update_s": 1.3 + wobble,
        "timing/checkpoint_s": 0.4 if step % 10 == 0 else 0.0,
        "timing/step_s": 4.2 - rise,
        "throughput/rollout_tokens_per_s": 1900 + 9000 * wobble,
        "memory/peak_gib": 0.8,
    }
    if evaluate:
        metrics[eval_metric("arithmetic", "mean")] = min(1.0, 0.42 + 0.53 * rise)
        metrics[eval_metric("arithmetic", "pass_at_k")] = min(1.0, 0.55 + 0.43 * rise)
    return metrics


@pytest.fixture
def synthetic() -> SimpleNamespace:
    """This file's functions and constants: in importlib mode a test cannot import them."""
    names = ("PLAN", "HOSTILE", "settings_for", "samples_of", "metrics_of")
    return SimpleNamespace(**{name: globals()[name] for name in names})


@pytest.fixture
def create(tmp_path: Path) -> Callable[..., RunWriter]:
    """Creates or resumes a run directory in tmp_path."""

    def make(*overrides: str, resume: bool = False, **plan: object) -> RunWriter:
        settings = settings_for(tmp_path, "demo", *overrides)
        return RunWriter.create(settings, {**PLAN, **plan}, resume=resume)

    return make


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run directory of `steps` RL steps (and `sft` supervised ones); returns its path."""

    def make(
        name: str = "demo",
        steps: int = 30,
        sft: int = 0,
        mismatch: int = 0,
        evaluate: bool = True,
        end: str = "finished",
    ) -> Path:
        overrides = ("train.lr=1e-3", "task=arithmetic", f"loop.steps={steps}")
        settings = settings_for(tmp_path / "runs", name, *overrides)
        with RunWriter.create(settings, PLAN) as run:
            with run.attempt(["jetrl", "train", "recipes/demo.toml"], {"device": "CPU"}) as attempt:
                for k in range(1, sft + 1):
                    run.write_step(StepStats(k, {"sft/loss": 3 * math.exp(-k / 20)}), phase="sft")
                if evaluate and steps:
                    run.write_step(StepStats(0, {eval_metric("arithmetic", "mean"): 0.42}))
                for step in range(1, steps + 1):
                    found = metrics_of(step, mismatch=mismatch, evaluate=evaluate and step % 5 == 0)
                    run.write_step(StepStats(step, found))
                    if step in (1, steps):
                        run.write_rollouts(step, samples_of(step))
                attempt.end(end)  # type: ignore[arg-type]
            return run.path

    return make
