"""The draft head: a small network that guesses a policy's next tokens from its last hidden state.

The head reads the hidden state that a token was drawn from, and that token, and guesses the
policy's next hidden state; the policy's output head turns it into the next token. Fed with its own
state and token, the head continues for the draft length, without attention, keys or values:

    s = fc [norm(hidden), norm(embedding of the token)]
    s = s + down(silu(gate(norm(s))) * up(norm(s)))
    next hidden = norm(s) * weight
    next token = argmax over some tokens of rows @ next hidden

`rows` are those of the policy's output head, as the sampler reads it, for the tokens that the run
draws most often: a product with the whole vocabulary per drafted token would take a tenth of the
policy's forward.

The head has its own FP32 master weights. Captured CUDA graphs read them rounded to the dtype of the
policy's activations, at fixed addresses. Guesses may change how many tokens a forward yields, never
a token (`kernels.decode`).

Legend: B rows, D hidden size, V tokens of the vocabulary, W tokens that the head knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from jetrl.models.block import DenseShape
from jetrl.models.dense import dense_mlp
from jetrl.models.policy import Policy
from jetrl.precision.quantize import Planes, QTensor, dequantize

KNOWN_TOKENS = 16384  # the maximum W: 128 MiB to read per drafted token at a hidden size of 4,096
_EPS = 1e-6


def draft_head_shapes(size: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the head's weights by name; `size` is the policy's hidden size."""
    mlp = DenseShape.matrices(size, size)
    return {"fc.weight": (size, 2 * size), **mlp, "norm.weight": (size,)}


class DraftHead:
    """A draft head of one policy.

    The optimizer changes `masters`, FP32, by name; `weights` are the same in the dtype of the
    policy's activations, at fixed addresses. The head knows the tokens `known`, int64 [W], with the
    rows `rows` [W, D] of the policy's output head.
    """

    def __init__(self, policy: Policy, tokens: int, seed: int) -> None:
        self.policy, self.tokens, self.trained = policy, tokens, False
        dtype, device = policy.weights.dtype, policy.device
        generator = torch.Generator().manual_seed(seed)
        self.masters: dict[str, nn.Parameter] = {}
        for name, shape in draft_head_shapes(policy.config.hidden_size).items():
            weight = torch.ones(shape)
            if len(shape) > 1:
                weight.normal_(generator=generator).mul_(1 / math.sqrt(shape[1]))
            self.masters[name] = nn.Parameter(weight.to(device))
        with torch.no_grad():
            # The scale that the output head is used to.
            self.masters["norm.weight"].copy_(policy.decoder.norm.rounded)
        self.weights = {n: m.detach().to(dtype, copy=True) for n, m in self.masters.items()}
        self.known = torch.arange(min(KNOWN_TOKENS, policy.config.vocab_size), device=device)
        self.rows = _head_rows(policy, self.known).to(dtype, copy=True)

    def know(self, counts: np.ndarray) -> None:
        """Let the head know the tokens drawn most often, by the draws of each token, int64 [V]."""
        order = np.argsort(-counts, kind="stable")[: len(self.known)]
        self.known.copy_(torch.from_numpy(np.sort(order)))

    @torch.no_grad()
    def round(self) -> None:
        """Round the master weights and copy the policy's current output head, both in place."""
        for name, master in self.masters.items():
            self.weights[name].copy_(master)
        self.rows.copy_(_head_rows(self.policy, self.known))

    def next_hidden(
        self, weights: Mapping[str, Tensor], hidden: Tensor, token_ids: Tensor
    ) -> Tensor:
        """Return the hidden states [B, D] guessed after tokens int64 [B]; all in one dtype."""
        embedding = self.policy.decoder.embedding.operand("train")
        assert isinstance(embedding, Tensor), "an embedding is never FP8"
        size = (hidden.shape[1],)
        embedded = embedding.detach()[token_ids]
        both = torch.cat([rms_norm(hidden, size, eps=_EPS), rms_norm(embedded, size, eps=_EPS)], 1)
        stream = linear(both, weights["fc.weight"])
        stream = stream + dense_mlp(rms_norm(stream, size, eps=_EPS), weights)
        return rms_norm(stream, size, eps=_EPS) * weights["norm.weight"]

    @torch.no_grad()
    def draft(self, hidden: Tensor, token_ids: Tensor, count: int) -> Tensor:
        """Return the guessed next tokens, int32 [B, count], after the last tokens, int64 [B].

        The last tokens were drawn from the policy's hidden states `hidden` [B, D].
        """
        guesses = []
        for _ in range(count):
            hidden = self.next_hidden(self.weights, hidden, token_ids)
            token_ids = self.known[linear(hidden, self.rows).argmax(1)]
            guesses.append(token_ids.int())
        return torch.stack(guesses, dim=1)


def _head_rows(policy: Policy, token_ids: Tensor) -> Tensor:
    """Return the rows of the policy's output head, as the sampler reads it, for some tokens."""
    weight = policy.decoder.lm_head.operand("rollout")
    if isinstance(weight, Planes):
        return dequantize(weight.rows(token_ids))
    if isinstance(weight, QTensor):
        codes = weight.codes.view(torch.uint8)[token_ids].view(weight.codes.dtype)
        rows, columns = weight.block
        scales = weight.scales[token_ids // rows]
        return dequantize(replace(weight, codes=codes, scales=scales, block=(1, columns)))
    assert isinstance(weight, Tensor), "an output head is never NVFP4"
    return weight.detach()[token_ids]
