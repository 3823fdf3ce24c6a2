"""Compare portable kernels of row operations with their references, by Triton's interpreter.

    TRITON_INTERPRET=1 python tests/kernels/interpreted_rows.py

It is a program of its own, since the interpreter is chosen when Triton is imported.
"""

from __future__ import annotations

import json

import exact_interpreter  # noqa: F401  (exact arithmetic in the interpreter)
import numpy as np
import portable_rows
import torch

CPU = torch.device("cpu")

if __name__ == "__main__":
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    found: list[str] = []
    for kind, (cases, _) in portable_rows.KINDS.items():
        for sizes in cases(gpu=False):
            found += portable_rows.differences(kind, sizes, CPU)
    print(json.dumps(found))
