"""Reference of causal attention over stored keys and values.

One function serves decode, prefill and training: a query at position p attends to keys 0..p of its
own sequence. Callers gather keys and values from pages, or slice them from a packed batch, into
dense arrays with padding that changes no bit:

    s = (q . k) * k_scale / sqrt(D)     the dot product exact, then float32
    p = exp(s - max s)                  float32, IEEE operations only
    o = sum(p * v_scale * v) / sum(p)   both sums exact on a grid relative to the row maximum

The gradient is straight-through at the quantization of keys and values. The backward does not have
to match other kernels bitwise and is plain float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from jetrl.precision.exact import align, exp_nonpositive
from jetrl.precision.formats import Format, key_and_value_formats
from jetrl.precision.quantize import QTensor, codes_as_float64, dequantize, quantize
from jetrl.settings.presets import DEFAULT_SCALES, ScaleRule

# Bits of a score: query 24 + code 18 + 8 (D up to 256); of an output: weight 18 + code 18 + 17
# (2**17 keys). At most 53, so float64 sums are exact. An E4M3 code is an integer below 2**18 times
# 2**-9; an INT8 code is an integer below 2**7.
_QUERY_BITS, _VALUE_BITS, _WEIGHT_BITS = 24, 18, 18
_MASS_GRID = 2.0**30
_MAX_SCORES = 2**23  # maximum scores at once; larger work is chunked, with the same bits


Stored = tuple[Tensor, Tensor | None]


def quantize_kv(x: Tensor, format: Format, scales: ScaleRule = DEFAULT_SCALES) -> Stored:
    """Return keys or values [T, G, D] as stored: codes and float32 scales [T, G], or x and None.

    Args:
        format: a format without a code leaves x unchanged.
        scales: "fp32", or "pow2" for power-of-two scales.
    """
    if format.code is None:
        return x, None
    q = quantize(x, (1, x.shape[-1]), format.code, scales)
    return q.codes, q.scales.squeeze(-1)


def quantize_keys_and_values(
    k: Tensor, v: Tensor, kv_format: str, scales: ScaleRule = DEFAULT_SCALES
) -> tuple[Stored, Stored]:
    """Return rotated keys and values [T, G, D] as stored in the cache formats `kv_format`."""
    key_format, value_format = key_and_value_formats(kv_format)
    return quantize_kv(k, key_format, scales), quantize_kv(v, value_format, scales)


def stored_values(stored: Stored) -> Tensor:
    """Return the dequantized values of codes [T, G, D] and scales [T, G], float32 [T, G, D]."""
    codes, scales = stored
    if scales is None:
        return codes.float()
    return dequantize(QTensor(codes, scales[..., None], (1, codes.shape[-1])))


def attend_dense(
    q: Tensor, keys: Stored, values: Stored, q_positions: Tensor, split: int | None = None
) -> Tensor:
    """Return attention of a padded batch, bfloat16 or float32 [B, Q, H, D].

    The bits of a row do not depend on padding, other rows, or L, unless `split` is given. Float32
    tensors use ordinary float32 attention (the fp32 plan).

    Args:
        keys: codes [B, L, G, D], float8_e4m3fn or int8, and scales, float32 [B, L, G]; or bfloat16
            without scales. Values likewise.
        q_positions: int64 [B, Q]; a query attends to keys up to its position.
        split: keys per split, summed in float32 in the order of the library, to compare with the
            attention of other engines. None: exact sums.
    """
    (k_codes, k_scales), (v_codes, v_scales) = keys, values
    if q.dtype == torch.float32:
        return _attend_fp32(q, k_codes, v_codes, q_positions)
    # Chunk the batch, then the queries, so that the scores of a chunk fit `_MAX_SCORES`.
    out = torch.empty_like(q)
    rows = max(1, _MAX_SCORES // max(1, q.shape[2] * q.shape[1] * k_codes.shape[1]))
    for start in range(0, q.shape[0], rows):
        b = slice(start, start + rows)
        k, k_scale = _as_codes(k_codes[b], None if k_scales is None else k_scales[b])
        v, v_scale = _as_codes(v_codes[b], None if v_scales is None else v_scales[b])
        queries = max(1, _MAX_SCORES // (q.shape[2] * k_codes.shape[1]))
        for first in range(0, q.shape[1], queries):
            part = slice(first, first + queries)
            piece, positions = q[b, part], q_positions[b, part]
            if split is None:
                out[b, part] = _attend(piece, k, k_scale, v, v_scale, positions)
            else:
                out[b, part] = _attend_in_splits(piece, k, k_scale, v, v_scale, positions, split)
    return out


def _as_codes(codes: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return codes on a common grid, float64 [B, G, L, D], and scales, float32 [B, G, 1, L]."""
    if scales is None:  # BF16: a power-of-two scale per token and head, codes at most 1
        exponent = torch.frexp(codes.float().abs().amax(-1)).exponent
        scales = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
        wide = align(codes.float() / scales[..., None], -1, _VALUE_BITS)
    else:
        wide = codes_as_float64(codes)
    return wide.transpose(1, 2), scales.transpose(1, 2).unsqueeze(2)


