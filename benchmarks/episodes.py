#!/usr/bin/env python3
"""Train a tiny model through the task `endpoint`: TextArena's GuessTheNumber, on a CPU.

A model with random weights first learns to write random guesses, from made-up conversations without
any sense. GRPO then plays with examples/guess_the_number.py, which asks with the `openai` client.

    python -m benchmarks.episodes --python OTHER/bin/python --out results.json

`--python` has textarena and openai; jetrl's own environment need not.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.commit import commit

from jetrl import load_config, train
from jetrl.loop import sft
from jetrl.models.tiny import make_tiny
from jetrl.runs.directory import RunDirectory

HARNESS = Path(__file__).parents[1] / "examples" / "guess_the_number.py"
METRICS = (
    "reward/mean",
    "reward/part/found",
    "eval/endpoint/mean",
    "mismatch/num_tokens",
    "mismatch/num_different",
    "reward/failures",
    "timing/step_s",
)
SFT = """
    sft.steps=45 sft.examples_per_step=16 sft.lr=2e-3 loop.steps=0 eval.every=0
    rollout.max_tokens=160 task.options.checker=zero
"""
RL = """
    task=endpoint rollout.prompts_per_step=8 rollout.samples_per_prompt=8 rollout.max_tokens=256
    train.lr=6e-4 train.betas=[0.9,0.95] eval.every=15 eval.prompts=50 eval.samples=1
    eval.temperature=1.0 task.options.concurrency=128
"""
BOTH = """
    run.device=cpu precision.preset=int8 checkpoint.every=0 report.enabled=false
    train.tokens_per_micro_batch=4096
"""


def conversations(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return games of somebody who guesses at random and hears hints at random."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        messages = [{"role": "user", "content": "1 to 20?"}]
        for _ in range(4):
            messages.append({"role": "assistant", "content": f"[{draw.randint(1, 20)}]"})
            hint = draw.choice(("higher", "lower", "higher", "lower", "invalid"))
            messages.append({"role": "user", "content": hint})
        rows.append({"prompt": messages[:1], "completion": messages[1:-1]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows.jsonl")
        rows.write_text("\n".join(map(json.dumps, conversations(2000))))
        model = make_tiny(
            Path(folder, "tiny"),
            tokenizer="bpe",
            text_files=[rows],
            vocab_size=300,
            max_position_embeddings=512,
        )
        common = [*BOTH.split(), f"run.dir={folder}"]
        words = [*SFT.split(), *common, f"model.path={model}", f"task={rows}", "run.name=sft"]
        warm = sft(load_config(None, words))
        own = [f"model.path={warm.model_path}", "run.name=rl", f"loop.steps={args.steps}"]
        own += [f"task.options.harness={HARNESS}:Game", f"task.options.python={args.python}"]
        done = train(load_config(None, [*RL.split(), *common, *own]))
        lines = RunDirectory.open(done.run_path).metrics("rl")
    curve = [
        {"step": line["step"], **{name: line[name] for name in METRICS if name in line}}
        for line in lines
    ]
    facts = {"commit": commit(), "seconds": round(time.perf_counter() - began, 1), "curve": curve}
    args.out.write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(curve[-1]))


if __name__ == "__main__":
    main()
