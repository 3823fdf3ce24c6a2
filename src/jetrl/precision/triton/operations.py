"""Kernels of GPUs from compute capability 8.0 on, of plans without defined bits.

The names are those that `precision.backend.Arithmetic` declares.
"""

# ruff: noqa: F401  (re-exports for the protocol)

from __future__ import annotations

from jetrl.precision.triton.adapter import (
    adapted_matmul,
    project_down,
    project_up,
    quantized_adapted_matmul,
)
from jetrl.precision.triton.add import add_products
from jetrl.precision.triton.bf16 import bf16_matmul_free
from jetrl.precision.triton.expert_rows import combine, combine_backward, group_rows, sum_slots
from jetrl.precision.triton.float_tiles import bf16_matmul, fp8_matmul
from jetrl.precision.triton.grouped_bf16 import (
    add_bf16_grouped_product,
    add_bf16_grouped_wgrad,
    bf16_grouped_dgrad,
    bf16_grouped_matmul,
)
from jetrl.precision.triton.grouped_fp8 import (
    add_fp8_grouped_wgrad,
    fp8_grouped_dgrad,
    fp8_grouped_gradient,
    fp8_grouped_matmul,
)
from jetrl.precision.triton.grouped_int8 import add_int8_grouped_wgrad, int8_grouped_matmul
from jetrl.precision.triton.int8 import int8_rows, int8_squares_turned, int8_tokens, int8_turned
from jetrl.precision.triton.layout import empty_weight
from jetrl.precision.triton.portable_int8 import int8_matmul
from jetrl.precision.triton.quantize import (
    dithered_bf16,
    quantize_rows,
    quantize_rows_and_tokens,
    quantize_squares,
    quantize_weight,
    turned_weight,
)
from jetrl.precision.triton.saved import load_values, save_codes
