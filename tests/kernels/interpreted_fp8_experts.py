"""Compare FP8 kernels of experts with their references, run by Triton's interpreter on a CPU.

    TRITON_INTERPRET=1 python tests/kernels/interpreted_fp8_experts.py

It prints a JSON object: case -> number of different values.
"""

from __future__ import annotations

import json

import gluon_interpreter  # noqa: F401  (patches the interpreter, before the kernels)

# isort: split
import expert_cases
import numpy as np
import torch

if __name__ == "__main__":
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    cpu, found = torch.device("cpu"), {}
    for sizes in expert_cases.SQUARES:
        found[f"squares {sizes}"] = expert_cases.compare_squares(*sizes, cpu)
    for name, case in expert_cases.FP8_CASES.items():
        compared = expert_cases.compare_fp8(case, cpu)
        found |= {f"{name}: {result}": count for result, count in compared.items()}
    print(json.dumps(found))
