#!/usr/bin/env python3
"""On-policy distillation in small, on a CPU: the demo's model teaches what it was before RL.

    python -m benchmarks.distillation --out results.json      seeds 1, 2 and 3

The teacher is the demo after 15 steps of GRPO, the student its weights before the first. The
student learns in two ways, with as many samples, updates and the same rate: on its own samples
(algorithm.name = opd), and by supervised training on the teacher's. A seed is that of prompts and
draws.

A first setting taught nothing with seed 1, after which it was given up: students of one layer and
100 supervised updates, which began at 4%, at a rate of 1e-3 without a warm-up (its result:
distillation_one_layer.json). Set before the first run of this one:

- Measure: accuracy on the 180 held-out sums, 4 answers each at temperature 1, of the final weights.
- Distillation is said to teach if it ends at least 10 points above its start with every seed. The
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
from jetrl.cli.main import main
from jetrl.precision import PrecisionPlan
from jetrl.runs.directory import RunDirectory
from jetrl.settings.loading import Settings
from jetrl.tasks.toys import Arithmetic
from jetrl.types import Prompt

PROMPTS, SAMPLES, STEPS, RATE = 64, 4, 20, 4e-4
ACCURACY = "eval/arithmetic/mean"
COMMON = """
    precision.preset=int8 checkpoint.every=0 report.enabled=false eval.samples=4
    eval.temperature=1.0 train.warmup_steps=5 train.schedule=constant train.updates_per_step=1
"""
TEACHER = "loop.steps=15 train.updates_per_step=2 eval.every=15"
OWN_SAMPLES = f"""
    algorithm.name=opd algorithm.aggregation=none sft.steps=0 loop.steps={STEPS}
    rollout.prompts_per_step={PROMPTS} rollout.samples_per_prompt={SAMPLES} train.lr={RATE}
    eval.every=10
"""
TEACHERS_SAMPLES = f"""
    sft.steps={STEPS} sft.examples_per_step={PROMPTS * SAMPLES} sft.lr={RATE} sft.warmup_steps=5
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


def student(folder: str, seed: int, start: Path, teacher: Path) -> dict[str, Any]:
    """Teach the start in both ways; return its accuracies and a curve."""
    own = [f"run.seed={seed}", f"model.path={start}", "model.config=none", "model.tokenizer=none"]
    words = [*OWN_SAMPLES.split(), *own, f"teacher.path={teacher}"]
    learned = curve(train(settings(folder, f"opd-{seed}", *words)).run_path)
    words = [*TEACHERS_SAMPLES.split(), *own, "task.options={}"]
    task = Copied(answers_of(teacher, seed))
    copied = train(settings(folder, f"copied-{seed}", *words), task=task)
    return {
        "seed": seed,
        "at_start": learned[0][ACCURACY],
        "own_samples": learned[-1][ACCURACY],
        "teachers_samples": curve(copied.run_path)[0][ACCURACY],
        "curve": learned,
    }


def run_all() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--teacher", type=Path, help="the run of a teacher that exists")
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        run = args.teacher or train(settings(folder, "teacher", *TEACHER.split())).run_path
        start = Path(folder, "start")
        main(["export", str(run / "checkpoints/step_000000"), str(start), "--dtype", "float32"])
        for seed in args.seeds:
            rows.append(student(folder, seed, start, run / "model"))
            print(rows[-1], flush=True)
            command = "python -m benchmarks.distillation"
            write_results(args.out, "distillation", command, rows, teacher=curve(run))


if __name__ == "__main__":
    run_all()
