#!/usr/bin/env bash
# triton 3.7.1: on Hopper, tl.dot of INT8 waits for each wgmma; BF16 and FP8 keep one in flight.
#
# Guess:    a pipelined loop of tl.dot is compiled alike for BF16, FP8 and INT8: the next step's product is issued while
#           the last one runs.
# Behavior: only products with float32 sums are asynchronous. With int32 sums the loop waits until the tensor core is
#           empty, in every step, although the instruction is the same wgmma.mma_async.
# Output:   waits for wgmma from the loop on leave in flight: BF16 [1, 0], FP8 [1, 0] (in the loop, after it); INT8 [0] (in
#           the loop).
# Why:      INT8 has FP8's rate on a Hopper, but a plain Triton GEMM of INT8 does not overlap its products with its own
#           loads into registers, conversions and additions. Two programs per SM, or wgmma by hand (Gluon), do.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 triton==3.7.1
cat >"$folder/dots.py" <<'PY'
import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def product(a, b, c, k_steps, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SUM: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    stride = k_steps * K
    total = tl.zeros([M, N], SUM)
    for step in range(k_steps):
        left = tl.load(a + m[:, None] * stride + step * K + k[None, :])
        right = tl.load(b + n[:, None] * stride + step * K + k[None, :])
        total = tl.dot(left, right.T, total, out_dtype=SUM)
    tl.store(c + m[:, None] * N + n[None, :], total)


def waits(operand, result, depth):
    """Return if the PTX has wgmma, and how many products each wait from the loop on leaves in flight."""
    signature = {"a": f"*{operand}", "b": f"*{operand}", "c": f"*{result}", "k_steps": "i32"}
    sizes = {"M": 128, "N": 128, "K": depth, "SUM": tl.int32 if result == "i32" else tl.float32}
    signature |= dict.fromkeys(sizes, "constexpr")
    attrs = {(i,): [["tt.divisibility", 16]] for i in range(4)}
    source = ASTSource(product, signature, constexprs=sizes, attrs=attrs)
    options = {"num_warps": 8, "num_stages": 3}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    text = kernel.asm["ttgir"]
    loop = text[text.index("scf.for"):]
    return "wgmma" in kernel.asm["ptx"], [int(n) for n in re.findall(r"warp_group_dot_wait.*pendings = (\d+)", loop)]


found = {name: waits(*of) for name, of in {
    "bf16": ("bf16", "fp32", 64), "fp8e4nv": ("fp8e4nv", "fp32", 128), "i8": ("i8", "i32", 128)}.items()}
for name, (uses_wgmma, pendings) in found.items():
    print(f"{name}: wgmma {uses_wgmma}, waits leave in flight {pendings}")
assert found == {"bf16": (True, [1, 0]), "fp8e4nv": (True, [1, 0]), "i8": (True, [0])}
PY
# Compiling for sm_90 needs no GPU.
TRITON_CACHE_DIR="$folder/cache" "$folder/venv/bin/python" "$folder/dots.py"
