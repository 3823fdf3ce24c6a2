"""Hopper's kernels of plans without defined bits: those of other GPUs, except for these."""

# ruff: noqa: F401, F403  (re-exports for the protocol)

from __future__ import annotations

from jetrl.precision.triton.operations import *  # isort: skip

from jetrl.precision.hopper.adapter import project_down_hopper as project_down
from jetrl.precision.hopper.adapter_linear import (
    adapted_matmul,
    nvfp4_adapted_matmul,
    quantized_adapted_matmul,
)
from jetrl.precision.hopper.gemm import fp8_matmul_hopper as fp8_matmul
from jetrl.precision.hopper.grouped import (
    fp8_grouped_dgrad,
    fp8_grouped_matmul,
    int8_grouped_matmul,
)
from jetrl.precision.hopper.int8_rows import int8_matmul
from jetrl.precision.hopper.nvfp4 import nvfp4_dgrad_hopper as nvfp4_dgrad
from jetrl.precision.hopper.nvfp4 import nvfp4_matmul_hopper as nvfp4_matmul
from jetrl.precision.nvfp4 import hopper_order as nvfp4_order
from jetrl.precision.triton.bf16 import bf16_matmul
