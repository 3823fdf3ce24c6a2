"""Compare the portable decode of integer attention with its reference, in bits.

    TRITON_INTERPRET=1 python tests/kernels/interpreted_attention_decode.py

It is a program of its own, since the interpreter is chosen when Triton is imported. The GPU tests
use its cases.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.kernels.attention import integer
from jetrl.kernels.attention.layout import KeyValueCodes, SequenceQueries

PAGE = 64


@dataclass(frozen=True)
class Case:
    """Contexts over pages in random order, with garbage in all slots that no query may see.

    Attributes:
        lengths: keys per context; 0 has no page.
        counts: queries per sequence, the last at the last key; empty: one each, without records.
        most: the limit of counts that sizes the launch.
        peaked: factor of the queries; at 1, scores have a standard deviation of about 1.
        special: what to make of the inputs, a name in `_spoil`.
    """

    lengths: tuple[int, ...]
    groups: int = 1
    group: int = 2
    head_dim: int = 64
    counts: tuple[int, ...] = ()
    most: int = 1
    peaked: float = 1.0
    special: str = ""
    seed: int = 0


@dataclass(frozen=True)
class Inputs:
    """Arguments of `attend_decode`, and the keys and values of each context, in order."""

    q: Tensor
    pages: KeyValueCodes
    tables: Tensor
    lengths: Tensor
    queries: SequenceQueries | None
    slots: list[Tensor]


EDGES = (1, 63, 64, 65, 127, 128, 129)
CASES = (
    Case(lengths=(*EDGES, 0), group=3),
    Case(lengths=(130, 5), groups=2, group=4, head_dim=128, peaked=30.0),
    Case(lengths=(1023, 1025), group=1),
    Case(lengths=(1024, 2050, 70), group=16, peaked=4.0),
    Case(lengths=(130, 64, 3, 0), groups=2, group=3, counts=(3, 1, 2, 0), most=4),
    Case(lengths=(1027, 66), group=5, counts=(4, 4), most=8),
    Case(lengths=(70, 1100, 90), group=3, special="keys"),
    Case(lengths=(70, 200, 1030), group=3, special="values"),
    Case(lengths=(70, 200, 1030), group=3, special="extreme"),
    Case(lengths=(200, 40), group=3, special="queries"),
    Case(lengths=(131, 129), group=2, counts=(4, 4), most=4, special="newest"),
)


def inputs(case: Case, device: torch.device | str) -> Inputs:
    """Return the inputs of a case, the same numbers on every device."""
    random = torch.Generator().manual_seed(case.seed)
    used = [-(-length // PAGE) for length in case.lengths]
    shape = (sum(used) + 2, PAGE, case.groups)
    order = (torch.randperm(sum(used), generator=random) + 1).tolist()
    tables = torch.zeros(len(used), max(1, *used) + 1, dtype=torch.int32)  # page 0 is of no context
    codes = torch.randint(-127, 128, (2, *shape, case.head_dim), generator=random).to(torch.int8)
    scales = torch.full((2, *shape), math.nan)
    slots = []
    for i, length in enumerate(case.lengths):
        tables[i, : used[i]] = torch.tensor([order.pop() for _ in range(used[i])])
        token = torch.arange(length)
        slots.append(tables[i].long()[token // PAGE] * PAGE + token % PAGE)
        new = (torch.randn(2, length, case.groups, generator=random) * 0.7).exp() * 0.01
        scales.flatten(1, 2)[:, slots[i]] = new
    counts = case.counts or tuple(1 for _ in used)
    rows = sum(counts) + (3 if case.counts else 0)
    heads = case.groups * case.group
    q = torch.randn(rows, heads, case.head_dim, generator=random) * case.peaked
    _spoil(case, q, codes, scales, slots)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    queries = None
    if case.counts:
        number = torch.tensor(case.counts, dtype=torch.int32, device=device)
        keys = torch.nn.functional.pad(lengths.repeat_interleave(number), (0, 3))
        first = (number.cumsum(0) - number).int()
        queries = SequenceQueries(number, first, keys, case.most)
    (k, v), (k_scales, v_scales) = codes.to(device), scales.to(device)
    pages = KeyValueCodes(k=k, k_scales=k_scales, v=v, v_scales=v_scales)
    at = [slot.to(device) for slot in slots]
    return Inputs(q.bfloat16().to(device), pages, tables.to(device), lengths, queries, at)


def _spoil(case: Case, q: Tensor, codes: Tensor, scales: Tensor, slots: list[Tensor]) -> None:
    """Make some inputs of a case special; non-finite values have codes 0, as in the quantizer."""
    flat_codes, flat_scales = codes.flatten(1, 2), scales.flatten(1, 2)
    if case.special in ("keys", "values", "newest"):
        which = 0 if case.special == "keys" else 1
        for slot, value in zip(slots[:2], (math.inf, math.nan), strict=True):
            at = slot[-2] if case.special == "newest" else slot[len(slot) // 2]
            flat_codes[which, at] = 0
            flat_scales[which, at] = value
    elif case.special == "extreme":
        flat_scales[:, slots[0]] = 2.0**-107
        flat_scales[0, slots[1]] *= 1e36
        flat_codes[:, slots[2][3:40]] = 0
        flat_scales[:, slots[2][3:40]] = 2.0**-100 / 127
        q[2] *= 1e-30
    elif case.special == "queries":
        q[0, 0], q[0, 1, 3], q[1, 2, 5], q[1, 0] = 0.0, math.nan, math.inf, 1e38


def expected(case: Case, x: Inputs) -> Tensor:
    """Return the reference's output, bfloat16 like q; 0 for contexts without keys and padding."""
    out = torch.zeros_like(x.q)
    counts = case.counts or tuple(1 for _ in case.lengths)
    row = 0
    for slot, count in zip(x.slots, counts, strict=True):
        if len(slot) and count:
            part = slice(row, row + count)
            keys = (x.pages.k.flatten(0, 1)[slot][None], x.pages.k_scales.flatten(0, 1)[slot][None])
            values = (
                x.pages.v.flatten(0, 1)[slot][None],
                x.pages.v_scales.flatten(0, 1)[slot][None],
            )
            positions = torch.arange(len(slot) - count, len(slot), device=x.q.device)[None]
            out[part] = integer.attend(x.q[part][None], keys, values, positions, "fp32")[0]
        row += count
    return out


