"""The policy: the only owner of weights. FP32 masters, their working copies, and two forward calls.

`rollout_forward` is what the sampler runs, `train_logprobs` what the trainer runs. Both go through
one decoder and one set of working copies; the optimizer changes masters, and `requantize` makes the
working copies anew, in the one place where a weight is rounded.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from jetrl.kernels.logprob import chosen_logprobs
from jetrl.models.attention import KeyValues, PackedKeyValues
from jetrl.models.model import Model
from jetrl.models.packed import token_positions, upload
from jetrl.precision.hopper import hopper

_LOGITS_AT_ONCE = 2**24  # float32 logits held for one chunk of rows of the training side


class Policy(Model):
    """A language model under a precision plan: what is sampled from, and trained."""

    head = "lm"

    def first_layers(self, count: int) -> Policy:
        """This policy cut to its first `count` layers, on the same masters and working copies: for
        checks of the machine on its own shapes."""
        part = copy.copy(self)
        part.config = dataclasses.replace(self.config, num_layers=count)
        part.decoder = self.decoder.first_layers(count)
        return part

    @torch.no_grad()
    def rollout_forward(self, token_ids: Tensor, positions: Tensor, kv: KeyValues) -> Tensor:
        """The sampler's forward: int64 [T] tokens and positions -> hidden [T, D], or of `kv.rows`.
        Keys and values come from, and go to, `kv`."""
        hidden: Tensor = self.decoder(token_ids, positions, kv, "rollout")
        return hidden

    @torch.no_grad()
    def rollout_logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, D] -> float32 logits [R, V]."""
        return self.decoder.logits(hidden, "rollout")

    def train_logprobs(
        self,
        token_ids: Tensor,
        cu_seqlens: Tensor,
        targets: Tensor,
        temperature: float = 1.0,
        checkpoint_layers: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The trainer's forward: log-probs of chosen tokens of a packed batch.

        token_ids: int64 [T], sequences end to end. cu_seqlens: int64 [S+1]. targets: int64 [R],
        indices into token_ids, never a sequence's first. checkpoint_layers: recompute layers in
        backward. The three may be on the CPU: with cu_seqlens there the host waits for nothing.

        Returns (log-prob of each target given what precedes it, float32 [R], differentiable;
        entropy of that distribution in nats, float32 [R], not differentiable). Full logits are held
        for a chunk of rows at a time only.
        """
        device = self.device
        kv = PackedKeyValues(cu_seqlens, self.plan, device)
        positions = upload(token_positions(cu_seqlens), device)
        token_ids, targets = upload(token_ids, device), upload(targets, device)
        hidden = self.decoder(token_ids, positions, kv, "train", checkpoint_layers)
        head = self.decoder.lm_head
        if hidden.is_cuda and self.plan.lm_head == "bf16" and self.decoder.trace is None:
            fused = hopper("kernels.logprob_hopper").lm_head_logprobs
            on_gpu: tuple[Tensor, Tensor] = fused(
                hidden[targets - 1],
                head.weight,
                head.operand("train"),
                token_ids[targets],
                temperature,
                recompute=checkpoint_layers,
            )
            return on_gpu
        at_once = _LOGITS_AT_ONCE * (8 if token_ids.is_cuda else 1)
        rows = max(1, at_once // self.config.vocab_size)
        parts = [
            checkpoint(
                self._head, hidden[part - 1], token_ids[part], temperature, use_reentrant=False
            )
            for part in targets.split(rows)
        ]
        logprobs, entropy = (torch.cat(list(x)) for x in zip(*parts, strict=True))
        return logprobs, entropy

    def _head(self, hidden: Tensor, chosen: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        return chosen_logprobs(self.decoder.logits(hidden, "train"), chosen, temperature)

    def logprobs(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[Tensor]:
        """Log-probs of each sequence's tokens from the second on: float32 [len - 1] each, from one
        packed forward, differentiable in the masters.

        Raises:
            UserError: an empty sequence, one longer than the context, or a token id out of range.
        """
        self.check_sequences(sequences)
        if not sequences:
            return []
        lengths = torch.tensor([len(s) for s in sequences], device=self.device)
        token_ids = torch.tensor([t for s in sequences for t in s], device=self.device)
        cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        targets = (token_positions(cu_seqlens) > 0).nonzero().flatten()
        logprobs, _ = self.train_logprobs(token_ids, cu_seqlens, targets, temperature)
        return list(logprobs.split((lengths - 1).tolist()))
