"""A decoder that gives numbers instead of tokens: a critic, or a reward model.

It shares the flow of the policy: the same decoder, the same precision plan, packed batches. Its
head is one row of FP32, multiplied in FP32. In a Hugging Face directory it is a
...ForSequenceClassification with num_labels = 1, and its head `score.weight`.

Legend: T tokens, S sequences, R rows that are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from jetrl.distributed.world import world
from jetrl.errors import UserError
from jetrl.models import hf
from jetrl.models.adapter import Adapter
from jetrl.models.families import ModelConfig
from jetrl.models.model import Model, check_device
from jetrl.models.nvfp4_files import CodedWeights, check_base, codes_of, left_wide
from jetrl.models.packed import Stems, pack, upload
from jetrl.precision.nvfp4 import NVFP4Tensor
from jetrl.precision.plan import PrecisionPlan


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
        """Return the decoder of a directory with the scalar head there, or a new one of zeros.

        Args:
            adapter: As of `Model`.

        Raises:
            UserError: A file or tensor that is missing, damaged or unsupported, by name.
        """
        config = hf.model_config(path)
        if config.head == "score":
            return cls.from_pretrained(path, plan, device, adapter=adapter)
        check_base(config, plan, path)
        tokenizer = hf.load_tokenizer(path) if hf.has_tokenizer(path) else None
        with hf.open_weights(path, config, device) as weights:
            model = cls.with_new_head(config, weights, plan, device, tokenizer, adapter)
        model.base_path = str(path)
        return model

    @classmethod
    def with_new_head(
        cls,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        plan: PrecisionPlan,
        device: str | torch.device,
        tokenizer: PreTrainedTokenizerBase | None,
        adapter: Adapter | None = None,
    ) -> ScalarModel:
        """Return the decoder of a language model with a new head of zeros.

        The model starts by saying 0 of everything.

        Args:
            tokenizer: The tokenizer, or None.
            adapter: As of `Model`.
        """
        check_device(config, plan, torch.device(device))
        body = _WithNewHead(weights, config.hidden_size, torch.device(device))
        shape = config.with_scalar_head()
        return cls(shape, plan, body, device, tokenizer, adapter=adapter)

    def values(
        self,
        token_ids: Tensor,
        cu_seqlens: Tensor,
        rows: Tensor,
        checkpoint_layers: bool = False,
        stems: Stems | None = None,
    ) -> Tensor:
        """Return the model's numbers after chosen tokens of a packed batch, differentiable.

        The three tensors may be on the CPU, as in `Policy.train_logprobs`.

        Args:
            token_ids: int64 [T], sequences end to end.
            cu_seqlens: int64 [S + 1], where each sequence starts, and T.
            rows: int64 [R], indices into token_ids.
            stems: The rows that are computed, where sequences share their first tokens; None: all.

        Returns:
            float32 [R].
        """
        token_ids, rows = upload(token_ids, self.device), upload(rows, self.device)
        hidden = self.packed_hidden(token_ids, cu_seqlens, rows, checkpoint_layers, stems)
        return self.decoder.scores(hidden)

    @torch.no_grad()
    def scores(self, sequences: Sequence[Sequence[int]], tokens_at_once: int) -> Tensor:
        """Return the number after the last token of each sequence, float32 [S] on the CPU.

        A sequence's score does not depend on the others. The forwards are packed, each of at most
        `tokens_at_once` tokens, or of one longer sequence. Ranks divide the forwards.

        Raises:
            UserError: An empty sequence, one longer than the context, or a token id out of range.
        """
        self.check_sequences(sequences)
        packs, start = [], 0
        while start < len(sequences):
            end, total = start + 1, len(sequences[start])
            while end < len(sequences) and total + len(sequences[end]) <= tokens_at_once:
                total += len(sequences[end])
                end += 1
            packs.append(sequences[start:end])
            start = end
        own = []
        for sequences_at_once in world().share(packs):
            token_ids, cu_seqlens = pack(sequences_at_once, self.device)
            own.append(self.values(token_ids, cu_seqlens, cu_seqlens[1:] - 1).cpu())
        scores = world().gather_in_order("scores of sequences", own)
        return torch.cat(scores) if scores else torch.zeros(0)


class _WithNewHead(CodedWeights):
    """Copies of a language model's weights with a scalar head of zeros, made when they are read."""

    def __init__(self, weights: Mapping[str, Tensor], width: int, device: torch.device) -> None:
        self._weights, self._width, self._device = weights, width, device
        self._names = [name for name in weights if name != "lm_head.weight"]

    def __getitem__(self, name: str) -> Tensor:
        if name == "score.weight":
            return torch.zeros(1, self._width, device=self._device)
        return self._weights[name].detach().to(self._device, torch.float32, copy=True)

    def codes(self, name: str) -> NVFP4Tensor | None:
        """Return the codes of one of the language model's weights, if it has codes."""
        return codes_of(self._weights, name)

    def left_wide(self, name: str) -> bool:
        """Return whether a weight has 16 or 32 bits in a directory with others in NVFP4."""
        return left_wide(self._weights, name)

    def __iter__(self) -> Iterator[str]:
        return iter([*self._names, "score.weight"])

    def __len__(self) -> int:
        return len(self._names) + 1


def check_same_tokenizer(
    policy: PreTrainedTokenizerBase | None, other: PreTrainedTokenizerBase | None, where: str
) -> None:
    """Check that a model that reads the policy's token ids means the same tokens by them.

    Args:
        policy: The policy's tokenizer, or None.
        other: The other model's tokenizer, or None.

    Raises:
        UserError: The vocabularies differ, or one of the two has no tokenizer; says where first.
    """
    if policy is None or other is None:
        lacks = "the policy" if policy is None else where
        raise UserError(
            f"{lacks} has no tokenizer, so it cannot be told whether {where} means the same tokens"
        )
    ours, theirs = policy.get_vocab(), other.get_vocab()
    if ours != theirs:
        different = dict(ours.items() ^ theirs.items())
        odd = min(different, key=lambda token: (ours.get(token, theirs.get(token, 0)), token))
        raise UserError(
            f"{where}: its tokenizer is not the policy's: token {odd!r} is "
            f"{ours.get(odd, 'not there')} in the policy's and {theirs.get(odd, 'not there')} in "
            "this one; it would read other words than were written"
        )
