"""BF16 attention by cuDNN, for plans that promise no bits: the fastest on Hopper today.

It takes dense batches: sequences of one length. (Its form for packed sequences builds its plan
again at every call, 50 milliseconds of the host each time in torch 2.11.) The gradient of the
queries is summed by atomic additions, also where torch is asked to be deterministic: two runs
differ in its last bits, which is why no exact plan uses it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def attend_equal_lengths(
    q: Tensor, k: Tensor, v: Tensor, length: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the causal attention of sequences of one length, and what its backward needs.

    Args:
        q: bfloat16 [T, H, D], sequences packed end to end.
        k: bfloat16 [T, G, D].
        v: bfloat16 [T, G, D].

    Returns:
        The output, like q; then the log-sum-exp and the seed and offset of cuDNN's dropout (none is
        applied), which `attend_equal_lengths_backward` takes.
    """
    dense = (_dense(x, length) for x in (q, k, v))
    o, lse, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
        *dense, None, True, 0.0, True, False
    )
    return _packed(o), lse, seed, offset


def attend_equal_lengths_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, rest: tuple[Any, ...], length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, each like its tensor.

    Args:
        do: bfloat16 [T, H, D], the gradient of the output.
        q: bfloat16 [T, H, D].
        k: bfloat16 [T, G, D].
        v: bfloat16 [T, G, D].
        o: bfloat16 [T, H, D], the output of the forward.
    """
    lse, seed, offset = rest
    do, q, k, v, o = (_dense(x, length) for x in (do, q, k, v, o))
    grads = _aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, lse, seed, offset, None, None, None, length, length, 0.0, True
    )
    dq, dk, dv = (_packed(x) for x in grads)
    return dq, dk, dv


def _dense(x: Tensor, length: int) -> Tensor:
    """Return packed rows [T, H, D] as sequences [B, H, S, D], in the same memory."""
    return x.view(-1, length, *x.shape[1:]).transpose(1, 2)


def _packed(x: Tensor) -> Tensor:
    """Return sequences [B, H, S, D] as contiguous packed rows [T, H, D]."""
    return x.transpose(1, 2).flatten(0, 1).contiguous()
