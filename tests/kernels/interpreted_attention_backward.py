"""Compare the portable backward of integer attention with its reference.

    TRITON_INTERPRET=1 python tests/kernels/interpreted_attention_backward.py

It is a program of its own, since the interpreter is chosen when Triton is imported.
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from jetrl.kernels.attention import integer
from jetrl.kernels.attention.layout import KeyValueCodes, QueryTiles
from jetrl.kernels.attention.reference import quantize_keys_and_values
from jetrl.kernels.portable import attention_backward as module
from jetrl.kernels.portable import attention_copies

if os.environ.get("TRITON_INTERPRET") == "1":
    import exact_interpreter  # noqa: F401  (exact arithmetic in the interpreter)
    from triton.runtime import interpreter

# Factors of q, k and v.
FACTORS = {"random": (1, 1, 1), "sharp": (20, 1, 1), "huge": (2**12, 2**7, 1), "uneven": (1, 1, 1)}
NOT_FINITE = {
    "query": (0, torch.nan),
    "key": (1, torch.inf),
    "value": (2, torch.nan),
    "gradient": (3, torch.inf),
}


@dataclass(frozen=True)
class Case:
    """Runs of a packed batch, as in `QueryTiles.packed`; `bad` has one row that is not finite."""

    runs: tuple[int, ...]
    stem_of: tuple[int, ...] | None = None
    heads: int = 2
    groups: int = 1
    head_dim: int = 32
    kind: str = "random"
    bad: str = ""
    sums_bytes: int = 2**30
    rows: int = 0  # per tile; 0: those of the device

    @property
    def starts(self) -> list[int]:
        return [0, *itertools.accumulate(self.runs)]

    def sequences(self) -> list[list[int]]:
        """Return the rows of each sequence: those of its stem, if it has one, and of its run."""
        stems = self.stem_of or (-1,) * len(self.runs)
        rows = [[*range(a, b)] for a, b in itertools.pairwise(self.starts)]
        return [
            (rows[stem] if stem >= 0 else []) + own
            for i, (own, stem) in enumerate(zip(rows, stems, strict=True))
            if i not in stems
        ]


CASES = (
    Case((70,), groups=2, kind="uneven", sums_bytes=1),
    Case((128, 3, 66, 20, 1), stem_of=(-1, 0, 0, -1, 0), kind="sharp", rows=64),
    Case((129,), heads=1, head_dim=64, kind="huge"),
    *(Case((66,), groups=2, bad=which) for which in NOT_FINITE),
)


def tensors(case: Case, device: torch.device) -> list[Tensor]:
    """Return q, k, v and dO, bfloat16, with some rows of zeros."""
    g = torch.Generator().manual_seed(case.starts[-1])
    tokens = case.starts[-1]
    shapes = [(tokens, n, case.head_dim) for n in (case.heads, case.groups, case.groups)]
    made = [torch.randn(shape, generator=g) for shape in (*shapes, shapes[0])]
    for x in made:
        x[torch.rand(x.shape[:2], generator=g) < 0.1] = 0.0
    if case.kind == "uneven":
        for x in made[2:]:
            x *= 2.0 ** torch.randint(-30, 20, (*x.shape[:2], 1), generator=g)
        made[3] *= 2.0**-75  # some are too small for their scale
    if case.bad:
        which, value = NOT_FINITE[case.bad]
        made[which][tokens // 2, 0, 5] = value
    factors = (*FACTORS[case.kind], 1)
    return [(x * f).to(device, torch.bfloat16) for x, f in zip(made, factors, strict=True)]


def differences(case: Case, device: torch.device) -> list[str]:
    """Return the gradients that differ from the reference, and in how many values."""
    *inputs, do = tensors(case, device)
    (k, k_scales), (v, v_scales) = quantize_keys_and_values(*inputs[1:], "int8")
    rows = case.sequences()
    bounds = torch.tensor([0, *itertools.accumulate(map(len, rows))], device=device)
    row_of = torch.tensor([*itertools.chain(*rows)], device=device)
    for x in inputs:
        x.requires_grad_()
    out: Any = integer.attend_packed_integer(*inputs, bounds, row_of=row_of)
    statistics = torch.stack(out.grad_fn.saved_tensors[7:9])
    out.backward(do)
    codes = KeyValueCodes(k.detach(), k_scales, v.detach(), v_scales)
    tiles = QueryTiles.packed(case.starts, device, case.stem_of)
    q, o = inputs[0].detach(), out.detach()
    shapes = (module._Tile(case.rows, 4, 2),) * 3 if case.rows else module._tiles_of(device)
    with (
        mock.patch.object(module, "INTEGER_SUMS_BYTES", case.sums_bytes),
        mock.patch.object(module, "_tiles_of", return_value=shapes),
    ):
        got = module.attention_backward(do, q, codes, o, statistics, tiles)
    found = []
    for name, own, x in zip(("dQ", "dK", "dV"), got, inputs, strict=True):
        assert x.grad is not None
        count = int(((own != x.grad) & ~(own.isnan() & x.grad.isnan())).sum())
        if count:
            found.append(f"{case}: {name} differs in {count} of {own.numel()} values")
    return found


def use_maxima_of_numpy() -> None:
    """Reduce by numpy if that is the maximum with NaN: the interpreter would go one by one."""
    reduce = interpreter.ReduceOps.apply_impl

    def apply(self: Any, inputs: Any) -> Any:
        if self.combine_fn is not attention_copies._larger_or_nan:
            return reduce(self, inputs)
        largest = np.max(inputs[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
        return (self.to_tensor(largest, inputs[0].dtype),)

    interpreter.ReduceOps.apply_impl = apply


if __name__ == "__main__":
    torch.set_num_threads(1)
    use_maxima_of_numpy()
    print(json.dumps([line for case in CASES for line in differences(case, torch.device("cpu"))]))
