"""The start model and the set of questions of a sanity study, which it solves sometimes.

    python -m benchmarks.study.perfectible --out studies/sanity

After Qi et al. 2025 (arXiv 2510.26788): of a set whose every question the start model solves in 20
to 80% of its completions, reinforcement learning can solve all. Three steps, each done by a command
of jetrl: supervised training in BF16 on programs of four rounds by a teacher of whose answers 60%
are wrong, until a third of the held-out answers are right (OUT/start); completions of training
prompts (OUT/completions.json); and the prompts whose pass rate is within bounds, one a line with
its rate (OUT/set.jsonl, which `task.options.only` reads). A step whose file is there is not done
again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

MODEL = Path(__file__).resolve().parent / "models" / "5m.json"
ROUNDS, MAX_TOKENS = 4, 144
LEAST, MOST = 0.2, 0.8  # pass rates
TRAINING = [
    "precision.preset=bf16",
    "precision.bf16_rounding=nearest",
    "precision.pinned_sums=true",  # its weights repeat on the same kind of GPU
    "checkpoint.every=0",
    f"model.config={MODEL}",
    "model.tokenizer=characters",
    "task.name=program",
    f"task.options.rounds={ROUNDS}",
    "task.options.mistakes=0.6",
    "task.workers=0",
    f"rollout.max_tokens={MAX_TOKENS}",
    "sft.steps=3000",
    "sft.until=0.33",
    "sft.check_every=50",
    "sft.examples_per_step=64",
    "sft.lr=1e-3",
    "sft.warmup_steps=50",
    "train.betas=[0.9,0.95]",
    "train.tokens_per_micro_batch=32768",
    "eval.prompts=128",
    "eval.samples=2",
    "eval.temperature=1.0",
]


def train_start(out: Path, device: str, more: Sequence[str]) -> None:
    """Train the start model, and write it to OUT/start."""
    recipe = out / "empty.toml"
    recipe.touch()
    words = ["run.name=warm-up", f"run.dir={out}", f"run.device={device}", *TRAINING, *more]
    jetrl("sft", str(recipe), *words, "--out", str(out / "start"))


def draw_completions(out: Path, device: str) -> None:
    """Write the start model's completions of training prompts to OUT/completions.json."""
    words = ["--task", "program", "--split", "train", "--option", f"rounds={ROUNDS}"]
    words += ["--prompts", "512", "--samples", "32", "--temperature", "1.0"]
    words += ["--max-tokens", str(MAX_TOKENS), "--plan", "bf16"]
    words += ["--device", device, "--json"]
    printed = jetrl("eval", str(out / "start"), *words)
    (out / "completions.json").write_text(printed)


def pass_rates(completions: Path) -> dict[str, float]:
    """Return the mean reward of each prompt, by its id, of what `jetrl eval --json` printed."""
    rewards = defaultdict[str, list[float]](list)
    for sample in json.loads(completions.read_text())["samples"]:
        rewards[sample["id"]].append(sample["reward"])
    return {prompt: sum(own) / len(own) for prompt, own in rewards.items()}


def jetrl(*words: str) -> str:
    """Return what a command of jetrl prints; end this program where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "jetrl", *words], stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"jetrl {words[0]} ended with exit code {done.returncode}: {done.stdout[-500:]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("studies/sanity"), help="folder")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("more", nargs="*", metavar="KEY=VALUE", help="settings of the training")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.out / "start" / "config.json").is_file():
        train_start(args.out, args.device, args.more)
    if not (args.out / "completions.json").is_file():
        draw_completions(args.out, args.device)
    rates = pass_rates(args.out / "completions.json")
    chosen = {prompt: rate for prompt, rate in rates.items() if LEAST <= rate <= MOST}
    if not chosen:
        sys.exit(f"none of {len(rates)} prompts has a pass rate from {LEAST} to {MOST}")
    lines = [json.dumps({"id": prompt, "rate": round(rate, 4)}) for prompt, rate in chosen.items()]
    (args.out / "set.jsonl").write_text("\n".join(lines) + "\n")
    mean = sum(chosen.values()) / len(chosen)
    print(f"{len(chosen)} of {len(rates)} prompts, mean pass rate {mean:.3f}: {args.out}/set.jsonl")


if __name__ == "__main__":
    main()
