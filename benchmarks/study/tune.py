"""Which warm-up and which learning rate suit a ground of the studies: candidates side by side.

    python -m benchmarks.study.tune --out build/tune                  three minutes on one H200
    python -m benchmarks.study.tune --out build/tune --only 5m-program-64 --device cpu --minutes 20

A ground is a task with answers of a length. Each candidate is one `jetrl train` with a supervised
warm-up and then GRPO, its model drawn at random; as many as --jobs run at once on the device, and
when the time is over all are stopped. A row for each is printed and written to tune.json in the
folder: the supervised updates and their seconds, held-out accuracy after the warm-up and after the
last step that has one, the reward of the first and the last ten steps, and seconds of a step by
phase. A candidate that stopped early has its error in the row, and its console in NAME.log.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import torch

HERE = Path(__file__).resolve().parent
GROUNDS = {
    "program-64": ["task.name=program", "task.options.rounds=2", "rollout.max_tokens=80"],
    "program-512": ["task.name=program", "task.options.rounds=15", "rollout.max_tokens=520"],
    "program-2048": ["task.name=program", "task.options.rounds=62", "rollout.max_tokens=2080"],
    "product-64": ["task.name=multiplication", "task.options.digits=3", "rollout.max_tokens=96"],
    "product-512": ["task.name=multiplication", "task.options.digits=8", "rollout.max_tokens=520"],
    "product-2048": [
        "task.name=multiplication",
        "task.options.digits=17",
        "rollout.max_tokens=2160",
    ],
}
COMMON = [
    "model.tokenizer=characters",
    "task.options.mistakes=0.6",
    "task.workers=0",
    "sft.until=0.34",
    "sft.check_every=50",
    "sft.warmup_steps=50",
    "rollout.prompts_per_step=16",
    "rollout.samples_per_prompt=8",
    "rollout.keep_every=1000",
    "algorithm.name=grpo",
    "algorithm.aggregation=token_mean",
    "train.betas=[0.9,0.95]",
    "train.warmup_steps=5",
    "train.tokens_per_micro_batch=32768",
    "loop.steps=60",
    "eval.every=20",
    "eval.prompts=128",
    "eval.samples=2",
    "eval.temperature=1.0",
    "checkpoint.every=0",
    "report.enabled=false",
]
LOOKS = re.compile(r"held-out reward (\S+) after (\d+) supervised updates")
"""The line of a warm-up that has looked at held-out prompts."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A run to try.

    Attributes:
        size: The model: the name of a file in models/.
    """

    size: str
    ground: str
    sft_steps: int
    sft_examples: int
    sft_lr: float
    lr: float

    @property
    def name(self) -> str:
        """The name of the run."""
        return f"{self.size}-{self.ground}-{self.sft_examples}-{self.sft_lr:g}-{self.lr:g}"

    def words(self) -> list[str]:
        """Return its settings for the command line."""
        return [
            f"model.config={HERE / 'models' / self.size}.json",
            *COMMON,
            *GROUNDS[self.ground],
            f"sft.steps={self.sft_steps}",
            f"sft.examples_per_step={self.sft_examples}",
            f"sft.lr={self.sft_lr}",
            f"train.lr={self.lr}",
        ]


CANDIDATES = [
    Candidate("5m", "product-512", 2500, 32, 5e-4, 1e-4),
    Candidate("30m", "product-2048", 1500, 16, 5e-4, 5e-5),
    Candidate("5m", "product-2048", 2500, 16, 5e-4, 1e-4),
    Candidate("30m", "program-2048", 1000, 16, 5e-4, 5e-5),
    Candidate("5m", "program-2048", 2000, 16, 5e-4, 1e-4),
    Candidate("5m", "product-512", 2500, 64, 5e-4, 1e-4),
    Candidate("30m", "program-64", 800, 64, 5e-4, 5e-5),
    Candidate("30m", "product-64", 800, 64, 5e-4, 5e-5),
    Candidate("5m", "program-64", 800, 64, 1e-3, 1e-4),
    Candidate("5m", "product-64", 800, 64, 1e-3, 1e-4),
    Candidate("5m", "program-512", 800, 32, 1e-3, 1e-4),
    Candidate("30m", "program-512", 800, 32, 5e-4, 5e-5),
    Candidate("30m", "product-512", 1500, 32, 5e-4, 5e-5),
    Candidate("100m", "program-512", 800, 32, 3e-4, 2e-5),
    Candidate("100m", "product-64", 1500, 64, 3e-4, 2e-5),
]


@dataclasses.dataclass
class Trial:
    """A candidate that has begun."""

    candidate: Candidate
    process: subprocess.Popen[bytes]
    log: IO[bytes]


def begin(candidate: Candidate, out: Path, device: str, preset: str, more: list[str]) -> Trial:
    """Start the process of a candidate."""
    # Without a recipe the settings would be the demo's; an empty one gives the plain defaults.
    recipe = out / "empty.toml"
    recipe.touch()
    words = [f"run.name={candidate.name}", f"run.dir={out}", f"run.device={device}"]
    words += [f"precision.preset={preset}", *candidate.words(), *more]
    log = (out / f"{candidate.name}.log").open("wb")
    command = [sys.executable, "-m", "jetrl", "train", str(recipe), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    return Trial(candidate, process, log)


def work_off(args: argparse.Namespace, candidates: list[Candidate]) -> None:
    """Run candidates, as many at once as asked for, until all or the time is over."""
    end = time.monotonic() + 60 * args.minutes
    waiting, running = list(candidates), list[Trial]()
    try:
        while (waiting or running) and time.monotonic() < end:
            running = [trial for trial in running if trial.process.poll() is None]
            while waiting and len(running) < args.jobs:
                one = waiting.pop(0)
                running.append(begin(one, args.out, args.device, args.preset, args.more))
            time.sleep(0.5)
    finally:
        for trial in running:
            if trial.process.poll() is None:
                trial.process.terminate()
        for trial in running:
            try:
                trial.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                trial.process.kill()
                trial.process.wait()


def row_of(candidate: Candidate, out: Path) -> dict[str, Any]:
    """Return what came of a candidate, from its metrics."""
    row: dict[str, Any] = {"name": candidate.name, **dataclasses.asdict(candidate)}
    file = out / candidate.name / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    sft = [line for line in lines if "sft/loss" in line]
    steps = [line for line in lines if "reward/mean" in line]
    evals = [(line["step"], mean) for line in lines for mean in _eval_means(line)]
    if sft:
        row["sft_updates"] = sft[-1]["step"]
        row["sft_loss"] = round(sft[-1]["sft/loss"], 4)
        row["sft_update_s"] = round(statistics.median(one["timing/step_s"] for one in sft), 3)
    if evals:
        row["accuracy_at"] = {str(step): round(mean, 3) for step, mean in evals}
    if steps:
        rewards = [line["reward/mean"] for line in steps]
        row["steps"] = len(steps)
        row["reward_first"] = round(statistics.fmean(rewards[:10]), 3)
        row["reward_last"] = round(statistics.fmean(rewards[-10:]), 3)
        late = steps[len(steps) // 2 :]
        for key in ("timing/step_s", "timing/rollout_s", "response_length/mean"):
            values = [line[key] for line in late if key in line]
            if values:
                row[key.replace("/", "_")] = round(statistics.median(values), 3)
    log = out / f"{candidate.name}.log"
    console = log.read_text(errors="replace") if log.is_file() else ""
    row["sft_accuracy_at"] = {updates: float(mean) for mean, updates in LOOKS.findall(console)}
    if not steps:
        row["last_words"] = console.strip()[-300:]
    return row


def _eval_means(line: dict[str, Any]) -> list[float]:
    """Return the held-out means of a line of metrics."""
    return [
        value for key, value in line.items() if key.startswith("eval/") and key.endswith("/mean")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/tune"), help="folder of the runs")
    parser.add_argument("--only", nargs="+", default=[], help="beginnings of candidates' names")
    parser.add_argument("--minutes", type=float, default=3.0, help="all are stopped after these")
    parser.add_argument("--jobs", type=int, default=8, help="candidates at once")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--preset", default="bf16", help="precision preset of all candidates")
    parser.add_argument("more", nargs="*", metavar="KEY=VALUE", help="settings for all candidates")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    candidates = [
        one for one in CANDIDATES if not args.only or one.name.startswith(tuple(args.only))
    ]
    if not candidates:
        sys.exit(f"no candidate begins so; there are {', '.join(one.name for one in CANDIDATES)}")
    taken = [one.name for one in candidates if (args.out / one.name).exists()]
    if taken:
        sys.exit(f"{args.out / taken[0]} is there already: remove it, or take another --out")
    work_off(args, candidates)
    rows = [row_of(one, args.out) for one in candidates]
    for row in rows:
        print(
            json.dumps({key: value for key, value in row.items() if key not in ("size", "ground")})
        )
    results = {
        "benchmark": "study tuning",
        "command": " ".join(["python", "-m", "benchmarks.study.tune", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "rows": rows,
    }
    (args.out / "tune.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
