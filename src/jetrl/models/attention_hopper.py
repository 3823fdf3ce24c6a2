"""The trainer's attention on Hopper, from qkv on, as one autograd function.

Forward norms and rotates query and key heads and quantizes keys and values in one pass, and attends
to what it stored, with the bits of decode and prefill (`kernels.attention`). Backward goes through
attention, the rotation and the QK norm; the quantizer is passed straight through.

Legend: T tokens, H query heads, G key-value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl.kernels.attention.backward import attention_backward
from jetrl.kernels.attention.cudnn import attend_equal_lengths, attend_equal_lengths_backward
from jetrl.kernels.attention.forward import attend_tiles
from jetrl.kernels.attention.hopper import stored_values
from jetrl.kernels.attention.layout import KeyValueCodes, QueryTiles
from jetrl.kernels.attention.stage import stage_keys
from jetrl.kernels.rotary_backward_hopper import qk_norm_rotary_backward
from jetrl.kernels.rotary_hopper import dense_cache, qk_norm_rotary_cache
from jetrl.models.rotary import Rotary
from jetrl.models.trace import tell
from jetrl.precision.plan import PrecisionPlan


def attend_packed_hopper(
    qkv: Tensor, rope: Rotary, tiles: QueryTiles, plan: PrecisionPlan, length: int | None
) -> Tensor:
    """Return causal attention of a packed batch, bfloat16 [T, H * D], differentiable.

    A plan that promises no bits takes cuDNN for sequences of one length. For others it takes the
    exact kernels: they are faster than torch's FlashAttention-2, the library's only other form for
    packed sequences.

    Args:
        qkv: bfloat16 [T, (H + 2G) * D], not yet rotated.
        rope: How queries and keys are made of qkv.
        tiles: The work of the attention kernels.
        plan: The precision plan.
        length: The length of every sequence, or None where they differ.
    """
    masters = (None, None) if rope.norms is None else (rope.norms[0].weight, rope.norms[1].weight)
    if length is not None and plan.kv == "bf16" and not plan.exact:
        out: Tensor = _LibraryAttention.apply(qkv, *masters, rope, plan, length)
    else:
        out = _PackedAttention.apply(qkv, *masters, rope, tiles, plan)
    return out


def _heads(qkv: Tensor, rope: Rotary, plan: PrecisionPlan) -> tuple[Tensor, KeyValueCodes]:
    """Return rotated queries [T, H, D], and keys and values as a cache stores them, [T, G, D]."""
    cache = dense_cache(len(qkv), rope.num_kv_heads, rope.head_dim, plan.kv, qkv.device)
    q = qk_norm_rotary_cache(
        qkv, rope.positions, rope.table, rope.norm_weights, rope.eps, rope.num_heads, cache, None,
        plan.scales,
    )  # fmt: skip
    codes = KeyValueCodes(
        cache.k_codes.squeeze(1),
        None if cache.k_scales is None else cache.k_scales.squeeze(1),
        cache.v_codes.squeeze(1),
        None if cache.v_scales is None else cache.v_scales.squeeze(1),
    )
    if rope.trace is not None:
        tell(rope.trace, "rotary", q)
        tell(rope.trace, "keys and values", stored_values(codes))
    return q, codes


def _into_qkv(
    heads: tuple[Tensor, Tensor, Tensor], qkv: Tensor, rope: Rotary
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of qkv and of both norms' weights, from those of rotated heads."""
    return qk_norm_rotary_backward(
        *heads, qkv, rope.positions, rope.table, rope.norm_weights, rope.eps
    )


class _PackedAttention(torch.autograd.Function):
    """The exact kernels: the norms' master weights are inputs for their gradients alone."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        rope: Rotary,
        tiles: QueryTiles,
        plan: PrecisionPlan,
    ) -> Tensor:
        q, codes = _heads(qkv, rope, plan)
        o, lse = attend_tiles(q, stage_keys(codes, tiles), tiles)
        ctx.save_for_backward(qkv, q, codes.k, codes.k_scales, codes.v, codes.v_scales, o, lse)
        ctx.rope, ctx.tiles = rope, tiles
        return o.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q, k, k_scales, v, v_scales, o, lse = ctx.saved_tensors
        codes = KeyValueCodes(k, k_scales, v, v_scales)
        do = grads[0].contiguous().view(q.shape)
        heads = attention_backward(do, q, codes, o, lse, ctx.tiles)
        return (*_into_qkv(heads, qkv, ctx.rope), None, None, None)


class _LibraryAttention(torch.autograd.Function):
    """The same by cuDNN, for sequences of one length."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        rope: Rotary,
        plan: PrecisionPlan,
        length: int,
    ) -> Tensor:
        q, codes = _heads(qkv, rope, plan)
        o, *rest = attend_equal_lengths(q, codes.k, codes.v, length)
        ctx.save_for_backward(qkv, q, codes.k, codes.v, o, *rest)
        ctx.rope, ctx.length = rope, length
        return o.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q, k, v, o, *rest = ctx.saved_tensors
        do = grads[0].contiguous().view(q.shape)
        heads = attend_equal_lengths_backward(do, q, k, v, o, tuple(rest), ctx.length)
        return (*_into_qkv(heads, qkv, ctx.rope), None, None, None)
