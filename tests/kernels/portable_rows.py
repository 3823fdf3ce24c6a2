"""Cases of the portable row kernels with their references, for the interpreter and for GPUs."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from tests.kernels.bits import different, random
from torch import Tensor

from jetrl.kernels import adamw, norm, swiglu
from jetrl.kernels.adamw_scalars import adamw_scalars
from jetrl.kernels.portable import adamw as portable_adamw
from jetrl.kernels.portable import norm as portable_norm
from jetrl.kernels.portable import rotary as portable_rotary
from jetrl.kernels.portable import swiglu as portable_swiglu
from jetrl.kernels.rotary import rotary
from jetrl.precision import linear
from jetrl.precision.exact import sum_of_rows, sum_of_squares
from jetrl.precision.triton import defined, row_sums

EPS = 1e-6
CPU = torch.device("cpu")


def extreme(x: Tensor) -> Tensor:
    """Give some of the rows of x zeros, NaN, Inf, and very large and very small values."""
    rows = len(x)
    with_rows = {
        1: lambda row: row.zero_(),
        3: lambda row: row[1:2].fill_(torch.nan),
        5: lambda row: row[0:1].fill_(torch.inf),
        7: lambda row: row[::2].fill_(-torch.inf),
        9: lambda row: row.mul_(1e38),
        11: lambda row: row.mul_(1e-39),
        13: lambda row: row[0:1].fill_(1e30),
        15: lambda row: row.neg_().clamp_(max=-0.0),
    }
    for row, change in with_rows.items():
        if row < rows:
            change(x[row])
    return x


def norm_case(rows: int, width: int, special: bool, device: torch.device) -> dict[str, int]:
    """The backward of RMSNorm, with and without the gradient of the residual stream."""
    x, dy, dresidual = (random(rows, width, seed=seed).bfloat16() for seed in range(3))
    if special:
        x, dy = extreme(x), extreme(dy.flip(0))
    weight = (1 + 0.1 * random(width)).bfloat16()
    x, dy, dresidual, weight = (t.to(device) for t in (x, dy, dresidual, weight))
    inverse = norm.rms_norm_ref(x, weight, EPS)[1].squeeze(-1)
    leaves = x.clone().requires_grad_(), weight.float().requires_grad_()
    # The reference's flow: the gradient of the master weight is that of its bfloat16 copy.
    y = norm._RMSNorm.apply(leaves[0], leaves[1].to(torch.bfloat16), EPS)
    torch.autograd.backward([y, leaves[0] * 1.0], [dy, dresidual])
    sums = leaves[0].grad, leaves[1].grad
    leaves[0].grad = leaves[1].grad = None
    norm._RMSNorm.apply(leaves[0], leaves[1].to(torch.bfloat16), EPS).backward(dy)
    found = {}
    for name, residual, expected in (
        ("dx", None, (leaves[0].grad, leaves[1].grad)),
        ("dx + dresidual", dresidual, sums),
    ):
        ours = portable_norm.rms_norm_backward(dy, x, weight, inverse, residual)
        found[name] = different(ours[0], expected[0])
        found[f"dweight of {name}"] = different(ours[1], expected[1])
    for values in () if special else (dy, dy.float()):
        ours = row_sums.sum_of_rows(values)
        found[f"sum_of_rows {values.dtype}"] = different(ours, sum_of_rows(values))
    return found


def bias_case(rows: int, width: int, device: torch.device) -> dict[str, int]:
    """The gradient of a bias, of rows that are not contiguous."""
    product, dy = (random(2 * rows, width, seed=seed).bfloat16().to(device) for seed in range(2))
    gradients = []
    for table in (None, defined):
        bias = random(width).to(device).requires_grad_()
        with mock.patch.object(linear, "arithmetic_of", return_value=table):
            linear._Biased.apply(product[::2], bias).backward(dy[::2])
        assert bias.grad is not None
        gradients.append(bias.grad)
    return {"dbias": different(gradients[1], gradients[0])}


def squares_case(rows: int, width: int, scale: float, device: torch.device) -> dict[str, int]:
    x = (random(rows, width) * scale).to(device)
    found = {"squares": different(portable_norm.block_squares(x), squares_ref(x))}
    for value in (torch.inf, torch.nan) if scale == 1 else ():
        x[-1, -1] = value
        ours = portable_norm.block_squares(x)
        found[f"squares with {value}"] = different(ours, squares_ref(x))
    return found


def squares_ref(x: Tensor) -> Tensor:
    blocks = x.split(norm.BLOCK_ROWS)
    return torch.cat([sum_of_squares(block.reshape(1, -1)) for block in blocks])


def swiglu_case(rows: int, width: int, device: torch.device) -> dict[str, int]:
    """SwiGLU and its backward, with gates of every bfloat16 if there are enough values."""
    gate_up, dy = (4 * random(rows, 2 * width)).bfloat16(), extreme(random(rows, width)).bfloat16()
    values = min(2**16, dy.numel())
    bits = torch.arange(-(2**15), 2**15)[torch.linspace(0, 2**16 - 1, values).long()]
    gate = gate_up[:, :width].flatten().clone()
    gate[:values] = bits.to(torch.int16).view(torch.bfloat16)
    gate_up[:, :width] = gate.view(rows, width)
    gate_up, dy = gate_up.to(device), dy.to(device)
    leaf = gate_up.clone().requires_grad_()
    # By the references on a GPU too.
    with mock.patch.object(swiglu, "kernels_of", return_value=None):
        y = swiglu._SwiGLU.apply(leaf)
        y.backward(dy)
    again = dy.clone()
    return {
        "y": different(portable_swiglu.swiglu_forward(gate_up), y.detach()),
        "dx": different(portable_swiglu.swiglu_backward(dy, gate_up), leaf.grad),
        "dx with y": different(portable_swiglu.swiglu_backward(again, gate_up, again), leaf.grad),
        "y again": different(again, y.detach()),
    }


def rotary_case(
    tokens: int, heads: int, groups: int, size: int, normed: bool, smoothed: bool, special: bool,
    device: torch.device,
) -> dict[str, int]:  # fmt: skip
    """The backward of `Rotary.heads` without a model: norms, rotation and smoothing."""
    counts = [heads, groups, groups]
    qkv = random(tokens, sum(counts) * size).bfloat16()
    gradients = [random(tokens, n, size, seed=n).bfloat16() for n in counts]
    if special:
        extreme(qkv)
        extreme(gradients[0].view(-1, size))
        gradients[1] = torch.where(random(tokens, groups, size) > 0, -0.0, gradients[1])
    qkv, *gradients = (x.to(device) for x in (qkv, *gradients))
    positions = torch.arange(tokens, device=device).flip(0) % 61
    angles = 7 * random(64, size // 2).to(device)
    table = torch.stack([angles.cos(), angles.sin()], 1)
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(
        -11, 4, (heads + groups, size // 2), generator=generator, dtype=torch.int8
    ).to(device)
    masters = [(1 + 0.1 * random(size, seed=seed)).to(device).requires_grad_() for seed in (4, 5)]
    leaf = qkv.clone().requires_grad_()
    q, k, v = leaf.unflatten(1, (-1, size)).split(counts, dim=1)
    if normed:
        q, k = (
            norm._RMSNorm.apply(x, w.to(x.dtype), EPS) for x, w in zip((q, k), masters, strict=True)
        )
    of_q, of_k = exponents.split([heads, groups]) if smoothed else (None, None)
    turned = [rotary(q, positions, table, of_q), rotary(k, positions, table, of_k), v]
    torch.autograd.backward(turned, gradients)
    ours = portable_rotary.qk_norm_rotary_backward(
        *gradients, qkv, positions, table,
        (masters[0].detach().bfloat16(), masters[1].detach().bfloat16()) if normed else None,
        EPS, exponents if smoothed else None,
    )  # fmt: skip
    found = {"dqkv": different(ours[0], leaf.grad)}
    for name, weight, ours_of_it in zip("qk", masters, ours[1:], strict=True):
        if normed:
            found[f"{name} norm"] = different(ours_of_it, weight.grad)
    return found


def adamw_case(size: int, scale: float, device: torch.device) -> dict[str, int]:
    """Three steps of AdamW with float32 moments, the gradients at some scale."""
    clip = torch.tensor(0.37)
    first = [random(size), torch.zeros(size), torch.zeros(size)]
    ours = [x.to(device, copy=True) for x in first]
    for step in range(1, 4):
        scalars = adamw_scalars(step, lambda _: 1e-3, (0.9, 0.99), 1e-8, 0.1)
        gradient = random(size, seed=step) * scale
        gradient[::5] = 0.0
        master, *moments = first
        adamw._adamw_fp32_(master, gradient, *moments, clip=clip, s=scalars)
        portable_adamw.adamw_(ours[0], gradient.to(device), *ours[1:], clip.to(device), scalars)
    names = ("master", "exp_avg", "exp_avg_sq")
    return {n: different(a.cpu(), b) for n, a, b in zip(names, ours, first, strict=True)}


def adamw_cases(gpu: bool) -> list[tuple[int, float]]:
    """Elements, scale of gradients."""
    sizes = [1, 1500] + ([2**20 + 3] if gpu else [])
    return [(size, scale) for size in sizes for scale in (1.0, 1e-22, 1e-42, 1e18)]


def norm_cases(gpu: bool) -> list[tuple[int, int, bool]]:
    """Rows, width; with Inf, NaN and zeros."""
    if not gpu:
        return [(1, 64, False), (17, 40, True), (130, 24, True)]
    shapes = [
        (1, 64),
        (17, 40),
        (257, 24),
        (128, 896),
        (1000, 4096),
        (2049, 5120),
        (4097, 576),
        (16384, 4096),
    ]
    return [(*shape, special) for shape in shapes for special in (False, True)]


def bias_cases(gpu: bool) -> list[tuple[int, int]]:
    """Rows, width."""
    return [(1, 64), (129, 40), *([(4097, 1152)] if gpu else [])]


def squares_cases(gpu: bool) -> list[tuple[int, int, float]]:
    """Rows, width, factor of the values."""
    shapes = [(1, 1), (3, 5), (130, 200)]
    if gpu:
        shapes += [(1, 4096), (127, 4096), (1025, 4096), (300, 12288), (5000, 1024), (128, 40)]
    return [(*shape, scale) for shape in shapes for scale in (1.0, 1e-41, 1e-30, 1e30)]


def swiglu_cases(gpu: bool) -> list[tuple[int, int]]:
    """Rows, width."""
    return [(1, 8), (17, 24), (3, 1100)] + ([(63, 192), (1000, 12288), (129, 4864)] if gpu else [])


def rotary_cases(gpu: bool) -> list[tuple[int, int, int, int, bool, bool, bool]]:
    """Tokens, heads, groups, head size; with norms, with smoothing, with Inf, NaN and zeros."""
    small = [(29, 5, 1, 16, True, True, True), (3, 2, 2, 32, False, True, False)]
    small += [(2, 4, 1, 64, True, False, False)]
    if not gpu:
        return small
    modes = [(n, s, x) for n in (True, False) for s in (True, False) for x in (True, False)]
    shapes = [(1, 32, 8, 128), (300, 14, 2, 64), (1025, 5, 1, 128), (2048, 32, 8, 128)]
    large = [(9000, 32, 8, 128, True, True, False)]
    return small + [(*shape, *mode) for shape in shapes for mode in modes] + large


KINDS: dict[str, tuple[Any, Any]] = {
    "norm": (norm_cases, norm_case),
    "bias": (bias_cases, bias_case),
    "squares": (squares_cases, squares_case),
    "swiglu": (swiglu_cases, swiglu_case),
    "rotary": (rotary_cases, rotary_case),
    "adamw": (adamw_cases, adamw_case),
}


def differences(kind: str, sizes: tuple[Any, ...], device: torch.device) -> list[str]:
    """Return what differs in a case, and in how many values."""
    found = KINDS[kind][1](*sizes, device)
    return [f"{kind} {sizes}: {what} has {n}" for what, n in found.items() if n]
