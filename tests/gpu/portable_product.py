"""Multiply INT8 matrices by the instructions that Triton picks; print them and a digest.

    [TRITON_OVERRIDE_ARCH=sm80] python tests/gpu/portable_product.py

With TRITON_OVERRIDE_ARCH, Triton arranges and schedules a kernel for another architecture, and
ptxas translates it for the GPU that is there.
"""

from __future__ import annotations

import hashlib
import json
import re

import torch
import triton
import triton.language as tl

TENSOR_CORES = r"(wgmma\.mma_async|mma\.sync|tcgen05\.mma)"
SHAPES = ((64, 64, 64), (200, 136, 1000), (512, 384, 4096), (128, 128, 131_072))


@triton.jit
def product_kernel(
    a_ptr, b_ptr, out_ptr, m, n, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """Write a @ b^T of int8 a [m, k] and b [n, k], int32 [m, n]."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    sums = tl.zeros((ROWS, COLUMNS), tl.int32)
    for start in range(0, k, DEPTH):
        inside = start + depth < k
        a_places = a_ptr + rows[:, None] * k + (start + depth)[None, :]
        b_places = b_ptr + columns[None, :] * k + (start + depth)[:, None]
        a = tl.load(a_places, mask=(rows < m)[:, None] & inside[None, :], other=0)
        b = tl.load(b_places, mask=(columns < n)[None, :] & inside[:, None], other=0)
        sums = tl.dot(a, b, sums, out_dtype=tl.int32)
    places = out_ptr + rows[:, None] * n + columns[None, :]
    tl.store(places, sums, mask=(rows < m)[:, None] & (columns < n)[None, :])


def main() -> None:
    g = torch.Generator("cpu").manual_seed(0)
    digest, instructions, wrong = hashlib.sha256(), set(), []
    for m, n, k in SHAPES:
        for low in (-127, 127):  # any codes; the largest sums
            a, b = (
                torch.randint(low, 128, (rows, k), generator=g, dtype=torch.int8).cuda()
                for rows in (m, n)
            )
            out = torch.empty(m, n, dtype=torch.int32, device="cuda")
            grid = (triton.cdiv(m, 128), triton.cdiv(n, 64))
            kernel = product_kernel[grid](a, b, out, m, n, k, 128, 64, 64, num_warps=4)
            instructions.update(re.findall(TENSOR_CORES, kernel.asm["ptx"]))
            exact = a.double() @ b.double().mT  # below 2**53
            if not torch.equal(out.double(), exact):
                wrong.append(f"{m} x {n} x {k} from {low}: {int((out != exact).sum())} differ")
            digest.update(out.cpu().numpy().tobytes())
    instructions = sorted(instructions)
    print(json.dumps({"used": instructions, "wrong": wrong, "digest": digest.hexdigest()}))


if __name__ == "__main__":
    main()
