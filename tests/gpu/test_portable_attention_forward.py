"""The portable attention forward on a GPU: the bits of `attention.integer`, on real shapes."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.kernels.attention_forward_cases import (
    Case,
    differences,
    different,
    quantized,
    query_differences,
    random_rows,
)

from jetrl.kernels.attention.layout import QueryTiles
from jetrl.kernels.portable.attention_forward import Config, attend_staged, stage_keys

pytestmark = pytest.mark.gpu

CASES = {
    "edges": Case([1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 1000], heads=8, groups=2),
    "splits": Case([1023, 1024, 1025, 2049, 3100], heads=4, groups=1, head_dim=128),
    "sharp": Case([700, 1500], heads=4, groups=4, head_dim=128, sharpness=40.0),
    "huge scores": Case([300], heads=4, groups=2, head_dim=128, sharpness=1e7),
    "special": Case([200, 131, 1500], heads=4, groups=2, head_dim=128, special=True),
    "special 64": Case([64, 900], heads=16, groups=1, head_dim=64, sharpness=5.0, special=True),
    "stems": Case(
        [256, 300, 1, 64, 1152, 1, 200, 77], [-1, 0, 0, 0, -1, 4, 4, -1], heads=8, groups=2,
        head_dim=128, special=True,
    ),
    "stem of a split": Case([1024, 1, 40], [-1, 0, 0], heads=4, groups=2, head_dim=64),
    "prefill": Case([1, 100, 256, 3], contexts=[1, 1024, 300, 1027], heads=8, groups=2),
    "prefill special": Case(
        [64, 70, 500], contexts=[1025, 2100, 500], heads=4, groups=1, head_dim=128, special=True
    ),
    "groups of 14": Case([300, 70], heads=14, groups=1, head_dim=64),
}  # fmt: skip
CONFIGS = [
    Config(),
    Config(stages=3, stacked=True),
    Config(channels=128, stages=3),
    Config(channels=128, stages=2, registers=168),
    Config(rows=32, warps=2),
    Config(rows=128, channels=128, warps=8),
]


@pytest.mark.parametrize("name", CASES)
def test_kernels_have_the_bits_of_the_reference(name: str) -> None:
    assert not any(differences(CASES[name], "cuda").values()), differences(CASES[name], "cuda")


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_queries_have_the_codes_and_scales_of_the_reference(head_dim: int) -> None:
    found = query_differences(1000, 5, head_dim, "cuda")
    assert found == {"codes": 0, "scales": 0}


def test_sizes_of_tiles_change_no_bits() -> None:
    case = Case([1100, 333, 64], heads=4, groups=2, head_dim=128, special=True)
    starts = [0, *itertools.accumulate(case.lengths)]
    q, k, v = random_rows(case, starts[-1], "cuda")
    tiles = QueryTiles.packed(starts, "cuda")
    staged = stage_keys(quantized(k, v), tiles)
    first, *others = (attend_staged(q, staged, tiles, config) for config in CONFIGS)
    for config, (out, statistics) in zip(CONFIGS[1:], others, strict=True):
        known = ~statistics[1].isnan()
        found = (
            different(out, first[0]),
            different(statistics[0][known], first[1][0][known]),
            different(statistics[1], first[1][1]),
        )
        assert found == (0, 0, 0), f"{config}: out, N, L"


def test_a_graph_captures_it() -> None:
    """Lists are built on the host before; the graph has the bits of a launch without it."""
    case = Case([300, 1100], heads=4, groups=2, head_dim=128)
    starts = [0, *itertools.accumulate(case.lengths)]
    q, k, v = random_rows(case, starts[-1], "cuda")
    codes, tiles = quantized(k, v), QueryTiles.packed(starts, "cuda")
    expected, _ = attend_staged(q, stage_keys(codes, tiles), tiles)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = attend_staged(q, stage_keys(codes, tiles), tiles)
    graph.replay()
    assert different(out, expected) == 0