def _attend_in_splits(
    q: Tensor, k: Tensor, k_scale: Tensor, v: Tensor, v_scale: Tensor, positions: Tensor, split: int
) -> Tensor:
    """Return attention of a chunk by float32 sums over splits, folded in order."""
    groups = k.shape[1]
    shared = q.shape[2] // groups
    rows = q.unflatten(2, (groups, shared)).permute(0, 2, 3, 1, 4).flatten(2, 3).float()
    hidden = torch.arange(k.shape[2], device=q.device) > positions.repeat(1, shared)[..., None]
    v_seen = v.float().masked_fill(~_seen(positions, k.shape[2])[:, None, :, None], 0.0)
    largest = rows.new_full((*rows.shape[:-1], 1), -torch.inf)
    total, out = torch.zeros_like(largest), torch.zeros_like(rows)
    for start in range(0, k.shape[2], split):
        keys = slice(start, start + split)
        unseen = hidden[:, None, :, keys]
        scores = (rows @ k[:, :, keys].float().mT) * k_scale[..., keys] / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(unseen, -torch.inf)
        # All queries attend to key 0, so the maximum is finite from the first split on.
        before, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
        mass, kept = (scores - largest).exp(), (before - largest).exp()
        total = total * kept + mass.sum(-1, keepdim=True)
        weights = mass * v_scale[..., keys].masked_fill(unseen, 0.0)
        out = out * kept + weights @ v_seen[:, :, keys]
    heads = (out / total).to(q.dtype).unflatten(2, (shared, q.shape[1]))
    return heads.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _attend(
    q: Tensor, k: Tensor, k_scale: Tensor, v: Tensor, v_scale: Tensor, positions: Tensor
) -> Tensor:
    _, num_queries, heads, head_dim = q.shape
    groups = k.shape[1]
    # [B, G, heads of the group x Q, D]: one product per key-value head
    rows = q.unflatten(2, (groups, heads // groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    scores = (align(rows.float(), -1, _QUERY_BITS) @ k.mT).float() * k_scale / math.sqrt(head_dim)
    # A row attends to keys up to its own position.
    hidden = (
        torch.arange(k.shape[2], device=q.device) > positions.repeat(1, heads // groups)[..., None]
    )
    scores.masked_fill_(hidden[:, None], -torch.inf)
    mass = exp_nonpositive(scores - scores.amax(-1, keepdim=True))
    # On the grids, sums are integers of at most 53 bits in float64, so their order does not matter.
    # Keys that no query attends to may be NaN, which would propagate through a weight of zero.
    total = (mass.double() * _MASS_GRID).round_().sum(-1, keepdim=True) / _MASS_GRID
    v_seen = v.masked_fill(~_seen(positions, k.shape[2])[:, None, :, None], 0.0)
    weights = align(mass * v_scale.masked_fill(hidden[:, None], 0.0), -1, _WEIGHT_BITS)
    out = (weights @ v_seen) / total
    return (
        out.float()
        .to(q.dtype)
        .unflatten(2, (heads // groups, num_queries))
        .permute(0, 3, 1, 2, 4)
        .flatten(2, 3)
    )


def _seen(positions: Tensor, length: int) -> Tensor:
    """Return the mask of keys that any query of a batch row attends to, bool [B, L]."""
    return torch.arange(length, device=positions.device) <= positions.amax(1, keepdim=True)


def _attend_fp32(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    visible = torch.arange(k.shape[1], device=q.device) <= positions[..., None]
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), visible[:, None], enable_gqa=True
    )
    return out.transpose(1, 2)


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    kv_format: str,
    scales: ScaleRule = DEFAULT_SCALES,
    row_of: Tensor | None = None,
) -> Tensor:
    """Return causal attention of packed sequences, differentiable, for training.

    Keys and values are quantized to the cache formats.

    Args:
        q: bfloat16 or float32 [T, H, D], rotated, like k [T, G, D]; v is [T, G, D].
        cu_seqlens: int64 [S + 1], first row of each sequence, then the total number of rows.
        kv_format: `PrecisionPlan.kv`.
        row_of: int64, row in q of each row that cu_seqlens counts, if sequences share their first
            rows (`models.packed`); None: the row itself.
    """
    return _PackedAttention.apply(q, k, v, cu_seqlens, kv_format, scales, row_of)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        kv_format: str,
        scales: ScaleRule,
        row_of: Tensor | None,
    ) -> Tensor:
        stored = quantize_keys_and_values(k, v, kv_format, scales)
        (k_codes, k_scales), (v_codes, v_scales) = stored
        ctx.save_for_backward(q, k_codes, k_scales, v_codes, v_scales, cu_seqlens, row_of)
        out = torch.empty_like(q)
        # Each sequence writes the rows that it shares, with the same bits.
        for rows, positions, valid in dense_batches(cu_seqlens):
            tokens = rows if row_of is None else row_of[rows]
            dense = attend_dense(
                q[tokens],
                (k_codes[tokens], None if k_scales is None else k_scales[tokens]),
                (v_codes[tokens], None if v_scales is None else v_scales[tokens]),
                positions,
            )
            out[tokens[valid]] = dense[valid]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k_codes, k_scales, v_codes, v_scales, cu_seqlens, row_of = ctx.saved_tensors
        do = grads[0]
        k, v = stored_values((k_codes, k_scales)), stored_values((v_codes, v_scales))
        # Sum the gradients of shared rows over sequences. Count the gradient of a shared output row
        # only in the first sequence.
        first = None if row_of is None else _first_of_each(row_of)
        totals = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
        for rows, _, valid in dense_batches(cu_seqlens):
            tokens = rows if row_of is None else row_of[rows]
            dense_q, dense_k, dense_v, dense_do = (x[tokens].float() for x in (q, k, v, do))
            counted = valid if first is None else valid & first[rows]
            dense_do = dense_do.masked_fill(~counted[..., None, None], 0.0)
            gradients = _dense_backward(dense_q, dense_k, dense_v, dense_do)
            for total, gradient in zip(totals, gradients, strict=True):
                total.index_add_(0, tokens[valid], gradient[valid])
        dq, dk, dv = (total.to(q.dtype) for total in totals)
        return dq, dk, dv, None, None, None, None


def _first_of_each(row_of: Tensor) -> Tensor:
    """Return the mask of first occurrences in a list of row numbers, bool [T]."""
    places = torch.arange(len(row_of), device=row_of.device)
    first = torch.full_like(places, len(row_of))
    first.scatter_reduce_(0, row_of, places, "amin")
    return first[row_of] == places


def dense_batches(cu_seqlens: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return padded batches of sequences of similar length: rows, positions, valid mask, [B, L]."""
    starts, lengths = cu_seqlens[:-1], cu_seqlens.diff()
    batches = []
    for size in sorted({1 << (n - 1).bit_length() for n in lengths.tolist() if n > 0}):
        chosen = ((lengths <= size) & (lengths > size // 2)).nonzero().flatten()
        longest = int(lengths[chosen].max())
        positions = torch.arange(longest, device=cu_seqlens.device).expand(len(chosen), longest)
        valid = positions < lengths[chosen, None]
        positions = torch.where(valid, positions, 0)
        batches.append((starts[chosen, None] + positions, positions, valid))
    return batches


def _dense_backward(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return dQ, dK and dV, float32, from q and do [B, L, H, D], k and v [B, L, G, D]."""
    heads_per_group = q.shape[2] // k.shape[2]
    scale = 1.0 / math.sqrt(q.shape[-1])
    # [B, G, heads of the group, L, D]
    q, do = (x.unflatten(2, (k.shape[2], heads_per_group)).permute(0, 2, 3, 1, 4) for x in (q, do))
    k, v = (x.transpose(1, 2).unsqueeze(2) for x in (k, v))
    length = q.shape[-2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    # The textbook backward: P, then dV, dP, dS, dQ and dK; dK and dV sum over the heads of a group.
    p = (q @ k.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1)
    dv = (p.mT @ do).sum(2)
    dp = do @ v.mT
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
    dq = (ds @ k).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return dq, (ds.mT @ q).sum(2).transpose(1, 2), dv.transpose(1, 2)
