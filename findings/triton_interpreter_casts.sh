#!/usr/bin/env bash
# triton 3.7.1: the interpreter (TRITON_INTERPRET=1) truncates to BF16 and wraps large values around in FP8.
#
# Guess:    a kernel in the interpreter rounds as on a GPU: to nearest, and E4M3 saturates or gives NaN above 448.
# Behavior: FP32 to BF16 cuts the low bits off. FP32 to float8_e4m3fn turns 1e4 into 320 and infinity into 256. FP16 is
#           right.
# Output:   half of 1024 BF16 values differ from torch's, each of them smaller in magnitude. FP8: [500, 1e4, inf] ->
#           [256, 320, 256], where torch gives 448.
# Why:      tests of quantization kernels run in the interpreter on machines without a GPU. There a correct kernel looks
#           biased, and a kernel that forgets to clamp gives harmless finite numbers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 triton==3.7.1
cat >"$folder/casts.py" <<'PY'
import torch
import triton
import triton.language as tl


@triton.jit
def cast(source, target, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(target + i, tl.load(source + i).to(target.dtype.element_ty))


def interpreted(x, kind):
    y = torch.empty(len(x), dtype=kind)
    cast[(1,)](x, y, len(x))
    return y.float()


torch.manual_seed(0)
x = torch.randn(1024)
for kind, wrong in ((torch.float16, False), (torch.bfloat16, True)):
    found, right = interpreted(x, kind), x.to(kind).float()
    differ, smaller = (found != right).sum().item(), (found.abs() < right.abs()).sum().item()
    print(f"{kind}: {differ} of 1024 differ from torch, {smaller} of them smaller in magnitude")
    assert differ == smaller and (differ > 400 if wrong else differ == 0)
large = torch.tensor([448.0, 500.0, 1e4, float("inf")])
found = interpreted(large, torch.float8_e4m3fn).tolist()
right = large.to(torch.float8_e4m3fn).float().tolist()
print("float8_e4m3fn:", large.tolist(), "->", found, "torch:", right)
assert found == [448, 256, 320, 256] and right == [448] * 4
PY
TRITON_INTERPRET=1 "$folder/venv/bin/python" "$folder/casts.py"
