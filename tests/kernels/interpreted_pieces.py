"""Compare INT8 products by BF16 tensor cores with references, by Triton's interpreter on a CPU.

    TRITON_INTERPRET=1 python tests/kernels/interpreted_pieces.py

The cases are some of other programs. It prints a JSON object: case -> what differs, if anything.
"""

from __future__ import annotations

import json

import by_bf16  # noqa: F401  (before jetrl)
import exact_interpreter  # noqa: F401  (patches the interpreter)
import expert_cases
import interpreted_attention_backward as backward
import interpreted_attention_decode as decode
import interpreted_attention_forward as forward
import interpreted_gemm as gemm
import torch
import triton
import triton.language as tl
from attention_forward_cases import differences

from jetrl.precision.triton.portable_int8 import int8_dot


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, K: tl.constexpr):
    """Write a sum of products of 16 rows of a and of b, added to what is there."""
    rows = tl.arange(0, 16)
    places = rows[:, None] * K + tl.arange(0, K)[None, :]
    outs = out_ptr + rows[:, None] * 16 + rows[None, :]
    a, b = tl.load(a_ptr + places), tl.load(b_ptr + places)
    tl.store(outs, int8_dot(a, b.T, tl.load(outs)))


def compare_sums(k: int) -> int:
    """Compare the largest sums over k codes, added to totals that float32 cannot hold."""
    a = torch.full((16, k), -128, dtype=torch.int8)
    b = a.clone()
    b[8:] = torch.where(torch.arange(k) == 5, 127, b[8:]).to(torch.int8)
    found = torch.arange(256, dtype=torch.int32).view(16, 16) + (2**30 + 1)
    want = (found.double() + a.double() @ b.double().mT).int()
    _dot_kernel[(1,)](a, b, found, k)
    return int((found != want).sum())


if __name__ == "__main__":
    torch.set_num_threads(1)
    backward.use_maxima_of_numpy()
    cpu = torch.device("cpu")
    found: dict[str, object] = {f"sums over {k}": compare_sums(k) for k in (64, 1024)}
    for name in ("special", "stems", "prefill"):
        found[f"forward {name}"] = {
            k: n for k, n in differences(forward.CASES[name], "cpu").items() if n
        }
    found |= {f"backward {case}": backward.differences(case, cpu) for case in backward.CASES[1:4]}
    for case in (decode.CASES[1], decode.CASES[4]):
        found[f"decode {case}"] = decode.compare(case, "cpu")["different"]
    found |= gemm.compare_head(40, 64, 520) | gemm.compare_head(40, 64, 520, largest=True)
    for name in ("experts without rows", "one expert"):
        compared = expert_cases.compare(expert_cases.CASES[name], cpu)
        found |= {f"{name}: {result}": n for result, n in compared.items()}
    print(json.dumps(found))
