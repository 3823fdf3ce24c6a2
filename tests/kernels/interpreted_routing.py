"""Compare the router's kernels with their references, run by Triton's interpreter on a CPU.

    TRITON_INTERPRET=1 python tests/kernels/interpreted_routing.py

It prints a JSON object: case -> number of different values.
"""

from __future__ import annotations

import json

import exact_interpreter  # noqa: F401  (patches the interpreter)
import expert_cases
import numpy as np
import torch

SIZES = ((1, 8), (11, 37))

if __name__ == "__main__":
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    found: dict[str, int] = {}
    for tokens, experts in SIZES:
        for rule in expert_cases.ROUTES:
            dtype = torch.float32 if rule.scores == "sigmoid" else torch.bfloat16
            cpu = torch.device("cpu")
            found |= expert_cases.compare_routes(tokens, experts, cpu, dtype, rule)
    print(json.dumps(found))
