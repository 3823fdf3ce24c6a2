#!/usr/bin/env python3
"""On-policy distillation in small, on a CPU: the demo's model teaches smaller ones its sums.

    python -m benchmarks.distillation --out results.json      seeds 1, 2 and 3

The teacher is the demo after 15 steps. A student has one layer instead of two and 100 supervised
updates. Then it learns from the teacher in two ways, with as many samples, updates and the same
rate: on its own samples (algorithm.name = opd), and by supervised training on the teacher's.

Set before the first run:

- Measure: accuracy on the 180 held-out sums, 4 answers each at temperature 1, of the final weights.
- Distillation is said to teach if every student ends at least 10 points above its start. The
  standard error of one accuracy is below 2 points.
- One way is said to be better than the other only if it ends higher with all three seeds.
- Check, without which nothing is shown: 0 different tokens in every run.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, write_results

from jetrl import Policy, RolloutEngine, SamplingParams, load_config, train
from jetrl.loop import sft
from jetrl.precision import PrecisionPlan
from jetrl.runs.directory import RunDirectory
from jetrl.settings.loading import Settings
from jetrl.tasks.toys import Arithmetic
from jetrl.types import Prompt

PROMPTS, SAMPLES, STEPS, RATE = 64, 4, 30, 1e-3
ACCURACY = "eval/arithmetic/mean"
COMMON = """
    precision.preset=int8 checkpoint.every=0 report.enabled=false eval.samples=4
    eval.temperature=1.0 train.warmup_steps=0 train.schedule=constant train.updates_per_step=1
"""
TEACHER = "loop.steps=15 train.updates_per_step=2 train.warmup_steps=5 eval.every=15"
STUDENT = f"""
    model.config.num_hidden_layers=1 sft.steps=100 sft.until=none eval.every={STEPS} loop.steps=0
"""
OWN_SAMPLES = f"""
    algorithm.name=opd algorithm.aggregation=none sft.steps=0 loop.steps={STEPS}
    rollout.prompts_per_step={PROMPTS} rollout.samples_per_prompt={SAMPLES} train.lr={RATE}
    eval.every=10
"""
TEACHERS_SAMPLES = f"""
    sft.steps={STEPS} sft.examples_per_step={PROMPTS * SAMPLES} sft.lr={RATE} sft.warmup_steps=0
    sft.until=none eval.every={STEPS} loop.steps=0
"""
OPTIONS: dict[str, Any] = {"max_operand": 29, "test_share": 0.2}


class Copied(Arithmetic):
    """The demo's sums, with answers of the teacher as demonstrations."""

    def __init__(self, answers: dict[str, list[str]]) -> None:
        super().__init__(**OPTIONS)
        self._answers = {key: itertools.cycle(own) for key, own in answers.items()}

    def demonstration(self, prompt: Prompt) -> str:
        return next(self._answers[prompt.id])


def settings(folder: str, name: str, *words: str) -> Settings:
    return load_config("demo", [*COMMON.split(), f"run.dir={folder}", f"run.name={name}", *words])


def stored(model: Path) -> list[str]:
    """Return the settings of a model that an earlier run has written."""
    return [f"model.path={model}", "model.config=none", "model.tokenizer=none"]


def answers_of(teacher: Path, seed: int) -> dict[str, list[str]]:
    """Return answers that the teacher draws, as many as a student draws itself."""
    policy = Policy.from_pretrained(teacher, plan=PrecisionPlan.preset("int8"), device="cpu")
    prompts = list(Arithmetic(**OPTIONS).prompts("train"))
    n = -(-PROMPTS * SAMPLES * STEPS // len(prompts))
    tokenizer = policy.tokenizer
    assert tokenizer is not None
    asked = [tokenizer.encode(prompt.text, add_special_tokens=False) for prompt in prompts]
    drawn = RolloutEngine(policy).generate(asked, SamplingParams(n=n, max_tokens=12, seed=seed))
    texts = [str(tokenizer.decode([*d.token_ids], skip_special_tokens=True)) for d in drawn]
    return {prompt.id: texts[i * n : (i + 1) * n] for i, prompt in enumerate(prompts)}


def curve(run: Path) -> list[Row]:
    """Return accuracies, KL to the teacher and different tokens of a run, by step."""
    names = (ACCURACY, "teacher/kl", "mismatch/num_tokens", "mismatch/num_different")
    return [
        {"step": line["step"], **{name: line[name] for name in names if name in line}}
        for line in RunDirectory.open(run).metrics("rl")
    ]


def student(folder: str, seed: int, teacher: Path) -> dict[str, Any]:
    """Teach a student of a seed in both ways; return its accuracies and a curve."""
    own = [f"run.seed={seed}"]
    start = sft(settings(folder, f"start-{seed}", *STUDENT.split(), *own))
    assert start.model_path is not None
    own += stored(start.model_path)
    words = [*OWN_SAMPLES.split(), *own, f"teacher.path={teacher}"]
    learned = train(settings(folder, f"opd-{seed}", *words))
    words = [*TEACHERS_SAMPLES.split(), *own]
    task = Copied(answers_of(teacher, seed))
    copied = train(settings(folder, f"copied-{seed}", *words, "task.options={}"), task=task)
    by_step = curve(learned.run_path)
    return {
        "seed": seed,
        "at_start": by_step[0][ACCURACY],
        "own_samples": by_step[-1][ACCURACY],
        "teachers_samples": curve(copied.run_path)[0][ACCURACY],
        "curve": by_step,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--teacher", type=Path, help="the run of a teacher that exists")
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        run = args.teacher or train(settings(folder, "teacher", *TEACHER.split())).run_path
        for seed in args.seeds:
            rows.append(student(folder, seed, run / "model"))
            print(rows[-1], flush=True)
            command = "python -m benchmarks.distillation"
            write_results(args.out, "distillation", command, rows, teacher=curve(run))


if __name__ == "__main__":
    main()
