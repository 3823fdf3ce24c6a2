"""The instructions mma.sync (decode's) and wgmma (the forward's) add in the same order."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

COUNT, ROWS, COLUMNS = 64, 64, 128
KINDS = ["normal", "wide", "sparse", "subnormal", "weights"]


def chain(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, wgmma: bool) -> torch.Tensor:
    """Return c + a @ b^T."""
    from tensor_core_chains import chain_kernel

    out = torch.full_like(c, float("nan"))
    chain_kernel[(len(a),)](
        a, b, c, out, a.shape[-1], COLUMNS, wgmma, num_warps=4, enable_fp_fusion=False
    )
    return out


def numbers(kind: str, g: torch.Generator, *shape: int) -> torch.Tensor:
    x = torch.randn(*shape, device="cuda", generator=g)
    uniform = torch.rand(*shape, device="cuda", generator=g)
    return {
        "normal": x,
        "wide": x.sign() * torch.exp2(uniform * 28 - 20),
        "sparse": x * (uniform < 0.3),
        "subnormal": x * 2.0**-17,  # of FP16
        "weights": torch.exp2(15 - 20 * uniform),  # as the softmax makes them
    }[kind]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("k", [16, 128])
def test_wgmma_gives_the_bits_of_mma_sync(k: int, dtype: torch.dtype) -> None:
    g = torch.Generator("cuda").manual_seed(k)
    for kind in KINDS:
        a = numbers(kind, g, COUNT, ROWS, k).to(dtype)
        b = numbers("normal" if kind == "weights" else kind, g, COUNT, COLUMNS, k).to(dtype)
        zero = torch.zeros(COUNT, ROWS, COLUMNS, device="cuda")
        nearly_minus = -(a.double() @ b.double().mT).float() * (1 + 2.0**-12)
        for c in (zero, numbers("normal", g, *zero.shape), nearly_minus):
            by_wgmma, by_mma = (chain(a, b, c, wgmma) for wgmma in (True, False))
            assert by_mma.isfinite().all()
            assert torch.equal(by_wgmma.view(torch.int32), by_mma.view(torch.int32)), kind
