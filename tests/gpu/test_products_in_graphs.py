"""Products with adapters one behind another, replayed: early reads are wrong once in thousands."""

from __future__ import annotations

import itertools
from typing import Literal

import pytest
import torch
from linears import LINEARS, random, weight

from jetrl.kernels.norm_triton import rms_norm_forward
from jetrl.kernels.swiglu_triton import swiglu_forward
from jetrl.precision.adapter_weight import AdapterWeight
from jetrl.precision.hopper.adapter_linear import adapted_matmul, nvfp4_adapted_matmul
from jetrl.precision.nvfp4 import OrderedNVFP4, hopper_order, quantize_nvfp4
from jetrl.precision.quantize import QTensor
from jetrl.precision.triton.quantize import quantize_rows, quantize_weight

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

LAYERS, REPLAYS, RANK = 4, 400, 32
Base = OrderedNVFP4 | QTensor
Layer = dict[str, tuple[Base, AdapterWeight]]


def layer(seed: int, codes: str) -> Layer:
    """Return the linear layers of a layer of Qwen3-8B, each with its adapter."""
    made = {}
    for name, (n, k, parts) in LINEARS.items():
        if name != "odd":
            base, nvfp4 = random(n, k, seed, k**-0.5), codes == "nvfp4"
            quantized = hopper_order(quantize_nvfp4(base)) if nvfp4 else quantize_weight(base)
            made[name] = quantized, weight(RANK, k, parts, n)
    return made


def adapted(
    x: torch.Tensor, base: Base, adapter: AdapterWeight, form: Literal["fused", "passes"]
) -> torch.Tensor:
    """Return a product with its adapter's added; X is quantized in front of an FP8 product."""
    if isinstance(base, QTensor):
        return adapted_matmul(quantize_rows(x), x, base, adapter, form)[0]
    return nvfp4_adapted_matmul(x, base, adapter, form)[0]


@pytest.mark.parametrize("codes", ["nvfp4", "fp8"])
@pytest.mark.parametrize("rows", [1, 8, 12, 16, 32, 64])
def test_products_behind_each_other_have_the_bits_of_passes(rows: int, codes: str) -> None:
    layers = [layer(seed, codes) for seed in range(LAYERS)]
    inputs = random(8 * rows, 4096, rows).view(8, rows, 4096)
    start, ones = inputs[0].clone(), torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    products: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]] = {}

    def product(index: int, name: str, x: torch.Tensor) -> torch.Tensor:
        y = adapted(x, *layers[index][name], "fused")
        products[index, name] = x, y
        return y

    def normed(x: torch.Tensor) -> torch.Tensor:
        return rms_norm_forward(x, ones, 1e-6)[0]

    def forward() -> None:
        x = start
        for index in range(LAYERS):
            product(index, "qkv", normed(x))
            x = product(index, "o", normed(x))
            x = product(index, "down", swiglu_forward(product(index, "gate_up", normed(x))))

    wrong = torch.zeros(LAYERS * 4, dtype=torch.int64, device="cuda")

    def check() -> None:
        for place, ((index, name), (x, y)) in enumerate(products.items()):
            true = adapted(x, *layers[index][name], "passes")
            wrong[place] += (y != true).sum()

    graphs = []
    for work in (forward, check):
        work()
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            work()
    wrong.zero_()
    for x in itertools.islice(itertools.cycle(inputs), REPLAYS):
        start.copy_(x)
        for graph in graphs:
            graph.replay()
    found = dict(zip(products, wrong.tolist(), strict=True))
    assert len(found) == 4 * LAYERS
    assert not any(found.values()), {key: count for key, count in found.items() if count}
