"""The memory plan of products with NVFP4 weights counts the float32 sums that are really made."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl.memory.activations import nvfp4_product_bytes, sums_bytes
from jetrl.memory.plan import memory_plan
from jetrl.models.families import SHAPES, ModelConfig
from jetrl.precision import PrecisionPlan
from jetrl.precision.nvfp4 import HopperNVFP4, RowFactors
from jetrl.settings.loading import load_config

pytest.importorskip("triton", reason="it is there on Linux alone")

from jetrl.precision.hopper import nvfp4

META = torch.device("meta")
CODED = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
# Sizes of X that fill all pieces; others hold a little less than is counted.
WHOLE = (300, 1024, 4096, 8192)


class Held:
    """The float32 matrices that are made while this is in place, and the most bytes at once."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def made(self, tensor: Tensor) -> Tensor:
        """Count a matrix until nothing refers to it, if it is float32."""
        return self.any(tensor) if tensor.dtype == torch.float32 else tensor

    def any(self, tensor: Tensor) -> Tensor:
        """Count a matrix of any dtype until nothing refers to it."""
        self._add(tensor.nbytes)
        weakref.finalize(tensor, self._add, -tensor.nbytes)
        return tensor

    def _add(self, count: int) -> None:
        self.now += count
        self.most = max(self.most, self.now)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    """Counts what the products of the GPU allocate, on tensors without memory."""
    counts = Held()

    def widened(w: HopperNVFP4) -> Tensor:
        return torch.empty(w.shape, dtype=torch.bfloat16, device=META)

    def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        return counts.made(torch.empty(a.shape[0], b.shape[1], dtype=out_dtype, device=META))

    def zeros(shape: Sequence[int], device: torch.device) -> Tensor:
        return counts.made(torch.empty(shape, device=device))

    ours = SimpleNamespace(**{**vars(torch), "mm": mm, "zeros": zeros})
    monkeypatch.setattr(nvfp4, "torch", ours)
    monkeypatch.setattr(nvfp4, "widened_hopper", widened)
    monkeypatch.setattr(nvfp4, "check_matrix", lambda *arguments: None)
    monkeypatch.setattr(nvfp4, "pinned_bf16_reductions", contextlib.nullcontext)
    return counts


def weight(num_rows: int, num_columns: int, matrices: int) -> HopperNVFP4:
    """Return a weight without memory, stacked of matrices with scales of their own or of one."""
    factor: float | RowFactors = 1.0
    if matrices > 1:
        ends = [num_rows * i // matrices for i in range(matrices + 1)]
        ranges = tuple((a, b, 0.5) for a, b in itertools.pairwise(ends))
        factor = RowFactors(ranges, torch.empty(num_rows, device=META))
    empty = torch.empty(0, device=META)
    return HopperNVFP4(empty, empty, factor, torch.Size((num_rows, num_columns)))


@pytest.mark.parametrize("tokens", [257, 300, 1024, 1025, 4096, 5000, 8192, 9001])
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "matrices"),
    [
        pytest.param(51200, 5120, 2, id="gate and up of 32B"),
        pytest.param(51200, 5120, 1, id="gate and up of one scale"),
        pytest.param(6144, 4096, 3, id="q, k and v of 8B, in parts"),
        pytest.param(6144, 1024, 2, id="gate and up of 0.6B, in parts"),
        pytest.param(4096, 12288, 1, id="down of 8B, in four parts"),
    ],
)
def test_as_many_bytes_as_the_products_hold(
    num_rows: int, num_columns: int, matrices: int, tokens: int, held: Held
) -> None:
    w = weight(num_rows, num_columns, matrices)

    def most(product: Callable[..., Any], columns: int) -> int:
        held.most = 0
        product(torch.empty(tokens, columns, dtype=torch.bfloat16, device=META), w)
        assert held.now == 0
        return held.most

    really = max(
        most(nvfp4.nvfp4_matmul_hopper, num_columns), most(nvfp4.nvfp4_dgrad_hopper, num_rows)
    )
    counted = sums_bytes(num_rows, num_columns, tokens, matrices > 1)
    assert really <= counted
    if tokens in WHOLE:
        assert really == counted


@pytest.mark.parametrize("shape", ["qwen3-8b", "qwen3-32b"])
def test_the_plan_counts_sums_of_matrices_that_may_have_scales_of_their_own(shape: str) -> None:
    small = {**SHAPES[shape], "vocab_size": 512}  # so that a layer holds more than the head
    plain = ModelConfig.from_hf(small)
    coded = ModelConfig.from_hf({**small, "quantization_config": CODED})
    words = ["adapter.kind=lora", "precision.base=nvfp4", "rollout.max_prefill_tokens=512"]
    settings = load_config("demo", ["sft.steps=0", "eval.every=0", *words])
    plan = PrecisionPlan.from_settings(settings.precision)
    inner, hidden = plain.block.inner, plain.hidden_size
    assert nvfp4_product_bytes(coded, plan, 8192) == 4 * inner * hidden + 4 * 2048 * 2 * inner
    assert nvfp4_product_bytes(coded, plan, 256) == 0, "few rows are not widened"
    plans = [memory_plan(settings, config, tokens=4096) for config in (coded, plain)]

    def more(what: str, moment: str) -> int:
        mine, its = ([r for r in p.rows if r.what.startswith(what)] for p in plans)
        return mine[0].bytes[moment] - its[0].bytes[moment]  # type: ignore[index]

    def product(tokens: int, backward: bool = False) -> int:
        mine, its = (nvfp4_product_bytes(c, plan, tokens, backward) for c in (coded, plain))
        return mine - its

    assert more("a forward of 512 ", "rollout") == product(512) > 0
    assert more("while gradients are made", "backward") == product(4096, backward=True) > 0
