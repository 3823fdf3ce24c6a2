"""The checks of bits that come before each measurement: a fast wrong kernel is not fast.

Each function returns the number of elements that differ where they must not: a kernel from its
reference, sampling's form from training's, a row alone from the same row in a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.kernels.logprob_hopper import chosen_logprobs, lm_head_logprobs
from jetrl.kernels.norm import rms_norm_ref
from jetrl.kernels.norm_hopper import rms_norm_quantize
from jetrl.kernels.swiglu_hopper import swiglu_forward, swiglu_quantize
from jetrl.precision.gradients import Gradients
from jetrl.precision.hopper.gemm import Backend, deep_gemm_installed, fp8_matmul_hopper
from jetrl.precision.hopper.quantize import (
    quantize_rows,
    quantize_rows_and_tokens,
    quantize_weight,
    turned_weight,
)
from jetrl.precision.quantize import QTensor, quantize

_SLICES = (slice(0, 1), slice(3, 10), slice(5, 69), slice(0, 200))
_ROWS = 300


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _apart(a: Tensor, b: Tensor) -> int:
    return int((_bytes(a) != _bytes(b)).sum())


def _groups_apart(ours: QTensor, true: QTensor) -> int:
    """Count the bytes that differ, without rows of padding after the last token."""
    rows, blocks = true.codes.shape[0], true.scales.shape[0]
    return _apart(ours.codes[:rows], true.codes) + _apart(ours.scales[:blocks], true.scales)


def quantizers() -> int:
    """Compare the kernels that quantize with `precision.quantize`."""
    x, w = _random(_ROWS, 512), torch.randn(256, 384, device="cuda")
    rows, tokens = quantize_rows_and_tokens(x)
    direct = quantize_weight(w)
    true = quantize(w, (128, 128))
    return (
        _groups_apart(rows, quantize(x, (1, 128)))
        + _groups_apart(quantize_rows(x), quantize(x, (1, 128)))
        + _groups_apart(tokens, quantize(x, (128, 1)))
        + _groups_apart(direct, true)
        + _groups_apart(turned_weight(direct), true.mT)
    )


def gemms() -> int:
    """Compare GEMMs of rows alone with the batch, and the libraries with each other."""
    x, w = _random(_ROWS, 4096), quantize_weight(_random(4096, 4096))
    whole = fp8_matmul_hopper(quantize_rows(x), w)
    names: list[Backend | None] = [None, "cublas"]
    if deep_gemm_installed():
        names.append("deep_gemm")
    return sum(
        _apart(fp8_matmul_hopper(quantize_rows(x[rows]), w, backend=name), whole[rows])
        for rows in _SLICES
        for name in names
    )


def fused() -> int:
    """Compare fused norm and SwiGLU with the reference and its quantizer."""
    x, delta, weight = _random(_ROWS, 4096), _random(_ROWS, 4096), _random(4096)
    true = quantize(rms_norm_ref(x + delta, weight, 1e-6)[0], (1, 128))
    gate_up = _random(_ROWS, 2 * 4096)
    gated = quantize(swiglu_forward(gate_up), (1, 128))
    wrong = _groups_apart(swiglu_quantize(gate_up), gated)
    for training in (False, True):
        wrong += _groups_apart(rms_norm_quantize(x, weight, 1e-6, delta, training).rows, true)
    return wrong


@torch.no_grad()
def logprobs() -> int:
    """Compare log-probs of rows alone with the batch, and the head in chunks with it at once."""
    logits = torch.randn(_ROWS, 5000, device="cuda") * 3
    chosen = torch.randint(0, 5000, (_ROWS,), device="cuda")
    whole = chosen_logprobs(logits, chosen, 0.7)[0]
    wrong = sum(_apart(chosen_logprobs(logits[p], chosen[p], 0.7)[0], whole[p]) for p in _SLICES)
    hidden, master = _random(_ROWS, 1024), torch.randn(5000, 1024, device="cuda") * 0.02
    weight, sums = master.bfloat16(), Gradients()
    head = [
        lm_head_logprobs(hidden, master, weight, chosen, 0.7, rows, gradients=sums)[0]
        for rows in (64, 300)
    ]
    return wrong + _apart(head[0], head[1])
