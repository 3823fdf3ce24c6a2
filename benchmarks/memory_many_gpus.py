"""The memory plans of models on several GPUs: what a rank holds, and the largest micro-batch.

    python -m benchmarks.memory_many_gpus --out benchmarks/results/cpu/memory_many_gpus.json

Nothing is loaded: the plans are those that a run makes before it begins (`jetrl train --dry-run
--gpus N --gpu-memory GIB`), for 128 completions of 2,048 tokens a GPU after prompts of 256, compact
optimizer states, and as much free memory as an empty card has.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import write_results
from benchmarks.shapes import SHAPES

from jetrl.errors import UserError
from jetrl.memory.fitting import check_fits
from jetrl.memory.plan import GIB, OtherModels, PlannedRun, Workload
from jetrl.models.families import ModelConfig
from jetrl.settings.loading import load_config

FREE_GIB = {"H200": 139.8, "H100": 78.8}
CASES = [
    *(("qwen3-8b", "H100", count) for count in (1, 2, 4)),
    *(("qwen3-8b", "H200", count) for count in (1, 2, 4, 8)),
    *(("qwen3-14b", "H200", count) for count in (1, 2, 4, 8)),
    *(("qwen3-32b", "H200", count) for count in (2, 4, 8)),
    *(("llama3.1-70b", "H200", count) for count in (8, 16, 32)),
]
PROMPTS, SAMPLES, PROMPT, RESPONSE = 16, 8, 256, 2048


def row_of(shape: str, card: str, count: int, recomputed: bool) -> dict[str, Any]:
    """Return the row of a model on some GPUs."""
    words = {
        "rollout.prompts_per_step": PROMPTS * count,
        "rollout.samples_per_prompt": SAMPLES,
        "rollout.max_tokens": RESPONSE,
        "train.optimizer_states": "compact",
        "train.tokens_per_micro_batch": 65536,
        "train.activation_checkpointing": str(recomputed).lower(),
    }
    settings = load_config(None, [f"{key}={value}" for key, value in words.items()])
    config, length = ModelConfig.from_hf(SHAPES[shape]), PROMPT + RESPONSE
    sequences = PROMPTS * SAMPLES * count
    load = Workload(sequences, length, sequences, PROMPTS * PROMPT * count)
    row = {"model": shape, "card": card, "gpus": count, "recomputed": recomputed}
    free = int(FREE_GIB[card] * GIB)
    try:
        fitted = check_fits(PlannedRun(settings, config, OtherModels(), load, cards=count), free)
    except UserError as error:
        return {**row, "fits": False, "why": str(error).splitlines()[0]}
    held = {
        name: round(part.bytes.get("backward", 0) / GIB, 1)
        for part in fitted.plan.rows
        for name in ("master weights", "optimizer states", "gradients, FP32", "quantized weights")
        if part.what.startswith(name)
    }
    return {
        **row,
        "fits": True,
        "micro_batch_tokens": fitted.tokens,
        "held_gib": held,
        "rollout_gib": round(fitted.plan.at("rollout") / GIB, 1),
        "update_gib": round(fitted.plan.update / GIB, 1),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plans and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(argv)
    results = [row_of(*case, recomputed) for case in CASES for recomputed in (False, True)]
    for row in results:
        print(json.dumps(row))
    content = {
        "free_gib": FREE_GIB,
        "load": f"{PROMPTS} prompts x {SAMPLES} samples a GPU, {PROMPT} + {RESPONSE} tokens",
    }
    if args.out is not None:
        command = "python -m benchmarks.memory_many_gpus"
        write_results(args.out, "memory_many_gpus", command, results, **content)


if __name__ == "__main__":
    main()
