"""The embedding on a GPU: rows of the master in, and their gradients added to the master's.

PyTorch's own makes a gradient of the master's whole size for each micro-batch and adds it to the
one that is there: with a vocabulary of 152k that is four times the bytes of the model's head, for
some thousand rows that are new.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl.kernels.master_gradient import gradient_to_add_to


def embed(token_ids: Tensor, master: Tensor) -> Tensor:
    """bfloat16 [T, D]: rows token_ids int64 [T] of master float32 [V, D]. Backward adds to the
    master's gradient in place (but where a hook wants to see it); equal tokens in order, so that
    the bits are the same each time."""
    rows: Tensor = _Embed.apply(token_ids, master)
    return rows


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token_ids: Tensor, master: Tensor) -> Tensor:
        ctx.save_for_backward(token_ids)
        ctx.master = master
        return torch.nn.functional.embedding(token_ids, master).bfloat16()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None]:
        (token_ids,) = ctx.saved_tensors
        total, returned = gradient_to_add_to(ctx.master)
        total.index_put_((token_ids,), grads[0].float(), accumulate=True)
        return None, returned
