"""Kernel table of plans that are defined for every machine, on Hopper: its own INT8 product."""

# ruff: noqa: F401  (re-exports for the protocol)

from __future__ import annotations

from jetrl.precision.hopper.int8_rows import int8_matmul
from jetrl.precision.triton.defined import (
    add_planes_wgrad,
    add_products,
    combine,
    combine_backward,
    empty_weight,
    group_rows,
    int8_grouped_matmul,
    int8_grouped_wgrad,
    int8_rows,
    int8_tokens,
    int8_turned,
    planes_dgrad,
    planes_fprop,
    planes_of_rows,
    sum_of_rows,
    sum_slots,
)
