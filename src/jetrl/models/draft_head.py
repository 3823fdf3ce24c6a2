"""The draft head: a small network that guesses a policy's next tokens from its last hidden state.

A forward of the policy ends in a hidden state, from which a token is drawn. The head reads that
state and the token, and makes the state that the policy might have behind the token; the policy's
output head says which token that would be. Fed with its own state and its own token it goes on, for
as many tokens as a draft has. No attention, no keys and values:

    s = fc [norm(hidden), norm(embedding of the token)]
    s = s + down(silu(gate(norm(s))) * up(norm(s)))
    next hidden = norm(s) * weight
    next token = argmax over some tokens of rows @ next hidden

`rows` are those of the policy's output head, as the sampler reads it, that belong to the tokens
which the run draws most often: a product with the whole vocabulary for each drafted token would
take as long as a tenth of the policy's forward.

The head has FP32 master weights of its own and a rounding of these, in the dtype of the policy's
activations, which keeps its address: captured CUDA graphs read it. What it guesses may change how
many tokens per forward brings, and never a token (`kernels.decode`).

Legend: B rows, D hidden size, V tokens of the vocabulary, W tokens that the head knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from jetrl.models.block import DenseShape
from jetrl.models.dense import dense_mlp
from jetrl.models.policy import Policy
from jetrl.precision.quantize import QTensor, dequantize
from jetrl.precision.quantized_weight import FP8Weight, WeightOfCodedInputs

KNOWN_TOKENS = 16384  # W at most: at 4,096 hidden sizes 128 MiB to read for each drafted token
_EPS = 1e-6


def draft_head_shapes(hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the head's weights by name."""
    size = hidden_size
    mlp = DenseShape(size).linear_shapes(size)
    return {
        "fc.weight": (size, 2 * size),
        **{f"{name}.weight": shape for name, shape in mlp.items()},
        "norm.weight": (size,),
    }


class DraftHead:
    """A draft head of one policy.

    Attributes:
        masters: The FP32 master weights by name, which the optimizer changes.
        weights: The same in the dtype of the policy's activations, always at the same addresses.
        known: int64 [W], the tokens that the head knows.
        rows: [W, D], the rows of the policy's output head that belong to these.
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
        count = min(KNOWN_TOKENS, policy.config.vocab_size)
        self.known = torch.arange(count, device=device)
        self.rows = _head_rows(policy, self.known).to(dtype, copy=True)

    def know(self, counts: np.ndarray) -> None:
        """Let the head know the tokens that were drawn most often.

        Args:
            counts: int64 [V], how often each token was drawn.
        """
        order = np.argsort(-counts, kind="stable")[: len(self.known)]
        self.known.copy_(torch.from_numpy(np.sort(order)))

    @torch.no_grad()
    def round(self) -> None:
        """Round the master weights and take the policy's present output head, all in place."""
        for name, master in self.masters.items():
            self.weights[name].copy_(master)
        self.rows.copy_(_head_rows(self.policy, self.known))

    def next_hidden(
        self, weights: Mapping[str, Tensor], hidden: Tensor, token_ids: Tensor
    ) -> Tensor:
        """Return the hidden state that the policy might have behind a token, [B, D].

        Args:
            weights: The head's weights by name in the dtype of `hidden`.
            token_ids: int64 [B].
        """
        embedding = self.policy.decoder.embedding.operand("train")
        assert isinstance(embedding, Tensor), "an embedding is never FP8"
        size = (hidden.shape[1],)
        embedded = embedding.detach()[token_ids]
        both = torch.cat([rms_norm(hidden, size, eps=_EPS), rms_norm(embedded, size, eps=_EPS)], 1)
        stream = linear(both, weights["fc.weight"])
        normed = rms_norm(stream, size, eps=_EPS)
        stream = stream + dense_mlp(normed, weights)
        return rms_norm(stream, size, eps=_EPS) * weights["norm.weight"]

    @torch.no_grad()
    def draft(self, hidden: Tensor, token_ids: Tensor, count: int) -> Tensor:
        """Return the next tokens that the head guesses, int32 [B, count].

        Args:
            hidden: The policy's hidden states from which the last tokens were drawn, [B, D].
            token_ids: int64 [B], the last tokens.
            count: The number of tokens, from 1.
        """
        guesses = []
        for _ in range(count):
            hidden = self.next_hidden(self.weights, hidden, token_ids)
            token_ids = self.known[linear(hidden, self.rows).argmax(1)]
            guesses.append(token_ids.int())
        return torch.stack(guesses, dim=1)


def _head_rows(policy: Policy, token_ids: Tensor) -> Tensor:
    """Return the rows of the policy's output head, as the sampler reads it, of some tokens."""
    weight = policy.decoder.lm_head.operand("rollout")
    if isinstance(weight, FP8Weight):
        q = weight.direct
        codes = q.codes.view(torch.uint8)[token_ids].view(q.codes.dtype)
        return dequantize(QTensor(codes, q.scales[token_ids // q.block[0]], (1, q.block[1])))
    values = weight.values if isinstance(weight, WeightOfCodedInputs) else weight
    assert isinstance(values, Tensor), "an output head is never NVFP4"
    return values.detach()[token_ids]
