#!/usr/bin/env bash
# torch 2.13.0 on a CPU: converting infinity to float8_e4m3fn gives 448, a finite number.
#
# Guess:    a value above the range becomes NaN in E4M3 (the format has no infinity), as in ml_dtypes and JAX.
# Behavior: the three FP8 formats of one torch release differ: float8_e4m3fn saturates, infinity included,
#           float8_e4m3fnuz gives NaN, float8_e5m2 gives infinity. ml_dtypes gives NaN for float8_e4m3fn.
# Output:   inf -> 448 (e4m3fn), nan (e4m3fnuz), inf (e5m2), nan (ml_dtypes e4m3fn); 500 -> 448 and nan.
# Why:      a check for NaN after quantization does not see an overflow, so a diverged activation or gradient goes on as
#           448. Check before the cast. References made with ml_dtypes disagree above 464.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 ml-dtypes==0.6.0
"$folder/venv/bin/python" - <<'PY'
import math

import ml_dtypes
import numpy
import torch

x = torch.tensor([448.0, 500.0, math.inf])
e4m3, fnuz, e5m2 = (
    x.to(kind).float().tolist() for kind in (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)
)
other = x.numpy().astype(ml_dtypes.float8_e4m3fn).astype(numpy.float32).tolist()
print("from                     ", x.tolist())
print("torch float8_e4m3fn      ", e4m3)
print("torch float8_e4m3fnuz    ", fnuz)
print("torch float8_e5m2        ", e5m2)
print("ml_dtypes float8_e4m3fn  ", other)
assert e4m3 == [448, 448, 448]
assert math.isnan(fnuz[2]) and e5m2[2] == math.inf
assert math.isnan(other[1]) and math.isnan(other[2])
PY
