"""Attention on Hopper, bitwise consistent across decode, prefill and training.

A token gets the same output bits from each of these, whatever else is in the batch:

    attend_decode(q_BHD, pages, block_tables, lengths, max_length)      one new token per sequence
    attend_prefill(q_THD, pages, tiles)                                 chunks, shared prefixes
    attend_tiles(q_THD, stage_keys(codes, tiles), tiles)                training

`attend_decode_quantized` and `attend_prefill_quantized` return FP8 rows. The CPU reference has
different bits: its sums are exact. `attend_equal_lengths` is BF16 attention by cuDNN, for plans
that are not bitwise consistent: its backward sums dQ with atomics, even in deterministic mode.
cuDNN's packed (variable-length) form takes much CPU time per call in torch 2.11.

Shapes: T tokens, B sequences, H query heads, G key-value heads, D head_dim (64 or 128), H / G at
most 16, pages of 64 tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl.kernels.attention.core import SPLIT_KEYS as SPLIT_KEYS
from jetrl.kernels.attention.decode import attend_decode as attend_decode
from jetrl.kernels.attention.decode import attend_decode_quantized as attend_decode_quantized
from jetrl.kernels.attention.forward import attend_prefill as attend_prefill
from jetrl.kernels.attention.forward import attend_prefill_quantized as attend_prefill_quantized
from jetrl.kernels.attention.forward import attend_tiles as attend_tiles
from jetrl.kernels.attention.layout import KeyValueCodes as KeyValueCodes
from jetrl.kernels.attention.layout import QueryTiles as QueryTiles
from jetrl.kernels.attention.staging import stage_keys as stage_keys


def attend_batch(q: Tensor, codes: KeyValueCodes, tiles: QueryTiles) -> tuple[Tensor, Tensor]:
    """Return attention of q over the codes of a packed batch, and the log-sum-exp, for training."""
    # By names of this module, which `jetrl bench layer` times.
    return attend_tiles(q, stage_keys(codes, tiles), tiles)


_aten = torch.ops.aten


def attend_equal_lengths(
    q: Tensor, k: Tensor, v: Tensor, length: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return causal attention of packed sequences of equal length, log-sum-exp, seed and offset.

    Takes q, bfloat16 [T, H, D], and k and v [T, G, D]. Seed and offset belong to cuDNN's dropout,
    which is off; backward requires them.
    """
    q, k, v = (_dense(x, length) for x in (q, k, v))
    o, lse, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False
    )
    return _packed(o), lse, seed, offset


def attend_equal_lengths_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, rest: tuple[Any, ...], length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v for the output gradient do [T, H, D]."""
    lse, seed, offset = rest
    do, q, k, v, o = (_dense(x, length) for x in (do, q, k, v, o))
    grads = _aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, lse, seed, offset, None, None, None, length, length, 0.0, True
    )
    dq, dk, dv = (_packed(x) for x in grads)
    return dq, dk, dv


def _dense(x: Tensor, length: int) -> Tensor:
    """Return packed rows [T, H, D] as a view [B, H, S, D]."""
    return x.view(-1, length, *x.shape[1:]).transpose(1, 2)


def _packed(x: Tensor) -> Tensor:
    """Return sequences [B, H, S, D] as contiguous packed rows [T, H, D]."""
    return x.transpose(1, 2).flatten(0, 1).contiguous()
