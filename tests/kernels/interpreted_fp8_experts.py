"""Compare FP8 and BF16 kernels of experts with references, run by Triton's interpreter on a CPU.

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
import triton.language as tl

from jetrl.precision import PrecisionPlan, adapter_experts, experts
from jetrl.precision.triton import operations, tile


def larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


# These are instructions of a GPU.
tile.widen, tile.larger_pairs = lambda x: x.to(tl.float32), larger
tile.magnitudes = lambda x: tl.abs(x.to(tl.float32))

if __name__ == "__main__":
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    cpu, found = torch.device("cpu"), {}
    for sizes in expert_cases.SQUARES:
        found[f"squares {sizes}"] = expert_cases.compare_squares(*sizes, cpu)
    for name, case in expert_cases.FP8_CASES.items():
        compared = expert_cases.compare_fp8(case, cpu)
        found |= {f"{name}: {result}": count for result, count in compared.items()}
        compared = expert_cases.compare_bf16(case, cpu)
        found |= {f"{name}, bf16: {result}": count for result, count in compared.items()}
    case, plan = expert_cases.Case(9, 2, 3, 64, 64), PrecisionPlan.preset("mixed")
    wanted = expert_cases.layer_results(case, cpu, plan)
    adapted = [expert_cases.adapted_results(case, cpu, plan, on) for on in (True, False)]
    experts.arithmetic_of = adapter_experts.arithmetic_of = lambda _: operations
    made = expert_cases.layer_results(case, cpu, plan)
    far = expert_cases.far_from(made, wanted)
    found |= {f"bf16 layer: {name}": count for name, count in far.items()}
    for by_token, wanted in zip((True, False), adapted, strict=True):
        made = expert_cases.adapted_results(case, cpu, plan, by_token)
        far = expert_cases.far_from(made, wanted)
        found |= {f"bf16 adapter, {by_token}: {name}": count for name, count in far.items()}
    print(json.dumps(found))
