"""Run the parts of `jetrl bench attention` with portable kernels and tiny shapes, interpreted.

    TRITON_INTERPRET=1 python tests/kernels/interpreted_benchmark.py

It prints the rows as JSON.
"""

from __future__ import annotations

import json

import torch
from torch.nn.attention import SDPBackend

from benchmarks import attention

HEADS = attention.Heads(1, 1, 64, "cpu")

if __name__ == "__main__":
    torch.set_num_threads(1)
    different = attention.check_bits("integer", HEADS, 70)
    assert different == 0, f"decode and the training forward differ in {different} values"
    rows = [
        attention.bench_decode(HEADS, 1, 70, "integer"),
        attention.bench_packed(HEADS, 1, 70, "integer"),
        attention.bench_prefill(HEADS, 3, 70, "integer"),
        attention.bench_torch(HEADS, 1, 70, SDPBackend.FLASH_ATTENTION),
    ]
    print(json.dumps(rows))
