"""Kernel table of plans that are defined for every machine, on Hopper: its own INT8 product."""

# ruff: noqa: F401, F403  (re-exports for the protocol)

from __future__ import annotations

from jetrl.precision.triton.defined import *  # isort: skip

from jetrl.precision.hopper.grouped import int8_grouped_matmul
from jetrl.precision.hopper.int8_rows import int8_matmul
