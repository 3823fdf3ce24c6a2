"""Compare the kernels of experts with their references, run by Triton's interpreter on a CPU.

    TRITON_INTERPRET=1 python tests/kernels/interpreted_experts.py

It prints a JSON object: case -> number of different values.
"""

from __future__ import annotations

import json

import exact_interpreter  # noqa: F401  (patches the interpreter)
import expert_cases
import numpy as np
import torch

if __name__ == "__main__":
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    found: dict[str, int] = {}
    for name, case in expert_cases.CASES.items():
        compared = expert_cases.compare(case, torch.device("cpu"))
        found |= {f"{name}: {result}": count for result, count in compared.items()}
    print(json.dumps(found))
