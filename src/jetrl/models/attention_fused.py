"""The trainer's attention on a GPU, from qkv on, as one autograd function.

Forward normalizes and rotates query and key heads and quantizes keys and values in one pass, then
attends to the stored codes, with the bits of decode and prefill (`kernels.attention`). Backward
goes through attention, the rotation and the QK norm; the quantizer is straight-through.

Legend: T tokens, H query heads, G key-value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl.kernels.attention.layout import KeyValueCodes, QueryTiles
from jetrl.kernels.attention.reference import stored_values
from jetrl.kernels.backend import device_kernels
from jetrl.models.layer import Rotary, tell
from jetrl.precision.formats import BF16, key_and_value_formats
from jetrl.precision.plan import PrecisionPlan
from jetrl.precision.saved import saved_codes, saved_values


def attend_packed_fused(
    qkv: Tensor, rope: Rotary, tiles: QueryTiles, plan: PrecisionPlan, length: int | None
) -> Tensor:
    """Return causal attention of a packed batch, bfloat16 [T, H * D], differentiable.

    `qkv` is bfloat16 [T, (H + 2G) * D], not yet rotated. `length` is that of every sequence, None
    if they differ. A plan without pinned sums uses cuDNN for equal lengths. Otherwise the exact
    kernels run: they are faster than FlashAttention-2, torch's only other form for packed
    sequences.
    """
    q_norm, k_norm = (None, None) if rope.norms is None else [norm.weight for norm in rope.norms]
    library = key_and_value_formats(plan.kv) == (BF16, BF16) and not plan.pinned
    length = length if library else None
    return _PackedAttention.apply(qkv, q_norm, k_norm, rope, tiles, plan, length)


class _PackedAttention(torch.autograd.Function):
    """Attention from qkv on, by the exact kernels or, if `length` is given, by cuDNN."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, rope: Rotary,
        tiles: QueryTiles, plan: PrecisionPlan, length: int | None,
    ) -> Tensor:  # fmt: skip
        # Rotated queries [T, H, D], and keys and values as a cache stores them, [T, G, D].
        kernels = device_kernels(qkv)
        codes = KeyValueCodes.empty(
            len(qkv), rope.num_kv_heads, rope.head_dim(qkv), kv_format=plan.kv, device=qkv.device
        )
        q = kernels.qk_norm_rotary_cache(
            qkv, rope.positions, rope.table, rope.norm_weights, rope.eps, rope.num_heads, codes,
            None, plan.scales, rope.exponents,
        )  # fmt: skip
        keys, values = (codes.k, codes.k_scales), (codes.v, codes.v_scales)
        if rope.trace is not None:
            tell(rope.trace, "rotary", q)
            stored = [stored_values(keys), stored_values(values)]
            tell(rope.trace, "keys and values", torch.cat(stored, dim=1))
        if length is None:
            o, *kept = kernels.attend_batch(q, codes, tiles)
        else:
            o, *kept = kernels.attend_equal_lengths(q, codes.k, codes.v, length)
        saved = (_saved_qkv(qkv, rope), saved_codes(q.flatten(1))) if rope.saves_codes else (qkv, q)
        ctx.save_for_backward(*saved, *keys, *values, o, *kept)
        ctx.rope, ctx.tiles, ctx.length = rope, tiles, length
        return o.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q, k, k_scales, v, v_scales, o, *kept = ctx.saved_tensors
        rope: Rotary = ctx.rope
        do, kernels = grads[0].contiguous().view(o.shape), device_kernels(o)
        q = saved_values(q).view(o.shape)
        # Through attention, with the keys and values that forward attended to.
        if ctx.length is None:
            codes = KeyValueCodes(k, k_scales, v, v_scales)
            dq, dk, dv = kernels.attention_backward(do, q, codes, o, kept[0], ctx.tiles)
        else:
            rest, length = tuple(kept), ctx.length
            dq, dk, dv = kernels.attend_equal_lengths_backward(do, q, k, v, o, rest, length)
        del q
        # Through the rotation and the norms of query and key heads.
        if rope.saves_codes:
            qkv = _loaded_qkv(qkv, rope, dv)
        gradients = kernels.qk_norm_rotary_backward(
            dq, dk, dv, qkv, rope.positions, rope.table, rope.norm_weights, rope.eps,
            rope.exponents,
        )  # fmt: skip
        return (*gradients, None, None, None, None)


def _saved_qkv(qkv: Tensor, rope: Rotary) -> Tensor:
    """Return what backward reads of qkv as codes: the heads that have norms, or nothing."""
    if rope.norms is None:
        return qkv.new_empty(0, dtype=torch.int8)
    return saved_codes(rope.before_norms(qkv))


def _loaded_qkv(saved: Tensor, rope: Rotary, dv: Tensor) -> Tensor:
    """Return qkv with the values of `_saved_qkv`; other columns are not initialized."""
    heads = rope.num_heads + 2 * rope.num_kv_heads
    qkv = dv.new_empty(len(dv), heads * dv.shape[-1])
    if rope.norms is not None:
        saved_values(saved, rope.before_norms(qkv))
    return qkv
