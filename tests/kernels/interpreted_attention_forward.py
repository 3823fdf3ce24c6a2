"""Compare the portable attention forward with its reference, by Triton's interpreter on a CPU.

TRITON_INTERPRET=1 python tests/kernels/interpreted_attention_forward.py

It prints the number of values that differ, by case.
"""

from __future__ import annotations

import json

import exact_interpreter  # noqa: F401
import torch
from attention_forward_cases import Case, differences, query_differences

from jetrl.kernels.portable import attention_forward
from jetrl.kernels.portable.attention_forward import Config

CASES = {
    "ragged": Case([1, 150, 64, 33], heads=4, groups=2),
    "special": Case([200, 131], heads=2, head_dim=128, sharpness=20.0, special=True),
    "stems": Case([128, 70, 1], [-1, 0, 0], heads=2),
    "splits": Case([1030], heads=1, sharpness=3.0),
    "prefill": Case([3, 70], contexts=[140, 100]),
    "prefill across splits": Case([40], contexts=[1050], heads=1, special=True),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {name: differences(case, "cpu") for name, case in CASES.items()}
    attention_forward._DEFAULT = Config(stacked=True)
    found["planes stacked"] = differences(CASES["stems"], "cpu")
    found["queries of 64"] = query_differences(23, 3, 64, "cpu")
    found["queries of 80"] = query_differences(23, 3, 80, "cpu")
    print(json.dumps(found))
