"""Grouped FP8 products of experts on a GPU have the bits of dense ones; graphs capture a layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

from tests.kernels.expert_cases import (  # noqa: E402
    FP8_CASES,
    HOPPER_CASES,
    LARGE,
    SQUARES,
    chosen_by,
    compare_fp8,
    compare_squares,
    different,
    random,
)

from jetrl.precision import quantize  # noqa: E402
from jetrl.precision.backend import selected_backend  # noqa: E402
from jetrl.precision.hopper import grouped  # noqa: E402
from jetrl.precision.hopper.gemm import fp8_matmul_hopper  # noqa: E402
from jetrl.precision.int8 import int8_rows  # noqa: E402
from jetrl.precision.quantize import QTensor  # noqa: E402
from jetrl.precision.triton import expert_rows, float_tiles, grouped_fp8, grouped_int8  # noqa: E402

CUDA = torch.device("cuda")


def by_cublas(a: QTensor, b: QTensor) -> Tensor:
    """A dense product that compiles nothing; tests/gpu/test_gemm.py compares it with DeepGEMM."""
    return fp8_matmul_hopper(a, b, torch.bfloat16, "cublas")


# cuBLAS refuses products of one block of 128, as of few rows per expert, and splits the longest
# sums of small matrices.
BY_CUBLAS = [name for name in LARGE if name not in ("512 experts", "many rows")]


@pytest.mark.parametrize(
    "name, dense",
    [
        *((name, float_tiles.fp8_matmul) for name in (*FP8_CASES, *LARGE)),
        *((name, by_cublas) for name in BY_CUBLAS),
    ],
)
def test_fp8_products_have_the_bits_of_dense_layers(
    name: str, dense: Callable[[QTensor, QTensor], Tensor]
) -> None:
    compared = compare_fp8((FP8_CASES | LARGE)[name], CUDA, dense)
    assert {result: count for result, count in compared.items() if count} == {}


@pytest.mark.parametrize("name", HOPPER_CASES)
def test_hoppers_kernel_changes_no_bit(name: str) -> None:
    case = HOPPER_CASES[name]
    groups = expert_rows.group_rows(chosen_by(case, CUDA), case.experts)
    w = int8_rows(random(case.experts * case.n, case.k, device=CUDA, seed=1))
    turned = grouped_fp8.turned_matrices(w, case.experts)
    dy = quantize(random(len(groups.tokens), case.n, device=CUDA).bfloat16(), (1, 128))
    matrices = quantize(random(case.experts * 256, case.k, device=CUDA, seed=2), (128, 128))
    stacked = grouped_fp8.stacked_matrices(matrices, case.experts)
    x = quantize(random(case.tokens, case.k, device=CUDA, seed=3).bfloat16(), (1, 128))
    for rows, weight, by_token in ((dy, turned, False), (x, stacked, True)):
        want = grouped_fp8.product(rows, weight, groups, by_token)
        for _ in range(3):  # a race would not show every time
            assert different(grouped.fp8_product(rows, weight, groups, by_token), want) == 0


@pytest.mark.parametrize("sizes", SQUARES)
def test_weights_in_squares_are_those_of_each_expert(sizes: tuple[int, int, int]) -> None:
    assert compare_squares(*sizes, CUDA) == 0


@pytest.mark.parametrize("tokens", [100, 1500])  # few rows per expert, and many
def test_a_graph_captures_a_layer_with_other_groups(tokens: int) -> None:
    experts, slots, width = 32, 4, 256
    with selected_backend("reference"):
        w = int8_rows(random(experts * width, width, device=CUDA, seed=1))
        x = int8_rows(random(tokens, width, device=CUDA).bfloat16())
    values = random(tokens, width, device=CUDA, seed=2).bfloat16()
    weights = random(tokens, slots, device=CUDA, seed=3)
    chosen = random(tokens, experts, device=CUDA).topk(slots).indices

    def layer() -> tuple[Tensor, ...]:
        groups = expert_rows.group_rows(chosen, experts)
        y = grouped.int8_grouped_matmul(x, w, groups, by_token=True)
        dw, dw_fp8 = (torch.ones(w.shape, device=CUDA) for _ in range(2))
        grouped_int8.add_int8_grouped_wgrad(dw, True, y, values, groups, by_token=True)
        rows, along = grouped_fp8.fp8_grouped_gradient(y, groups, "fp32")
        dx = grouped.fp8_grouped_dgrad(rows, w, groups)
        grouped_fp8.add_fp8_grouped_wgrad(dw_fp8, True, along, values, groups, True, "fp32")
        return expert_rows.combine(y, weights, groups), dw, dx, dw_fp8

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    chosen.copy_(random(tokens, experts, device=CUDA, seed=7).topk(slots).indices)
    graph.replay()
    for found, expected in zip(captured, layer(), strict=True):
        assert different(found, expected) == 0
