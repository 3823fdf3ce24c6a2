"""Decode of integer attention by the portable kernels: the bits of the reference on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.kernels.interpreted_attention_decode import CASES, Case, compare, inputs, too_long

pytestmark = pytest.mark.gpu

EDGES = (1, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 0, 2049, 4100)
COUNTS = (1, 2, 3, 4, 1, 2, 3, 4, 4, 4, 0, 4, 3)
SHAPES = (
    *(Case(EDGES, groups=2, group=group, head_dim=128, peaked=3.0) for group in (1, 4, 7, 8, 16)),
    *(Case(EDGES, groups=3, group=group, head_dim=64, peaked=3.0) for group in (1, 2, 5, 9)),
    *(
        Case(EDGES, groups=2, group=group, head_dim=head_dim, counts=COUNTS, most=most)
        for group, head_dim, most in (
            (4, 128, 4), (4, 128, 8), (1, 128, 4), (8, 128, 4), (16, 128, 8), (5, 64, 4),
            (8, 64, 4), (2, 64, 8), (7, 64, 8),
        )
    ),
    Case((9000, 20000), groups=1, group=4, head_dim=128, peaked=10.0),
)  # fmt: skip
WIDE = [dataclasses.replace(case, head_dim=128, groups=2) for case in CASES]


@pytest.mark.parametrize("case", [*CASES, *WIDE, *SHAPES], ids=str)
def test_decode_has_the_bits_of_the_reference(case: Case) -> None:
    result = compare(case, "cuda")
    assert result["different"] == 0, f"{case}: {result}"


def test_a_launch_for_longer_contexts_changes_no_bit() -> None:
    case = Case((1, 64, 700, 1024), groups=2, group=4, head_dim=128)
    wider = dataclasses.replace(case, lengths=(*case.lengths, 3000))
    for each in (case, wider):
        result = compare(each, "cuda", longest=max(each.lengths))
        assert result["different"] == 0, f"{each}: {result}"


def test_a_context_of_too_many_splits_gives_nan() -> None:
    assert too_long("cuda")


@pytest.mark.parametrize("lengths", [(700, 1000), (700, 3000)], ids=str)
def test_a_graph_replays_with_other_lengths(lengths: tuple[int, int]) -> None:
    from jetrl.kernels.portable.attention_decode import attend_decode

    x = inputs(Case(lengths, groups=2, group=4, head_dim=128), "cuda")
    arguments = (x.q, x.pages, x.tables, x.lengths, max(lengths), 1024, None)
    attend_decode(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend_decode(*arguments)
    x.lengths.sub_(100)
    graph.replay()
    want = attend_decode(*arguments)
    assert torch.equal(out, want), f"{int((out != want).sum())} values differ"
