"""Kernel table of plans that are defined for every machine, on any NVIDIA GPU from 8.0 on."""

# ruff: noqa: F401  (re-exports for the protocol)

from __future__ import annotations

from jetrl.precision.triton.add import add_products
from jetrl.precision.triton.expert_rows import combine, combine_backward, group_rows, sum_slots
from jetrl.precision.triton.grouped_int8 import add_int8_grouped_wgrad, int8_grouped_matmul
from jetrl.precision.triton.int8 import int8_rows, int8_tokens, int8_turned
from jetrl.precision.triton.int8_planes import (
    add_planes_wgrad,
    planes_dgrad,
    planes_fprop,
    planes_of_rows,
)
from jetrl.precision.triton.layout import empty_weight
from jetrl.precision.triton.portable_int8 import int8_matmul
from jetrl.precision.triton.row_sums import sum_of_rows
