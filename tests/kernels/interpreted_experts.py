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

from benchmarks import experts as bench
from jetrl.precision import PrecisionPlan, experts
from jetrl.precision.triton import defined

if __name__ == "__main__":
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    found: dict[str, int] = {}
    for name, case in expert_cases.CASES.items():
        compared = expert_cases.compare(case, torch.device("cpu"))
        found |= {f"{name}: {result}": count for result, count in compared.items()}
    case = expert_cases.Case(5, 1, 2, 64, 64)
    wanted = expert_cases.layer_results(case, torch.device("cpu"))
    sizes = bench.SIZES["tiny"]
    load, plan = bench.Load.of(sizes, 10, "cpu"), PrecisionPlan.preset("integer")
    groups, linear = experts.group_rows(load.chosen, 4), bench.Layer(sizes, plan, "cpu").gate_up
    calls = bench.tile_calls(linear, groups, load.x, True).items()
    tiles = [call() for name, call in calls if name.startswith("fprop")]
    found |= {f"tile {i}": expert_cases.different(one, tiles[0]) for i, one in enumerate(tiles)}
    # As on a GPU, but for codes of rows and turned weights, whose kernels are not interpreted.
    experts.arithmetic_of = lambda _: defined
    made = expert_cases.layer_results(case, torch.device("cpu"))
    found |= {f"layer: {k}": expert_cases.different(made[k], wanted[k]) for k in wanted}
    print(json.dumps(found))
