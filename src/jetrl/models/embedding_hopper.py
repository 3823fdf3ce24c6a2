"""The embedding on a GPU: rows of the master weight, whose gradients are added to the sum in place.

PyTorch's own makes a gradient of the master weight's whole size for each micro-batch and adds it to
the one that is there: with a vocabulary of 152k that is four times the bytes of the model's head,
for some thousand rows that are new.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl.precision.gradients import Gradients


def embed_hopper(token_ids: Tensor, master: Tensor, gradients: Gradients) -> Tensor:
    """Return the embeddings of tokens, bfloat16 [T, D]; gradients have the same bits each time.

    Args:
        token_ids: int64 [T].
        master: The master weight, float32 [V, D].
        gradients: The sink that backward adds the rows' gradients to.
    """
    rows: Tensor = _Embed.apply(token_ids, master, gradients)
    return rows


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token_ids: Tensor, master: Tensor, gradients: Gradients) -> Tensor:
        ctx.save_for_backward(token_ids)
        ctx.master, ctx.gradients = master, gradients
        return torch.nn.functional.embedding(token_ids, master).bfloat16()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, None]:
        (token_ids,) = ctx.saved_tensors
        return None, ctx.gradients.add_rows(ctx.master, token_ids, grads[0]), None
