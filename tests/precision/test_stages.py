"""Stages of copies, and the cuts of few-row products, fit in the shared memory of an SM.

That what is counted is what Triton allocates: tests/kernels/compile_kernels.py.
"""

from __future__ import annotations

import pytest
from benchmarks.shapes import SHAPES, linear_shapes

from jetrl.precision.backend import HOPPER
from jetrl.precision.nvfp4 import FEW_ROWS, parts_of

pytest.importorskip("triton", reason="it is there on Linux alone")

from jetrl.precision.hopper.adapter import MOST_RANKS
from jetrl.precision.hopper.nvfp4_rows import Tiles, fused_tiles, shared_bytes, tiles_for
from jetrl.precision.triton.launch import TRITONS_OWN, fitting_stages, program_bytes

# NVFP4 refuses the widths of SmolLM2, and experts.
DENSE = [name for name, config in SHAPES.items() if "num_experts" not in config]


@pytest.mark.parametrize("shape", [name for name in DENSE if name != "smollm2-135m"])
def test_every_cut_fits_in_shared_memory(shape: str) -> None:
    for linear, (n, k) in linear_shapes(shape).items():
        parts, _ = parts_of(n, k)
        for rows in range(1, FEW_ROWS + 1):
            for rank in (0, *range(16, MOST_RANKS + 1, 16)):
                tiles = fused_tiles(rows, n, parts, rank) if rank else tiles_for(rows, n, parts)
                size = shared_bytes(tiles, rows, parts, rank)
                assert size <= HOPPER.shared_memory, (linear, rows, rank, tiles, size)
                assert tiles.rounds >= 2


def test_what_did_not_fit_is_seen() -> None:
    """Triton counted 244,192 bytes for this cut of `down` of Qwen3-32B on a GPU, of 232,448."""
    size = shared_bytes(Tiles(2, 2, 9, 80, together=True), 8, 4, 0)
    assert 244_192 <= size <= 244_192 + 512
    assert HOPPER.shared_memory == 232_448
    assert tiles_for(8, 5120, 4).rounds == 8


@pytest.mark.parametrize(
    ("room", "stages"), [(4, 4), (4 - 1 / 1024, 3), (9, 5), (2.5, 2), (0.5, 2)], ids=str
)
def test_stages_fit(room: float, stages: int) -> None:
    beside = 300
    found = fitting_stages(5, 1024, beside, int(room * 1024) + beside + TRITONS_OWN)
    assert found == stages
    assert program_bytes(found, 1024, beside) == stages * 1024 + beside + TRITONS_OWN
