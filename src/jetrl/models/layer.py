"""Operations that decoder layers share: norm, rotary embedding, and the trace of a forward.

A trace is called with the output of each operation. It serves to find the first operation that
differs between two forwards, or the first with a non-finite output.

Legend: T tokens, H query heads, G key-value heads, D head size (of a norm its width).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from jetrl.kernels.norm import rms_norm
from jetrl.kernels.rotary import rotary
from jetrl.models.weights import Weights
from jetrl.precision.backend import backend_of
from jetrl.precision.quantize import QTensor, dequantize
from jetrl.precision.saved import gradient_at, saved_codes, saved_values

Trace = Callable[[str, Tensor], None]  # (name of the operation, its output)


def tell(trace: Trace | None, name: str, value: Tensor | QTensor) -> None:
    """Pass the output of an operation, dequantized, to the trace, if there is one."""
    if trace is not None:
        trace(name, dequantize(value) if isinstance(value, QTensor) else value)


def prefixed(trace: Trace | None, prefix: str) -> Trace | None:
    """Return a trace that puts `prefix` before the names of operations."""
    return None if trace is None else lambda name, value: trace(prefix + name, value)


class RMSNorm(nn.Module):
    """RMSNorm with the FP32 master weight `name`.weight [D].

    Fused kernels and forwards without gradients read the rounded weight. With gradients, the
    reference rounds the master weight in the graph, to the same bits.

    If `sums` is a list, backward of fused kernels appends the terms of the weight's gradient, whose
    sum the caller needs (`precision.exact.GRADIENT_TERMS`), and returns an arbitrary gradient.
    """

    def __init__(self, weights: Weights, name: str, eps: float) -> None:
        super().__init__()
        self.quantized = weights.quantized(name, f"{name}.weight", weights.rest)
        self.weight, self.eps = self.quantized.master, eps
        self.sums: list[Tensor] | None = None

    @property
    def rounded(self) -> Tensor:
        """The weight [D] in the dtype of activations."""
        weight = self.quantized.operand("train")
        assert isinstance(weight, Tensor), "a norm's weight is never FP8"
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x [..., D], with the same shape and dtype."""
        if not torch.is_grad_enabled():
            return rms_norm(x, self.rounded, self.eps)
        noise = self.quantized.noise
        weight = self.weight if noise is None else self.weight + noise
        return rms_norm(x, weight.to(x.dtype), self.eps)


@dataclass(frozen=True)
class Rotation:
    """The angles and smoothing factors for the query and key heads of a forward's tokens.

    Attributes:
        positions: int64 [T], each token's position in its sequence.
        table: float32 [positions, 2, R / 2], cosines and sines of the R channels that rotate.
        exponents: As in `Rotary`.
    """

    positions: Tensor
    table: Tensor
    exponents: Tensor | None


@dataclass(frozen=True)
class Rotary:
    """The positions, rotation and norms with which a layer computes queries and keys from qkv.

    The tensors are not copied, so a captured forward follows writes to them.

    Attributes:
        positions: int64 [T], each token's position in its sequence.
        table: float32 [positions, 2, R / 2], cosines and sines of the R channels that rotate.
        norms: The norms of query heads and of key heads, before the rotation; None if absent.
        exponents: int8 [H + G, D / 2], for smoothing queries and keys after the rotation
            (`key_smoothing.head_exponents`); None for no smoothing.
        as_values: Whether attention's output is read as BF16 values (by an adapter), not as codes.
        saves_codes: Whether the norms' inputs and the queries are saved for backward as codes.
    """

    positions: Tensor
    table: Tensor
    norms: tuple[RMSNorm, RMSNorm] | None
    num_heads: int
    num_kv_heads: int
    exponents: Tensor | None = None
    trace: Trace | None = None
    as_values: bool = False
    saves_codes: bool = False

    def head_dim(self, qkv: Tensor) -> int:
        """Return D, the size of a head in qkv [T, (H + 2G) * D]."""
        return qkv.shape[-1] // (self.num_heads + 2 * self.num_kv_heads)

    @property
    def norm_weights(self) -> tuple[Tensor, Tensor] | None:
        """The rounded weights [D] of the norms of query heads and of key heads."""
        return None if self.norms is None else (self.norms[0].rounded, self.norms[1].rounded)

    @property
    def eps(self) -> float:
        return 0.0 if self.norms is None else self.norms[0].eps

    def before_norms(self, qkv: Tensor) -> Tensor:
        """Return a view of the query and key heads of qkv, [T, (H + G) * D]."""
        return qkv[:, : -self.num_kv_heads * self.head_dim(qkv)]

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries [T, H, D] and keys [T, G, D], and values: the reference.

        `qkv` is [T, (H + 2G) * D]: query heads, key heads, values.
        """
        counts = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim(qkv))).split(counts, dim=1)
        if self.norms is not None:
            entered, (q_norm, k_norm) = (q, k), self.norms
            q, k = q_norm(q), k_norm(k)
            if self.saves_codes:
                again = saved_values(saved_codes(self.before_norms(qkv.detach())))
                of_q, of_k = again.view(len(qkv), -1, q.shape[-1]).split(counts[:2], dim=1)
                q = gradient_at(q_norm, entered[0], of_q, q)
                k = gradient_at(k_norm, entered[1], of_k, k)
        of_q = of_k = None
        if self.exponents is not None:
            of_q, of_k = self.exponents.split([self.num_heads, self.num_kv_heads])
        q = rotary(q, self.positions, self.table, of_q)
        k = rotary(k, self.positions, self.table, of_k)
        if self.trace is not None:  # the concatenation is only for the trace
            tell(self.trace, "rotary", torch.cat([q, k], dim=1))
        return q, k, v


def fuses(x: Tensor) -> bool:
    """Return whether fused operations support x: BF16 on a GPU."""
    return x.dtype == backend_of(x).fused
