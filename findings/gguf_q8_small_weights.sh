#!/usr/bin/env bash
# gguf 0.19.0: Q8_0 is worse than the 4-bit Q4_0 for weights around 1e-5.
#
# Guess:    a format with a scale per 32 weights has the same relative error at any size; eight bits beat four.
# Behavior: the scale is FP16, max / 127 in Q8_0 and max / 8 in Q4_0. Below a maximum of 0.008 the scale of Q8_0 is
#           subnormal and loses bits; below 4e-6 it is 0, and so is the whole block. Q4_0 gets there 16 times later.
# Output:   relative error of normal weights with std 1e-2, 1e-4, 1e-5, 1e-6: Q8_0 0.005, 0.011, 0.095, 0.999; Q4_0 0.086,
#           0.086, 0.086, 0.105.
# Why:      the B matrix of a LoRA starts at 0 and grows by about the learning rate per step: after ten steps at 1e-6 its
#           entries are near 1e-5. An adapter or a delta in Q8_0 then says nothing about the run. Scale it first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile gguf==0.19.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import numpy
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

weights = numpy.random.default_rng(0).standard_normal((64, 1024)).astype(numpy.float32)
errors = {}
for name in ("Q8_0", "Q4_0"):
    kind = GGMLQuantizationType[name]
    for std in (1e-2, 1e-4, 1e-5, 1e-6):
        x = weights * numpy.float32(std)
        error = numpy.linalg.norm(dequantize(quantize(x, kind), kind) - x) / numpy.linalg.norm(x)
        errors[name, std] = error
        print(f"{name}, std {std:g}: relative error {error:.3f}")
assert errors["Q8_0", 1e-2] < 0.006 and errors["Q4_0", 1e-2] > 0.08
assert errors["Q8_0", 1e-5] > errors["Q4_0", 1e-5]
assert errors["Q8_0", 1e-6] > 0.9 > 0.2 > errors["Q4_0", 1e-6]
PY
