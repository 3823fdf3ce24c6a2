"""Block formats on CUDA tensors have the bits of the CPU: the same plain PyTorch runs on both."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from benchmarks.shapes import SHAPES
from tests.kernels.bits import different, random

from jetrl import Policy
from jetrl.models.packed import ForwardInputs
from jetrl.precision import PrecisionPlan
from jetrl.precision.block_formats import BLOCK_FORMATS, BlockFormat, block_values, quantize_blocks
from jetrl.precision.fp4 import clamped_operands, derivative, fp4_values
from jetrl.session.parity import measure

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("format", BLOCK_FORMATS, ids=lambda f: f.words)
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("key", [None, (0, "policy", 3, 1, "dgrad")], ids=["nearest", "draws"])
def test_values_are_those_of_a_cpu(
    format: BlockFormat, rotated: bool, key: tuple[int | str, ...] | None
) -> None:
    x = random(1040, 512) * random(1040, 512, seed=1).mul(4).exp2()
    x[0], x[1, :32], x[2, 5], x[64, 3] = 0.0, 0.0, 2.0**-140, math.nan
    for values in (x, x.bfloat16(), x[:32] * 1e36):
        found = block_values(values.cuda(), format, key, rotated).cpu()
        assert different(found, block_values(values, format, key, rotated)) == 0


@pytest.mark.parametrize("format", BLOCK_FORMATS, ids=lambda f: f.words)
def test_bytes_of_all_bf16_values_are_those_of_a_cpu(format: BlockFormat) -> None:
    every = torch.arange(2**16).to(torch.int16).view(torch.bfloat16).view(-1, 64)
    finite = every[every.float().isfinite().all(1)][:1008]
    found, expected = (quantize_blocks(x, format).packed() for x in (finite.cuda(), finite))
    for ours, theirs in zip(found, expected, strict=True):
        assert different(ours.cpu(), theirs) == 0


def test_fp4_rows_and_the_derivative_are_those_of_a_cpu() -> None:
    x = (random(1040, 512) * random(1040, 512, seed=1).mul(4).exp2()).bfloat16()
    x[0], x[1, :32], x[2, 5], x[64, 3] = 0.0, 0.0, 2.0**-140, math.nan
    found = (fp4_values(x.cuda()), *clamped_operands(x.cuda(), 0.99), derivative(x.cuda().float()))
    expected = (fp4_values(x), *clamped_operands(x, 0.99), derivative(x.float()))
    for ours, theirs in zip(found, expected, strict=True):
        assert different(ours.cpu(), theirs) == 0


@pytest.mark.hopper
@pytest.mark.parametrize(
    "preset, options",
    [("nvfp4", {"weight_block": "16x16"}), ("nvfp4", {"weight_block": "1x16"}), ("fp4", {})],
    ids=str,
)
def test_both_sides_of_the_plan_agree_and_layers_can_be_recomputed(
    preset: str, options: dict[str, Any]
) -> None:
    in_four_bits = {"first_layers_bf16": 0, "last_layers_bf16": 0}
    plan = PrecisionPlan.preset(preset).replace(**in_four_bits, **options)
    p = Policy.from_config(SHAPES["tiny"], plan=plan, seed=0, device="cuda")
    assert measure(p, num_prompts=12, samples=4, max_tokens=64).different == 0
    ids, ends = torch.arange(300, device="cuda") * 7 % 256, torch.tensor([0, 170, 300])
    inputs = ForwardInputs.packed(ids.cpu(), ends).to(torch.device("cuda"))
    targets = torch.arange(1, 300)
    found = []
    for recomputed in (False, True):
        logprobs, _ = p.train_logprobs(inputs, ends, targets.cuda(), 1.0, recomputed)
        logprobs.mean().backward()
        found.append({name: master.grad for name, master in p.master_weights().items()})
        for master in p.master_weights().values():
            master.grad = None
    assert found[0].keys() == found[1].keys()
    assert {n for n, g in found[0].items() if different(g, found[1][n])} == set()
