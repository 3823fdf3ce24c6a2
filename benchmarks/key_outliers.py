"""Keys with one large channel: how far attention is off with them in FP8 and in INT8.

    python -m benchmarks.key_outliers --out build/key_outliers.json      5 seconds on one core

Some models, Qwen2.5 above all, are said to add a bias to their keys that makes a few channels many
times larger than the others. A scale serves all channels of a head, so INT8 then has few steps left
for the others, while FP8 has as many bits for a small value as for a large one. Here keys are
normal draws of 128 channels; one pair that is rotated together has a constant added, RATIO times
the spread of the others, before the rotary embedding, which turns that pair slowly. Queries are
normal draws as well. The file has for each ratio and format the root mean square of what scores are
off, over 1,024 keys of a query, without what all keys of the query are off alike, which softmax
does not see; and the mean total variation between the attention weights and the exact ones.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.harness import print_table, write_results
from torch import Tensor

from jetrl.kernels.attention.reference import quantize_kv, stored_values
from jetrl.kernels.rotary import rotary, rotary_table

CHANNELS, KEYS, QUERIES, DRAWS = 128, 1024, 64, 16
PAIR = 60  # Channels 60 and 124 are rotated together, by 2.4e-6 of a radian a token.
RATIOS = [0.0, 3.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0]
FORMATS = ["fp8", "int8"]
THETA = 1e6


def row_of(ratio: float, format: str) -> dict[str, Any]:
    """Return the errors of keys in one format, whose large channels are `ratio` spreads away."""
    generator = torch.Generator().manual_seed(0)
    table = rotary_table(THETA ** (np.arange(0, CHANNELS, 2) / -CHANNELS), KEYS)
    positions = torch.arange(KEYS)
    off, apart = [], []
    for _ in range(DRAWS):
        k = torch.randn(KEYS, 1, CHANNELS, generator=generator)
        q = torch.randn(QUERIES, 1, CHANNELS, generator=generator)
        k[..., [PAIR, PAIR + CHANNELS // 2]] += ratio
        k = rotary(k, positions, table).bfloat16()
        q = rotary(q, positions[-QUERIES:], table)
        exact = scores(q, k.float())
        read = scores(q, stored_values(*quantize_kv(k, format)))
        difference = read - exact
        off.append((difference - difference.mean(-1, keepdim=True)).square().mean())
        apart.append((read.softmax(-1) - exact.softmax(-1)).abs().sum(-1).mean() / 2)
    return {
        "ratio": ratio,
        "keys": format,
        "scores_off_rms": float(f"{torch.stack(off).mean().sqrt():.3g}"),
        "weights_apart": float(f"{torch.stack(apart).mean():.3g}"),
    }


def scores(q: Tensor, k: Tensor) -> Tensor:
    """Return the scores of queries [Q, 1, D] over keys [K, 1, D], float64 [Q, K]."""
    return q.squeeze(1).double() @ k.squeeze(1).double().T / CHANNELS**0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/key_outliers.json"))
    args = parser.parse_args()
    rows = [row_of(ratio, format) for ratio in RATIOS for format in FORMATS]
    print_table(rows)
    write_results(args.out, "key_outliers", "python -m benchmarks.key_outliers", rows, device="CPU")


if __name__ == "__main__":
    main()
