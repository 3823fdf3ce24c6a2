"""Grouped BF16 products on a GPU: the bits of dense products with one order, in graphs too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

from tests.kernels.expert_cases import (  # noqa: E402
    FP8_CASES,
    LARGE,
    Case,
    adapted_results,
    compare_bf16,
    different,
    far_from,
    layer_results,
    random,
)

from jetrl.precision import PrecisionPlan  # noqa: E402
from jetrl.precision.backend import selected_backend  # noqa: E402
from jetrl.precision.triton import expert_rows, grouped_bf16  # noqa: E402

CUDA = torch.device("cuda")


@pytest.mark.parametrize("memory", ["large", "small"])
@pytest.mark.parametrize("name", [*FP8_CASES, *LARGE])
def test_products_have_the_bits_of_dense_products(name: str, memory: str) -> None:
    compared = compare_bf16((FP8_CASES | LARGE)[name], CUDA, memory)
    assert {result: count for result, count in compared.items() if count} == {}


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_a_layer_is_near_that_of_a_cpu(backend: str) -> None:
    case, plan = Case(100, 4, 9, 192, 320), PrecisionPlan.preset("bf16")
    want = layer_results(case, torch.device("cpu"), plan)
    with selected_backend(backend):
        made = {name: one.cpu() for name, one in layer_results(case, CUDA, plan).items()}
    assert far_from(made, want) == dict.fromkeys(want, 0)


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("preset", ["bf16", "int8", "unified"])
def test_adapters_are_near_those_of_a_cpu(preset: str, by_token: bool) -> None:
    case, plan = Case(100, 4, 9, 256, 384), PrecisionPlan.preset(preset)
    want = adapted_results(case, torch.device("cpu"), plan, by_token)
    made = adapted_results(case, CUDA, plan, by_token)
    found = {name: one.cpu() for name, one in made.items()}
    assert far_from(found, want) == dict.fromkeys(want, 0)


def test_a_graph_captures_products_with_other_groups() -> None:
    experts, tokens, slots, width = 32, 100, 4, 256
    w = random(experts * width, width, device=CUDA, seed=1).bfloat16()
    x = random(tokens, width, device=CUDA, seed=2).bfloat16()
    chosen = random(tokens, experts, device=CUDA).topk(slots).indices

    def products() -> tuple[Tensor, ...]:
        groups = expert_rows.group_rows(chosen, experts)
        y = grouped_bf16.bf16_grouped_matmul(x, w, groups, by_token=True)
        dw = torch.zeros(w.shape, device=CUDA)
        grouped_bf16.add_bf16_grouped_wgrad(dw, y, x, groups, by_token=True)
        return y, grouped_bf16.bf16_grouped_dgrad(y, w, groups), dw

    products()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = products()
    chosen.copy_(random(tokens, experts, device=CUDA, seed=7).topk(slots).indices)
    graph.replay()
    for found, expected in zip(captured, products(), strict=True):
        assert different(found, expected) == 0
