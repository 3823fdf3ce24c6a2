"""Compare FP8 kernels of experts with their references, run by Triton's interpreter on a CPU.

    TRITON_INTERPRET=1 python tests/kernels/interpreted_fp8_experts.py

It prints a JSON object: case -> number of different values.
"""

from __future__ import annotations

import json

import exact_interpreter  # noqa: F401  (patches the interpreter)
import expert_cases
import numpy as np
import torch

from jetrl.precision.int8 import int8_squares_turned
from jetrl.precision.quantize import QTensor
from jetrl.precision.triton import grouped_fp8


def turned(w: QTensor, experts: int) -> QTensor:
    """Return the reference of a kernel in Gluon, with codes as a product reads them."""
    made = int8_squares_turned(w, experts)
    return QTensor(made.codes.contiguous(), made.scales, made.block)


if __name__ == "__main__":
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    grouped_fp8.int8_squares_turned = turned
    found: dict[str, int] = {}
    for name, case in expert_cases.FP8_CASES.items():
        compared = expert_cases.compare_fp8(case, torch.device("cpu"))
        found |= {f"{name}: {result}": count for result, count in compared.items()}
    print(json.dumps(found))
