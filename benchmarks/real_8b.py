r"""A real run of an 8B model on one GPU, from a Hugging Face directory to an export.

    python -m benchmarks.real_8b --shape qwen3-8b --work /dev/shm/jetrl --checkpoints /tmp/jetrl \
        --out benchmarks/results/h200/real_8b.json

Random weights are written as a directory (BF16). Then, each a program of its own: `jetrl train` for
a step, its checkpoint and the export that ends a run; `jetrl train --resume` for a second step, cut
after it; and `jetrl export` to FP8. The JSON has the seconds of each part, the CPU memory that each
took at most, and the planned against the measured peak of GPU memory in rollout and in update. It
is written as parts end and steps come, so what was measured stays if a later part is cut.
--checkpoints: a folder where one checkpoint has room (57 GB at 8B; --work takes 33 GB, and 8 more
for the FP8 export).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.commit import commit
from benchmarks.parity import make_policy
from benchmarks.shapes import SHAPES

from jetrl.memory.fitting import check_fits
from jetrl.memory.plan import OtherModels, Workload
from jetrl.models.source import model_config
from jetrl.models.tiny import character_tokenizer
from jetrl.settings.loading import load_config
from jetrl.tasks import get_task, read_prompts

GIB = 2**30
CLI = (sys.executable, "-u", "-m", "jetrl.cli.main")


class Program:
    """A command that runs and is watched; each line of its output is printed with its second.

    Attributes:
        anonymous_gib: The most CPU memory that the command had, without pages of files.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.command = "jetrl " + " ".join(arguments)
        print(f"$ {self.command}", flush=True)
        self._began = time.perf_counter()
        self._process = subprocess.Popen(
            [*CLI, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(os.environ, COLUMNS="120"),
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self.anonymous_gib = 0.0
        self.lines: list[tuple[float, str]] = []

    def run(self, until: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """Wait for the end of the command, or kill it once `until()` is true."""
        killed = False
        while self._process.poll() is None:
            self._look()
            if until():
                self._process.send_signal(signal.SIGKILL)
                self._process.wait()
                killed = True
            time.sleep(0.1)
        seconds = time.perf_counter() - self._began
        self._look()
        code = self._process.returncode
        assert killed or code == 0, f"{self.command} ended with {code}"
        return {
            "command": self.command,
            "seconds": round(seconds, 1),
            "cpu_memory_gib": round(self.anonymous_gib, 1),
            **({"killed": True} if killed else {}),
        }

    def second_of(self, text: str) -> float | None:
        """Return the second at which a line with `text` came."""
        return next((at for at, line in self.lines if text in line), None)

    def match(self, pattern: str) -> str | None:
        """Return the first group of the first line that matches."""
        matches = (re.search(pattern, line) for _, line in self.lines)
        return next((match[1] for match in matches if match), None)

    def _look(self) -> None:
        assert self._process.stdout is not None
        now = time.perf_counter() - self._began
        for line in (self._process.stdout.read() or b"").decode(errors="replace").splitlines():
            self.lines.append((round(now, 1), line))
            print(f"{now:7.1f}  {line}", flush=True)
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text()
        except OSError:
            return
        anonymous = re.search(r"RssAnon:\s+(\d+) kB", status)
        if anonymous:
            self.anonymous_gib = max(self.anonymous_gib, int(anonymous[1]) / 2**20)


def make_directory(shape: str, path: Path, device: str, layers: int | None) -> dict[str, float]:
    """Write the model directory and return the seconds that it took."""
    began = time.perf_counter()
    policy = make_policy(shape, "unified", device, layers)
    policy.tokenizer = character_tokenizer()
    policy.generation_config = {"eos_token_id": policy.tokenizer.eos_token_id}
    policy.save_pretrained(path)
    return {"make_s": round(time.perf_counter() - began, 1)}


def metrics_of(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    if not file.exists():
        return []
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    return [line for line in lines if "timing/step_s" in line and line["step"] > 0]


def planned(words: Sequence[str], device: str, program: Program) -> dict[str, Any]:
    """Return the memory plan that the run made from its settings and the free memory."""
    settings = load_config(words[0], list(words[1:]))
    config = model_config(settings)
    tokenizer = character_tokenizer()
    prompts = read_prompts(get_task(settings.task.name, **settings.task.options), "train")
    longest = max(len(tokenizer.encode(prompt.text or "")) for prompt in prompts)
    load = Workload.of(settings, config, longest)
    free_gib = program.match(r"of ([0-9.]+) GiB that were free")
    free = None if free_gib is None else int(float(free_gib) * GIB)
    fitted = check_fits(settings, config, OtherModels(), load, device, free)
    return {
        "free_gib": free and round(free / GIB, 1),
        "tokens_per_micro_batch": fitted.plan.micro_batch.tokens,
        "rollout_gib": round(fitted.plan.at("rollout") / GIB, 2),
        "update_gib": round(fitted.plan.update / GIB, 2),
        "rows": [list(map(str.strip, cells)) for cells in fitted.plan.table()],
    }


def device_name() -> str:
    query = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


class Results:
    """The results, whose JSON file is written with every addition."""

    def __init__(self, path: Path, device: str) -> None:
        self._path = path
        self.values: dict[str, Any] = {
            "command": "python " + " ".join(sys.argv),
            "device": device_name() if device == "cuda" else "cpu",
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
            "commit": commit(),
        }

    def add(self, name: str, value: Any) -> None:
        self.values[name] = value
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.values, indent=1) + "\n")
        print(f"{name}: {json.dumps(value)}", flush=True)


def on_other_disk(run: Path, checkpoints: Path) -> Callable[[], bool]:
    """Make the run's checkpoints go to another folder, as soon as the run has its own."""

    def place() -> bool:
        folder = run / "checkpoints"
        if run.is_dir() and not folder.exists():
            folder.symlink_to(checkpoints, target_is_directory=True)
        return False

    return place


def recipe_words(args: argparse.Namespace, model: Path, run: Path) -> list[str]:
    """Return the arguments of `jetrl train`."""
    recipe = args.work / "real.toml"
    recipe.write_text("")
    return [
        *(str(recipe), f"run.name={run.name}", f"run.dir={run.parent}"),
        *(f"run.device={args.device}", f"model.path={model}", "task.name=arithmetic"),
        *(f"rollout.prompts_per_step={args.prompts}", f"rollout.samples_per_prompt={args.samples}"),
        *(f"rollout.max_tokens={args.max_tokens}", "rollout.max_batch_size=256", "eval.every=0"),
        *("train.lr=1e-6", "train.warmup_steps=0", "train.tokens_per_micro_batch=16384"),
        *(f"train.optimizer_states={args.states}", "loop.steps=1", "checkpoint.keep_last=1"),
        *("checkpoint.background=false", "report.enabled=false"),
    ]


def compared(steps: Sequence[dict[str, Any]], planned: dict[str, Any]) -> dict[str, Any]:
    """Return the measured peaks of the phases, and the planned ones over them."""
    peaks = {
        name: max(step.get(f"memory/{name}_peak_gib", 0.0) for step in steps)
        for name in ("rollout", "update")
    }
    return {
        "measured_gib": {name: round(peak, 2) for name, peak in peaks.items()},
        "planned_over_measured": {
            name: round(planned[f"{name}_gib"] / peak, 4) for name, peak in peaks.items() if peak
        },
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--work", type=Path, required=True, help="for models and the run")
    parser.add_argument("--checkpoints", type=Path, required=True, help="for the checkpoints")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--states", default="compact", help="train.optimizer_states")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, help="default: the shape's")
    parser.add_argument("--until", choices=("train", "resume", "export"), default="export")
    parser.add_argument(
        "--cut-first", action="store_true", help="the first run ends after its step, unexported"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    return parser.parse_args()


def main() -> None:
    args = parse()
    model, run = args.work / "model", args.work / "runs" / "real"
    for folder in (args.work, args.checkpoints):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    results = Results(args.out, args.device)
    # In a process of its own: one that has touched the GPU keeps memory of it.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        made = pool.apply(make_directory, (args.shape, model, args.device, args.layers))
    results.add("directory", made)
    words = recipe_words(args, model, run)
    place = on_other_disk(run, args.checkpoints)

    def take_in(program: Program) -> int:
        """Return the number of steps so far; write down a new step with its peaks."""
        place()
        steps = metrics_of(run)
        if len(steps) > len(results.values.get("steps", ())):
            results.add("steps", steps)
            if "planned" not in results.values:
                results.add("planned", planned(words, args.device, program))
            results.add("memory", compared(steps, results.values["planned"]))
        return len(steps)

    first = Program(["train", *words])
    done = first.run(lambda: take_in(first) > 0 and args.cut_first)
    take_in(first)
    loaded = first.match(r"models loaded in ([0-9.]+) s")
    proven = first.match(r"exactness proven in ([0-9.]+) s")
    facts = {
        "load_s": float(loaded or 0),
        "proof_s": None if proven is None else float(proven),
        "plan_printed_s": first.second_of("memory plan"),
    }
    results.add("train", {**done, **facts})
    folders = (model, run / "model", *run.glob("checkpoints/step_*"))
    sizes = {path.name: sum(f.stat().st_size for f in path.glob("*")) for path in folders}
    results.add("bytes", sizes)
    if args.until == "train":
        return

    second = Program(["train", *words[:3], "loop.steps=3", "checkpoint.every=0", "--resume"])
    done = second.run(lambda: take_in(second) > 1)
    results.add("resume", {**done, "resumed_s": second.second_of("resumed after")})
    if args.until == "resume":
        return

    out = str(args.work / "fp8")
    export = ["export", str(model), out, "--dtype", "fp8", "--device", args.device]
    results.add("export", Program(export).run())


if __name__ == "__main__":
    main()
