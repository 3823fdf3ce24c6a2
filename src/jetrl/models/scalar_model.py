"""A decoder that returns numbers instead of tokens: a critic, or a reward model.

It shares the policy's decoder, precision plan and packed batches. Its head is one row of FP32,
multiplied in FP32. In a Hugging Face directory it is a ...ForSequenceClassification with one label,
and its head is `score.weight`.

Legend: T tokens, S sequences, R needed rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from jetrl.distributed.world import world
from jetrl.errors import UserError
from jetrl.models.adapter import Adapter
from jetrl.models.model import Model
from jetrl.models.packed import ForwardInputs, Stems, pack, upload
from jetrl.models.source import ModelSource
from jetrl.precision.plan import PrecisionPlan

SCALAR_HEAD = "score.weight"


class ScalarModel(Model):
    """A decoder with a scalar head, under a precision plan."""

    head = "score"

    @classmethod
    def from_language_model(
        cls,
        path: str | Path,
        plan: PrecisionPlan,
        device: str | torch.device = "cpu",
        adapter: Adapter | None = None,
    ) -> ScalarModel:
        """Return a directory's decoder with the scalar head there, or a new one of zeros."""
        return cls(ModelSource.from_path(path, adapter).with_scalar_head(), plan, device)

    def values(
        self,
        inputs: ForwardInputs,
        cu_seqlens: Tensor,
        rows: Tensor,
        activation_checkpointing: bool = False,
        stems: Stems | None = None,
    ) -> Tensor:
        """Return the model's numbers, float32 [R], at rows of a packed batch, differentiable.

        `cu_seqlens` is int64 [S + 1], `rows` int64 [R]; all may be on the CPU, and the rest is as
        in `Policy.train_logprobs`.
        """
        hidden = self.packed_hidden(
            inputs.to(self.device),
            cu_seqlens,
            rows=upload(rows, self.device),
            activation_checkpointing=activation_checkpointing,
            stems=stems,
        )
        return self.decoder.scores(hidden)

    @torch.no_grad()
    def scores(self, sequences: Sequence[Sequence[int]], tokens_at_once: int) -> Tensor:
        """Return the number after the last token of each sequence, float32 [S] on the CPU.

        A sequence's score does not depend on the others. The forwards are packed, each of at most
        `tokens_at_once` tokens, or of one longer sequence. Ranks divide the forwards.
        """
        self.check_sequences(sequences)
        packs: list[list[Sequence[int]]] = []
        for sequence in sequences:
            if not packs or sum(map(len, [*packs[-1], sequence])) > tokens_at_once:
                packs.append([])
            packs[-1].append(sequence)
        own = []
        for sequences_at_once in world().share(packs):
            inputs, cu_seqlens = pack(sequences_at_once, self.device)
            own.append(self.values(inputs, cu_seqlens, cu_seqlens[1:] - 1).cpu())
        scores = world().gather_in_order("scores of sequences", own)
        return torch.cat(scores) if scores else torch.zeros(0)


def check_same_tokenizer(
    policy: PreTrainedTokenizerBase | None, other: PreTrainedTokenizerBase | None, where: str
) -> None:
    """Raise a UserError unless both models have a tokenizer, with the same vocabulary."""
    if policy is None or other is None:
        lacks = "the policy" if policy is None else where
        raise UserError(f"{lacks} has no tokenizer, so nothing says that {where} reads its tokens")
    ours, theirs = policy.get_vocab(), other.get_vocab()
    if ours != theirs:
        number, token = min((number, token) for token, number in ours.items() ^ theirs.items())
        raise UserError(
            f"{where}: its tokenizer is not the policy's: {token!r} = {number} is a token of only "
            "one of them"
        )
