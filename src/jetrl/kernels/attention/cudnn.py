"""BF16 attention by cuDNN, for plans that promise no bits: the fastest on Hopper today.

It takes dense batches: sequences of one length. (Its form for packed sequences builds its plan anew
at every call, 50 milliseconds of the host each time in torch 2.11.) The gradient of the queries is
summed by atomic additions, also where torch is asked to be deterministic: two runs differ in its
last bits, which is why no exact plan uses it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def attend_equal_lengths(
    q: Tensor, k: Tensor, v: Tensor, length: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Causal attention of sequences of `length` tokens, packed end to end.

    q: bfloat16 [T, H, D]; k, v: [T, G, D]. Returns (o like q, then what the backward takes)."""
    dense = (_dense(x, length) for x in (q, k, v))
    o, lse, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
        *dense, None, True, 0.0, True, False
    )
    return _packed(o), lse, seed, offset


def attend_equal_lengths_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, rest: tuple[Any, ...], length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) like q, k and v; rest: what the forward returned after o."""
    lse, seed, offset = rest
    do, q, k, v, o = (_dense(x, length) for x in (do, q, k, v, o))
    grads = _aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, lse, seed, offset, None, None, None, length, length, 0.0, True
    )
    dq, dk, dv = (_packed(x) for x in grads)
    return dq, dk, dv


def _dense(x: Tensor, length: int) -> Tensor:
    """[T, H, D] as [B, H, S, D], the same memory."""
    return x.view(-1, length, *x.shape[1:]).transpose(1, 2)


def _packed(x: Tensor) -> Tensor:
    """[B, H, S, D] as contiguous [T, H, D]."""
    return x.transpose(1, 2).flatten(0, 1).contiguous()
