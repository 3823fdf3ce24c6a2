"""The policy: the language model that is sampled from and trained, with two forward calls.

The sampler runs `rollout_forward`, the trainer `train_logprobs`, both through one decoder and one
set of quantized weights.

Legend: T tokens, S sequences, R needed rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from jetrl.kernels.allowed_tokens import filtered_logits
from jetrl.kernels.backend import kernels_of
from jetrl.kernels.logprob import chosen_logprobs
from jetrl.models.attention import KeyValues
from jetrl.models.decoder import without_adapters
from jetrl.models.model import Model
from jetrl.models.packed import ForwardInputs, Stems, pack, token_positions, upload
from jetrl.models.planes_head import PlanesHead, head_logprobs
from jetrl.precision.backend import backend_of
from jetrl.precision.formats import BF16, number_format
from jetrl.types import ImageSpan, PromptInputs, SamplingParams, TokenFilter


class Policy(Model):
    """A language model under a precision plan, to sample from and to train."""

    head = "lm"

    def first_layers(self, count: int) -> Policy:
        """Return this policy cut to its first layers, sharing all weights, for self-checks."""
        part = copy.copy(self)
        part.config = self.config.first_layers(count)
        part.decoder = self.decoder.first_layers(count)
        return part

    def base(self) -> Policy:
        """Return this policy without its adapter, sharing all weights: the reference of a KL.

        It must not be trained, or the base would change with the policy.
        """
        assert self.lora is not None, "a policy with an adapter has a base"
        part = copy.copy(self)
        part.decoder = without_adapters(self.decoder)
        part.lora = None
        return part

    @torch.no_grad()
    def rollout_forward(self, inputs: ForwardInputs, kv: KeyValues) -> Tensor:
        """Return the rollout side's decoder output, [T, D], or that of `kv.rows`.

        `kv` has earlier keys and values and stores new ones.
        """
        return self.decoder(inputs, kv, "rollout")

    @torch.no_grad()
    def rollout_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, float32 [R, V], of the decoder's output [R, D]."""
        return self.decoder.logits(hidden, "rollout")

    def train_logprobs(
        self,
        inputs: ForwardInputs,
        cu_seqlens: Tensor,
        targets: Tensor,
        temperature: float = 1.0,
        activation_checkpointing: bool = False,
        stems: Stems | None = None,
        seen: Sequence[Callable[[Tensor], None]] = (),
        token_filter: TokenFilter = TokenFilter(),  # noqa: B008  (frozen)
        differentiable: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs of chosen tokens of a packed batch: the trainer's forward.

        All tensors may be on the CPU; there cu_seqlens saves a host sync. Full logits are
        held for only a chunk of rows at a time.

        Args:
            inputs: The T tokens of the sequences, end to end.
            cu_seqlens: int64 [S + 1], the start of each sequence, and T.
            targets: int64 [R], indices of tokens, never a sequence's first.
            activation_checkpointing: Compute layers and logits again in backward.
            stems: The rows to compute if sequences share their first tokens; None: all.
            seen: Called with the hidden states [R, D] that the log-probs are computed from,
                differentiable.
            token_filter: Of the distribution that results refer to, renormalized; a target that it
                excludes is kept.
            differentiable: Whether log-probs are; hidden states are in any case.

        Returns:
            The log-prob of each target given the tokens before it, float32 [R], differentiable, and
            the moments of its distribution, float32 [2, R], not differentiable: the entropy in
            nats, and the variance of a draw's -log p around it.
        """
        inputs, targets = inputs.to(self.device), upload(targets, self.device)
        before = self.packed_hidden(
            inputs,
            cu_seqlens,
            rows=targets - 1,
            activation_checkpointing=activation_checkpointing,
            stems=stems,
        )
        for observe in seen:
            observe(before)
        chosen = inputs.token_ids[targets]
        with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
            return self._head_logprobs(
                before, chosen, temperature, token_filter, activation_checkpointing
            )

    def _head_logprobs(
        self,
        hidden: Tensor,
        chosen: Tensor,
        temperature: float,
        token_filter: TokenFilter,
        activation_checkpointing: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs of chosen tokens int64 [R] and moments, from hidden [R, D]."""

        def kept(logits: Tensor, ids: Tensor) -> Tensor:
            return filtered_logits(logits, ids, temperature, token_filter)

        head = self.decoder.lm_head
        if isinstance(head, PlanesHead):
            return head_logprobs(
                hidden, chosen, temperature, head,
                logits=lambda x: self.decoder.logits(x, "train"), kept=kept,
                recompute=activation_checkpointing,
            )  # fmt: skip
        kernels = kernels_of(hidden) if number_format(self.plan.lm_head) is BF16 else None
        if kernels is not None and self.decoder.trace is None:
            weight = head.operand("train")
            assert isinstance(weight, Tensor), "a BF16 head has a BF16 weight"
            return kernels.lm_head_logprobs(
                hidden, head.weight, weight, chosen, temperature,
                recompute=activation_checkpointing, gradients=head.gradients,
                kept=kept,
            )  # fmt: skip

        def chunk_logprobs(hidden: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.decoder.logits(hidden, "train")
            return chosen_logprobs(kept(logits, chosen), chosen, temperature)

        size = max(1, backend_of(hidden).logits_at_once // self.config.vocab_size)
        chunks = [
            checkpoint(chunk_logprobs, rows, ids, use_reentrant=False)
            for rows, ids in zip(hidden.split(size), chosen.split(size), strict=True)
        ]
        logprobs, moments = (torch.cat(list(x), -1) for x in zip(*chunks, strict=True))
        return logprobs, moments

    def logprobs(
        self,
        sequences: Sequence[Sequence[int]],
        temperature: float = 1.0,
        token_filter: TokenFilter = TokenFilter(),  # noqa: B008  (frozen)
    ) -> list[Tensor]:
        """Return log-probs of each sequence's tokens from the second on, float32 [len - 1] each.

        They come from one packed forward and are differentiable in the master weights. A sequence
        with images is a PromptInputs. The temperature is that of sampling, 0 included, and
        `token_filter` that of its log-probs (`SamplingParams.logprobs_filter`). Raises UserError
        for an empty sequence, one longer than the context, or a token id out of range.
        """
        given = list(sequences)
        sequences = self.check_sequences(given)
        temperature = SamplingParams(temperature=temperature).temperature or 1.0
        if not sequences:
            return []
        inputs, cu_seqlens = pack(sequences, self.device)
        positions: list[int] = []
        spans: list[ImageSpan] = []
        for one, token_ids in zip(given, sequences, strict=True):
            prompt = one if isinstance(one, PromptInputs) else PromptInputs(tuple(token_ids))
            spans += prompt.image_spans(0, len(token_ids), at=len(positions))
            positions += prompt.positions(0, len(token_ids))
        if spans:
            turned = torch.tensor(positions, device=self.device)
            inputs = replace(inputs, positions=turned, images=self.image_rows(spans))
        targets = (token_positions(cu_seqlens) > 0).nonzero().flatten()
        logprobs, _ = self.train_logprobs(
            inputs, cu_seqlens, targets, temperature, token_filter=token_filter
        )
        return list(logprobs.split([len(sequence) - 1 for sequence in sequences]))
