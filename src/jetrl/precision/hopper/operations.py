"""Hopper's kernels of plans without defined bits, named by `precision.backend.Arithmetic`."""

# ruff: noqa: F401  (re-exports for the protocol)

from __future__ import annotations

from jetrl.precision.hopper.adapter import project_down_hopper as project_down
from jetrl.precision.hopper.adapter import project_up_hopper as project_up
from jetrl.precision.hopper.adapter_linear import (
    adapted_matmul,
    nvfp4_adapted_matmul,
    quantized_adapted_matmul,
)
from jetrl.precision.hopper.gemm import fp8_matmul_hopper as fp8_matmul
from jetrl.precision.hopper.int8_rows import int8_matmul
from jetrl.precision.hopper.nvfp4 import nvfp4_dgrad_hopper as nvfp4_dgrad
from jetrl.precision.hopper.nvfp4 import nvfp4_matmul_hopper as nvfp4_matmul
from jetrl.precision.nvfp4 import hopper_order as nvfp4_order
from jetrl.precision.triton.add import add_products
from jetrl.precision.triton.bf16 import bf16_matmul, bf16_matmul_free
from jetrl.precision.triton.expert_rows import combine, combine_backward, group_rows, sum_slots
from jetrl.precision.triton.grouped_bf16 import (
    add_bf16_grouped_product,
    add_bf16_grouped_wgrad,
    bf16_grouped_dgrad,
    bf16_grouped_matmul,
)
from jetrl.precision.triton.grouped_fp8 import (
    fp8_grouped_dgrad,
    fp8_grouped_gradient,
    fp8_grouped_matmul,
    fp8_grouped_wgrad,
)
from jetrl.precision.triton.grouped_int8 import int8_grouped_matmul, int8_grouped_wgrad
from jetrl.precision.triton.int8 import int8_rows, int8_squares_turned, int8_tokens, int8_turned
from jetrl.precision.triton.layout import empty_weight
from jetrl.precision.triton.quantize import (
    dithered_bf16,
    quantize_rows,
    quantize_rows_and_tokens,
    quantize_squares,
    quantize_weight,
    turned_weight,
)
