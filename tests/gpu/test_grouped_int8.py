"""Grouped INT8 products of experts on a GPU have the bits of their references."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

from tests.kernels.expert_cases import (  # noqa: E402
    CASES,
    HOPPER_CASES,
    LARGE,
    ROUTES,
    Case,
    chosen_by,
    compare,
    compare_routes,
    different,
    layer_results,
    part,
    random,
)

from jetrl.kernels.routing_rule import RoutingRule  # noqa: E402
from jetrl.precision.backend import selected_backend  # noqa: E402
from jetrl.precision.experts import combine  # noqa: E402
from jetrl.precision.hopper import grouped  # noqa: E402
from jetrl.precision.int8 import int8_rows, int8_turned  # noqa: E402
from jetrl.precision.triton import expert_rows, grouped_int8, int8  # noqa: E402
from jetrl.precision.triton.bf16 import bf16_matmul  # noqa: E402

CUDA = torch.device("cuda")


@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_kernels_have_the_bits_of_their_references(name: str) -> None:
    compared = compare((CASES | LARGE)[name], CUDA)
    assert {result: count for result, count in compared.items() if count} == {}


@pytest.mark.parametrize("rule", ROUTES)
@pytest.mark.parametrize("tokens, experts", [(1, 8), (63, 60), (1000, 128), (129, 512)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_routes_have_the_bits_of_their_references(
    tokens: int, experts: int, dtype: torch.dtype, rule: RoutingRule
) -> None:
    compared = compare_routes(tokens, experts, CUDA, dtype, rule)
    assert {result: count for result, count in compared.items() if count} == {}


@pytest.mark.parametrize("experts", [1, 60, 128, 512])
def test_a_routers_logits_do_not_depend_on_the_batch(experts: int) -> None:
    x = random(1000, 2048, device=CUDA).bfloat16()
    w = random(experts, 2048, device=CUDA, seed=1).bfloat16()
    whole = bf16_matmul(x, w)
    assert (whole.float() - x.float() @ w.float().mT).abs().max() <= 2.0**-7 * whole.abs().max()
    for rows in (slice(0, 1), slice(3, 66), slice(100, 229), slice(17, 900)):
        assert different(bf16_matmul(x[rows], w), whole[rows]) == 0


@pytest.mark.parametrize("memory", ["large", "small"])
def test_tiles_change_no_bit(memory: str) -> None:
    chosen = random(700, 16, device=CUDA).topk(4).indices
    groups = expert_rows.group_rows(chosen, 16)
    with selected_backend("reference"):
        w = int8_rows(random(16 * 320, 576, device=CUDA, seed=1))
        x = int8_rows(random(700, 576, device=CUDA).bfloat16())
    made = [
        grouped_int8.product(x, w, groups, True, torch.bfloat16, tile)
        for tile in grouped_int8.TILES[memory].values()
    ]
    assert [different(one, made[0]) for one in made] == [0] * len(made)


@pytest.mark.parametrize("name", HOPPER_CASES)
@pytest.mark.parametrize("by_token", [True, False])
def test_hoppers_kernel_changes_no_bit(name: str, by_token: bool) -> None:
    case = HOPPER_CASES[name]
    groups = expert_rows.group_rows(chosen_by(case, CUDA), case.experts)
    w = int8.int8_rows(random(case.experts * case.n, case.k, device=CUDA, seed=1))
    rows = case.tokens if by_token else len(groups.tokens)
    x = int8.int8_rows(random(rows, case.k, device=CUDA).bfloat16())
    x.scales[0], w.scales[-1] = torch.nan, torch.inf
    want = grouped_int8.int8_grouped_matmul(x, w, groups, by_token)
    for _ in range(3):  # a race would not show every time
        assert different(grouped.int8_product(x, w, groups, by_token), want) == 0


@pytest.mark.parametrize("experts, n, k", [(1, 64, 128), (3, 192, 320), (64, 1536, 512)])
def test_turned_weights_are_those_of_each_expert(experts: int, n: int, k: int) -> None:
    with selected_backend("reference"):
        w = int8_rows(random(experts * n, k, device=CUDA))
        made = int8.int8_turned(w, experts)
        for expert in range(experts):
            want = int8_turned(part(w, slice(expert * n, (expert + 1) * n)))
            found = part(made, slice(expert * k, (expert + 1) * k))
            assert different(found.codes, want.codes) == 0
            assert different(found.scales, want.scales) == 0


def test_a_layer_has_the_bits_of_a_cpu() -> None:
    case = Case(100, 4, 9, 192, 320)
    want = layer_results(case, torch.device("cpu"))
    with selected_backend(defined=True):
        made = layer_results(case, CUDA)
    assert {name: different(made[name].cpu(), want[name]) for name in want} == dict.fromkeys(
        want, 0
    )


def test_a_sum_begins_with_its_first_row() -> None:
    groups = expert_rows.group_rows(torch.zeros(3, 1, dtype=torch.int64, device=CUDA), 1)
    y, weights = torch.full((3, 64), -0.0, device=CUDA).bfloat16(), torch.ones(3, 1, device=CUDA)
    with selected_backend("reference"):
        want = combine(y, weights, groups)
    assert different(expert_rows.combine(y, weights, groups), want) == 0
    assert bool(want.signbit().all())
