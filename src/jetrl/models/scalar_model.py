"""A decoder that gives numbers instead of tokens: a critic, or a reward model.

It shares the flow of the policy: the same decoder, the same precision plan, packed batches. Its
head is one row of FP32, multiplied in FP32. In a Hugging Face directory it is a
...ForSequenceClassification with num_labels = 1, and its head `score.weight`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from jetrl.errors import UserError
from jetrl.models import hf
from jetrl.models.attention import PackedKeyValues
from jetrl.models.families import ModelConfig
from jetrl.models.model import Model, check_device
from jetrl.models.packed import token_positions, upload
from jetrl.precision.plan import PrecisionPlan


class ScalarModel(Model):
    """A decoder with a scalar head."""

    head = "score"

    @classmethod
    def from_language_model(
        cls, path: str | Path, plan: PrecisionPlan, device: str | torch.device = "cpu"
    ) -> ScalarModel:
        """The decoder of a directory with a new head of zeros, or the directory's own head where it
        has one.

        Raises:
            UserError: what is missing, damaged or unsupported, by file and tensor name.
        """
        config = ModelConfig.from_hf(hf.read_config(path))
        if config.head == "score":
            return cls.from_pretrained(path, plan, device)
        tokenizer = hf.load_tokenizer(path) if hf.has_tokenizer(path) else None
        with hf.open_weights(path, config, device) as weights:
            return cls.with_new_head(config, weights, plan, device, tokenizer)

    @classmethod
    def with_new_head(
        cls,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        plan: PrecisionPlan,
        device: str | torch.device,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> ScalarModel:
        """The decoder of a language model (its weights by our names, which are copied) with a new
        head of zeros: it starts by saying 0 of everything."""
        check_device(config, plan, torch.device(device))
        body = {
            name: weights[name].detach().to(device, torch.float32, copy=True)
            for name in weights
            if name != "lm_head.weight"
        }
        body["score.weight"] = torch.zeros(1, config.hidden_size, device=device)
        return cls(config.with_scalar_head(), plan, body, device, tokenizer)

    def values(
        self,
        token_ids: Tensor,
        cu_seqlens: Tensor,
        rows: Tensor,
        checkpoint_layers: bool = False,
    ) -> Tensor:
        """The numbers that the model gives after chosen tokens of a packed batch.

        token_ids: int64 [T], sequences end to end. cu_seqlens: int64 [S+1]. rows: int64 [R],
        indices into token_ids. The three may be on the CPU, as in `Policy.train_logprobs`. Returns
        float32 [R], differentiable in the masters.
        """
        device = self.device
        kv = PackedKeyValues(cu_seqlens, self.plan, device)
        positions = upload(token_positions(cu_seqlens), device)
        token_ids = upload(token_ids, device)
        hidden = self.decoder(token_ids, positions, kv, "train", checkpoint_layers)
        return self.decoder.scores(hidden[upload(rows, device)])

    @torch.no_grad()
    def scores(self, sequences: Sequence[Sequence[int]], tokens_at_once: int) -> Tensor:
        """The number after the last token of each sequence: float32 [S] on the CPU, from packed
        forwards of at most `tokens_at_once` tokens (or one longer sequence). A sequence's score
        does not depend on the others.

        Raises:
            UserError: an empty sequence, one longer than the context, or a token id out of range.
        """
        self.check_sequences(sequences)
        found, start = [], 0
        while start < len(sequences):
            end, total = start + 1, len(sequences[start])
            while end < len(sequences) and total + len(sequences[end]) <= tokens_at_once:
                total += len(sequences[end])
                end += 1
            part = sequences[start:end]
            lengths = torch.tensor([len(s) for s in part], device=self.device)
            token_ids = torch.tensor([t for s in part for t in s], device=self.device)
            cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            found.append(self.values(token_ids, cu_seqlens, cu_seqlens[1:] - 1).cpu())
            start = end
        return torch.cat(found) if found else torch.zeros(0)


def check_same_tokenizer(
    policy: PreTrainedTokenizerBase | None, other: PreTrainedTokenizerBase | None, where: str
) -> None:
    """A model that reads the policy's token ids must mean the same tokens by them.

    Raises:
        UserError: the vocabularies differ, or one of the two has no tokenizer; says where first.
    """
    if policy is None or other is None:
        lacks = "the policy" if policy is None else where
        raise UserError(
            f"{lacks} has no tokenizer, so it cannot be told whether {where} means the same tokens"
        )
    ours, theirs = policy.get_vocab(), other.get_vocab()
    if ours != theirs:
        odd = min(
            (
                token
                for token in ours.keys() | theirs.keys()
                if ours.get(token) != theirs.get(token)
            ),
            key=lambda token: (ours.get(token, theirs.get(token, 0)), token),
        )
        raise UserError(
            f"{where}: its tokenizer is not the policy's: token {odd!r} is "
            f"{ours.get(odd, 'not there')} in the policy's and {theirs.get(odd, 'not there')} in "
            "this one; it would read other words than were written"
        )
