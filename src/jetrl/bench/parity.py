"""Parity at the shape of a real model, with random weights that give peaked distributions.

    PYTHONPATH=src python -m jetrl.bench.parity --shape qwen3-8b --plan unified --out parity.json

Prompts of mixed lengths (short ones, and some of --long tokens) are sampled in one batch, and the
trainer's forward runs over all of them in another; every token is compared.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jetrl.bench.shapes import SHAPES
from jetrl.parity import locate, measure
from jetrl.policy import Policy
from jetrl.precision import PrecisionPlan


def run(
    shape: str, plan: str, batch: int, tokens: int, long: int, device: str, layers: int | None
) -> dict[str, Any]:
    """One measurement: `batch` sequences of `tokens` sampled tokens, one in eight after `long`."""
    config = dict(SHAPES[shape])
    if layers is not None:
        config["num_hidden_layers"] = layers
    config["initializer_range"] = float(2.0 / np.sqrt(config["hidden_size"]))  # peaked logits
    policy = Policy.from_config(config, PrecisionPlan.preset(plan), seed=0, device=device)
    generator = np.random.default_rng(0)
    lengths = [long if i % 8 == 7 else int(generator.integers(1, 400)) for i in range(batch)]
    prompts = [generator.integers(0, config["vocab_size"], n).tolist() for n in lengths]
    began = time.perf_counter()
    result = measure(policy, prompts=prompts, samples=1, max_tokens=tokens, temperature=0.6)
    found = None
    if result.first_different is not None:
        found = str(locate(policy, *result.first_different) or "no operation differs alone")
    return {
        "shape": shape,
        "layers": config["num_hidden_layers"],
        "plan": plan,
        "sequences": batch,
        "longest_context": long + tokens,
        "tokens": result.tokens,
        "different": result.different,
        "mean_abs": result.mean_abs,
        "max_abs": result.max_abs,
        "k3_kl": result.k3_kl,
        "token_mult_prob_error": result.token_mult_prob_error,
        "located": found,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--plan", action="append", help="repeatable; default: unified")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--long", type=int, default=4096)
    parser.add_argument("--layers", type=int, help="default: the shape's")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    rows = []
    for plan in args.plan or ["unified"]:
        sizes = (args.batch, args.tokens, args.long, args.device, args.layers)
        rows.append(run(args.shape, plan, *sizes))
        print(json.dumps(rows[-1]), flush=True)
    if args.out is not None:
        device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        about = {"device": device, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
        args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