def compare(case: Case, device: torch.device | str, longest: int = 0) -> dict[str, int]:
    """Count outputs that differ from the reference, and NaN and finite outputs of the reference."""
    from jetrl.kernels.portable.attention_decode import attend_decode

    x = inputs(case, device)
    longest = longest or max(case.lengths)
    out = attend_decode(x.q, x.pages, x.tables, x.lengths, longest, 1024, x.queries)
    want = expected(case, x)
    size = sum(case.counts) if case.counts else len(out)
    out, want = out[:size], want[:size]
    same = (out == want) | (out.isnan() & want.isnan())
    return {
        "different": int((~same).sum()),
        "nan": int(want.isnan().sum()),
        "finite": int(want.isfinite().sum()),
    }


def too_long(device: torch.device | str) -> bool:
    """Return whether a context of more splits than the launch gives NaN, and others do not."""
    from jetrl.kernels.portable.attention_decode import attend_decode

    x = inputs(Case(lengths=(1025, 1024)), device)
    out = attend_decode(x.q, x.pages, x.tables, x.lengths, 1024, 1024, None)
    return bool(out[0].isnan().all() and out[1].isfinite().all())


if __name__ == "__main__":
    import exact_interpreter  # noqa: F401  (before a kernel runs)

    torch.set_num_threads(1)
    found = {str(case): compare(case, "cpu") for case in CASES}
    print(json.dumps([found, too_long("cpu")]))
