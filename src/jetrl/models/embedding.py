"""The embedding, which reads rows of the rounded weight and adds their gradients in place.

PyTorch's own makes a gradient of the master weight's whole size for each micro-batch and adds it to
the one that is there: with a vocabulary of 152k that is four times the bytes of the model's head,
for some thousand rows that are new.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from jetrl.precision.gradients import Gradients
from jetrl.precision.quantized_weight import QuantizedWeight


def embed(token_ids: Tensor, embedding: QuantizedWeight, gradients: Gradients) -> Tensor:
    """Return the embeddings [T, D] of tokens, in the activations' dtype.

    Args:
        token_ids: int64 [T].
        embedding: The weight [V, D], rounded to the activations' dtype.
        gradients: The sink that backward adds the rows' gradients to.
    """
    rounded = embedding.operand("train")
    assert isinstance(rounded, Tensor), "an embedding is never FP8"
    if rounded.dtype == torch.float32:
        return nn.functional.embedding(token_ids, embedding.master)
    rows: Tensor = _Embed.apply(token_ids, embedding.master, rounded, gradients)
    return rows


class _Embed(torch.autograd.Function):
    """Rows of the rounded weight; the master weight is an input for its gradient alone."""

    @staticmethod
    def forward(
        ctx: Any, token_ids: Tensor, master: Tensor, rounded: Tensor, gradients: Gradients
    ) -> Tensor:
        ctx.save_for_backward(token_ids)
        ctx.master, ctx.gradients = master, gradients
        return nn.functional.embedding(token_ids, rounded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (token_ids,) = ctx.saved_tensors
        return None, ctx.gradients.add_rows(ctx.master, token_ids, grads[0]), None, None
