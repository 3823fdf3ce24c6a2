"""Compare the portable INT8 products with their references, run by Triton's interpreter on a CPU.

    TRITON_INTERPRET=1 python tests/kernels/interpreted_gemm.py

It prints a JSON object: case -> number of different values.
"""

from __future__ import annotations

import json

import exact_interpreter  # noqa: F401  (patches the interpreter)
import torch
import triton
import triton.language as tl
from tests.kernels.bits import different, random

from jetrl.precision import int8_planes as reference
from jetrl.precision.int8 import int8_matmul, int8_rows
from jetrl.precision.quantize import Planes
from jetrl.precision.triton import int8_planes, portable_int8
from jetrl.precision.triton.portable_int8 import Tile

PRODUCTS = ((1, 40, 64), (17, 70, 192), (65, 33, 320), (257, 140, 192))
# Rows, hidden, vocabulary: of one slab each, and of several.
SLABS = {2**25: ((1, 192, 5), (65, 64, 512), (130, 64, 700)), 2**15: ((37, 64, 600),)}


def compare_products() -> dict[str, int]:
    """Compare `int8_matmul`, also with K in parts."""
    found = {}
    for m, n, k in PRODUCTS:
        a, b = int8_rows(random(m, k).bfloat16()), int8_rows(random(n, k, seed=1))
        a.scales[0] = torch.nan
        for dtype in (torch.float32, torch.bfloat16):
            want = int8_matmul(a, b, dtype)
            made = portable_int8.int8_matmul(a, b, dtype)
            found[f"product {(m, n, k)} {dtype}"] = different(made, want)
            if 1 < m < 100:
                made = portable_int8.product(a, b, dtype, Tile(16, 32, 64, 4, 2), parts=2)
                found[f"parts {(m, n, k)} {dtype}"] = different(made, want)
            made = portable_int8.product(a, b, dtype, portable_int8.TILES["pieces"][16], parts=1)
            found[f"bf16 {(m, n, k)} {dtype}"] = different(made, want)
    return found


def compare_pieces() -> dict[str, int]:
    """Compare products by BF16 tensor cores over more than a piece, with the largest sums."""
    a, b = int8_rows(random(3, 2240)), int8_rows(random(5, 2240, seed=1))
    a.codes[:2], b.codes[:3] = -127, 127
    want, found = int8_matmul(a, b, torch.float32), {}
    for parts in (1, 2):
        for tile in (portable_int8.TILES["pieces"][size] for size in (16, 64)):
            made = portable_int8.product(a, b, torch.float32, tile, parts)
            found[f"pieces {tile} {parts}"] = different(made, want)
    return found


def compare_planes(x: Planes, other: Planes, case: str) -> dict[str, int]:
    parts = ("high", "low", "scales")
    return {f"{case} {part}": different(getattr(x, part), getattr(other, part)) for part in parts}


def compare_head(rows: int, width: int, vocabulary: int, largest: bool = False) -> dict[str, int]:
    """Compare the four functions of the head, with zero, tiny and non-finite rows."""
    case = f"{(rows, width, vocabulary, largest)}"
    hidden, weight = random(rows, width).bfloat16(), random(vocabulary, width, seed=1)
    dy = random(rows, vocabulary, seed=2) * 1e-6
    if largest:
        hidden, weight, dy = hidden.fill_(-7.5), weight.fill_(2.0), dy.fill_(3.0)
    elif rows > 8:
        hidden[:, 3] *= 50
        hidden[2], hidden[3], hidden[4, 1], hidden[5, 2] = 0.0, 2.0**-120, torch.inf, torch.nan
        dy[1], dy[2], dy[3, 0], dy[4, 1] = 0.0, 2.0**-140, torch.nan, -torch.inf
    x, w = reference.planes_of_rows_ref(hidden), reference.planes_of_rows_ref(weight)
    found = compare_planes(int8_planes.planes_of_rows(hidden), x, f"hidden {case}")
    out = Planes.empty(vocabulary + 1, width, weight.device)
    made = int8_planes.planes_of_rows(weight, out.rows(slice(1, None)))
    found |= compare_planes(made, w, f"weight {case}")
    logits = reference.planes_fprop_ref(x, w)
    found[f"fprop {case}"] = different(int8_planes.planes_fprop(x, w), logits)
    dx = reference.planes_dgrad_ref(dy, w)
    found[f"dgrad {case}"] = different(int8_planes.planes_dgrad(dy, w), dx)
    dw, want = (random(vocabulary, width, seed=3) * 1e-6 for _ in range(2))
    reference.add_planes_wgrad_ref(want, dy, x)
    int8_planes.add_planes_wgrad(dw, dy, x)
    found[f"wgrad {case}"] = different(dw, want)
    return found


@triton.jit
def _sums_kernel(high_ptr, low_ptr, out_ptr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    high, low = tl.load(high_ptr + places), tl.load(low_ptr + places)
    tl.store(out_ptr + places, int8_planes._rounded(high, low))


def compare_sums() -> dict[str, int]:
    """Compare 256 * high + low, rounded once, for sums near ties and of the largest size."""
    generator = torch.Generator().manual_seed(4)
    high = torch.randint(-(2**30), 2**30, (4096,), generator=generator)
    high[2048:] >>= torch.randint(0, 30, (2048,), generator=generator)
    low = torch.randint(-(2**30), 2**30, (4096,), generator=generator)
    low >>= torch.randint(0, 31, (4096,), generator=generator)
    low[::3] = (low[::3] & 1) + 128  # ties and their neighbors, for some sizes of `high`
    found = torch.empty(4096)
    _sums_kernel[(1,)](high.int(), low.int(), found, 4096)
    return {"rounded": different(found, (256 * high + low).float())}


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = compare_products() | compare_pieces() | compare_sums()
    for size, cases in SLABS.items():
        int8_planes.SLAB_BYTES = size
        for case in cases:
            found |= {f"{name}, slabs of {size}": n for name, n in compare_head(*case).items()}
    found |= compare_head(40, 64, 520, largest=True)
    print(json.dumps(found))
