"""One buffer for a master's gradient, from its first use in a backward on.

Autograd adds up what the uses of a parameter give before it makes a `.grad` of it. Of a matrix as
large as the vocabulary, which tied embeddings use twice, that is one gradient more than is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gradient_to_add_to(master: Tensor) -> tuple[Tensor, Tensor | None]:
    """(what a backward adds this use's gradient to in place, what it hands to autograd), float32
    like the master: its `.grad`, made of zeros where there is none yet, and nothing; or, where a
    hook wants to see every gradient, zeros of their own twice."""
    if master._backward_hooks:
        gradient = torch.zeros_like(master)
        return gradient, gradient
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    return master.grad, None
