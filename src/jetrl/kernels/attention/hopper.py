"""Attention on Hopper: one schedule of keys for decode, prefill and training, to the bit.

For any token, these give the same output bits, whatever else is in the batch:

    attend_decode(q_BHD, pages, block_tables, lengths, max_length)      one new token a sequence
    attend_decode_quantized(...)                                        the same, as FP8 rows
    attend_prefill(q_THD, pages, tiles)                                 chunks, shared prefixes
    attend_prefill_quantized(...)                                       the same, as FP8 rows
    attend_tiles(q_THD, stage_keys(codes, tiles), tiles)                training

`attention.core` says why, and pins what it takes: blocks of 64 keys from the sequence's first
token, splits every 1024 keys folded in order, tensor cores that add 16 products at a time with FP16
operands (BF16 without scales), and one order of head_dim. The backward (`attention.backward`) needs
no agreement of bits with anything; it is deterministic. `models.layer_hopper` joins the two for
training.

Shapes: T tokens, B sequences, H query heads, G key-value heads, D head_dim (64 or 128), H / G at
most 16, pages of 64 tokens. The CPU reference in `attention` has other bits: its sums are exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.kernels.attention.core import SPLIT_KEYS
from jetrl.kernels.attention.decode import attend_decode, attend_decode_quantized
from jetrl.kernels.attention.forward import attend_tiles, attend_tiles_quantized
from jetrl.kernels.attention.layout import KeyValueCodes, QueryTiles
from jetrl.kernels.attention.stage import StagedKeys, stage_keys
from jetrl.precision.quantize import QTensor

__all__ = [
    "SPLIT_KEYS",
    "KeyValueCodes",
    "QueryTiles",
    "StagedKeys",
    "attend_decode",
    "attend_decode_quantized",
    "attend_prefill",
    "attend_prefill_quantized",
    "attend_tiles",
    "stage_keys",
    "stored_values",
]


def attend_prefill(
    q: Tensor, pages: KeyValueCodes, tiles: QueryTiles, split_keys: int = SPLIT_KEYS
) -> Tensor:
    """Return the attention of prefill chunks over pages that hold their own keys and values, too.

    Costs one pass over the contexts' keys and values besides the attention itself, so it is meant
    for chunks of a few hundred tokens or more.

    Args:
        q: bfloat16 [T, H, D], rotated.
        pages: keys and values [P, 64, G, D].
        tiles: the work, of `QueryTiles.paged`.
        split_keys: keys of a split, a multiple of 64. Others than the default give other bits.
    """
    return attend_tiles(q, stage_keys(pages, tiles), tiles, split_keys)[0]


def attend_prefill_quantized(
    q: Tensor,
    pages: KeyValueCodes,
    tiles: QueryTiles,
    scales: str = "fp32",
    split_keys: int = SPLIT_KEYS,
) -> QTensor:
    """Return `quantize_rows(attend_prefill(...).flatten(1))`, with the same bits.

    Args:
        q: bfloat16 [T, H, D], rotated.
        pages: keys and values [P, 64, G, D].
        tiles: the work, of `QueryTiles.paged`.
        scales: "fp32", or "pow2" for scales that are powers of two.
        split_keys: keys of a split, a multiple of 64. Others than the default give other bits.

    Returns:
        Rows of 1 x 128 groups [T, H * D].
    """
    return attend_tiles_quantized(q, stage_keys(pages, tiles), tiles, scales, split_keys)


def stored_values(codes: KeyValueCodes, slots: Tensor | None = None) -> Tensor:
    """Return the numbers that stored keys and values stand for, for inspection.

    Args:
        codes: a packed batch [T, G, D], or pages [P, 64, G, D].
        slots: int64 [T], the tokens' slots in the pages; None for a packed batch.

    Returns:
        float32 [T, 2 * G * D], keys before values.
    """

    def wide(x: Tensor, scales: Tensor | None) -> Tensor:
        values = x.float() if scales is None else x.float() * scales[..., None]
        values = values if slots is None else values.flatten(0, 1)[slots]
        return values.flatten(1)

    return torch.cat([wide(codes.k, codes.k_scales), wide(codes.v, codes.v_scales)], dim=1)
