#!/usr/bin/env bash
# torch 2.13.0 on a CPU: float8_e8m0fnu, the type of MX scales, drops signs, and rounds scales down as well as up.
#
# Guess:    a negative number and zero, which no power of two is, become NaN, as in ml_dtypes; and a scale amax / 448 that
#           is cast to E8M0 covers the block's largest value.
# Behavior: -3 becomes 4, 0 becomes 2**-127, and values from 1.5 * 2**127 on become NaN. The cast rounds to the nearest
#           power, so a scale with a mantissa below 1.5 gets smaller, and the largest values of its block saturate.
# Output:   -3 -> 4 (ml_dtypes: NaN), 0 -> 5.9e-39 (ml_dtypes: NaN), 3e38 -> NaN. Of 4,096 blocks of 32 normal values, 70
#           percent have a scale below amax / 448; their largest values get 19% too small on average, 33% at worst.
# Why:      a wrong sign of a scale is a bug that NaN would show. MX quantizers must round scales up themselves.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 ml-dtypes==0.6.0
"$folder/venv/bin/python" -W ignore - <<'PY'
import math

import ml_dtypes
import numpy
import torch

x = torch.tensor([-3.0, 0.0, 3e38])
ours = x.to(torch.float8_e8m0fnu).float().tolist()
other = x.numpy().astype(ml_dtypes.float8_e8m0fnu).astype(numpy.float32).tolist()
print("from                 ", x.tolist())
print("torch float8_e8m0fnu ", ours)
print("ml_dtypes            ", other)
assert ours[:2] == [4.0, 2.0**-127] and all(math.isnan(value) for value in (ours[2], *other))

blocks = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0))
largest = blocks.abs().amax(1, keepdim=True)
scales = (largest / 448).to(torch.float8_e8m0fnu).float()
stored = (largest / scales).to(torch.float8_e4m3fn).float() * scales
small = scales < largest / 448
lost = (1 - stored / largest)[small]
print(f"scales below amax / 448: {small.float().mean():.1%}")
print(f"their largest values: {lost.mean():.1%} too small on average, {lost.max():.1%} at worst")
assert 0.69 < small.float().mean() < 0.71 and 0.18 < lost.mean() < 0.2 and lost.max() > 0.33
PY
