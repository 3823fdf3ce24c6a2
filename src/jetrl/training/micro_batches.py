"""Micro-batches: the data of one forward and backward pass, their size and their forward.

The token limit is `train.tokens_per_micro_batch` or the limit of the memory plan, and is halved on
OOM. Gradients are accumulated over micro-batches, so the split affects only the summation order
and, in 8-bit training, which tokens share a scale in WGrad. Checkpoints store the limit, since the
bits of a resumed run depend on it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jetrl.distributed.agreement import LARGEST_SIZE, agree
from jetrl.errors import OutOfMemoryStop, UserError
from jetrl.models.packed import ForwardInputs, Stems, upload
from jetrl.models.policy import Policy
from jetrl.precision.plan import Side
from jetrl.settings.sections import RolloutSettings, TrainSettings
from jetrl.training.packing import targets, trained_lengths
from jetrl.types import Batch, Metrics, TokenFilter

logger = logging.getLogger(__name__)

_OF_TOKENS = ("token_ids", "positions", "loss_mask", "rollout_logprobs", "advantages")
_OF_SEQUENCES = ("sample_ids", "stem_ids", "stem_lengths")


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences of one forward and backward, with values for their N trained tokens.

    Values are float32 [N], without gradient, from before the step's first update. `before`, the
    trainer's log-probs, is None in the first minibatch, whose own forward computes them.
    """

    batch: Batch
    before: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None

    def select(self, sequences: range) -> MicroBatch:
        """Return a micro-batch of a range of consecutive sequences."""
        batch = self.batch
        # Fields are per token, per sequence or per trained token; slice each accordingly.
        starts = batch.cu_seqlens[sequences.start : sequences.stop + 1]
        tokens = slice(int(starts[0]), int(starts[-1]))
        ends = np.cumsum([0, *trained_lengths(batch)])
        trained = slice(int(ends[sequences.start]), int(ends[sequences.stop]))
        fields: dict[str, Any] = {name: getattr(batch, name)[tokens] for name in _OF_TOKENS}
        for name in _OF_SEQUENCES:
            values = getattr(batch, name)
            fields[name] = None if values is None else values[sequences.start : sequences.stop]
        spans = (span.within(tokens.start, tokens.stop) for span in batch.images)
        images = tuple(span for span in spans if span is not None)
        part = Batch(cu_seqlens=starts - starts[0], images=images, **fields)
        return MicroBatch(part, **{name: tensor[trained] for name, tensor in self.known().items()})

    def known(self) -> dict[str, Tensor]:
        """Return the values [N] that are set, by name."""
        names = (field.name for field in dataclasses.fields(self) if field.name != "batch")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}


@dataclass(frozen=True)
class MicroBatchLoss:
    """Differentiable loss of one micro-batch, a float32 scalar, with metrics.

    `metrics`, float64 scalars, are this micro-batch's shares of the update's means, to be summed;
    `peaks` are maxima. `outputs` are the model's, without gradient, if the trainer reads them
    later.
    """

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
    peaks: dict[str, Tensor] = field(default_factory=dict)
    outputs: Tensor | None = None


def sizes_of(batch: Batch) -> tuple[int, int]:
    """Return a batch's number of computed tokens and of sequences."""
    return batch.num_computed_tokens, batch.num_sequences


class Minibatch:
    """The samples of one update, split into micro-batches that shrink on OOM."""

    def __init__(self, micro_batches: Sequence[MicroBatch], size: MicroBatchSize) -> None:
        self.micro_batches: Sequence[Any] = micro_batches
        self._size = size
        self.num_tokens = sum(int(micro.batch.loss_mask.sum()) for micro in micro_batches)
        self.num_sequences = sum(micro.batch.num_sequences for micro in micro_batches)

    @staticmethod
    def tokens_of(micro_batch: Any) -> int:
        """Return the number of tokens that a micro-batch's forward computes."""
        return micro_batch.batch.num_computed_tokens

    def shrink(self, problem: str) -> None:
        """Halve the run's token limit and split into micro-batches again."""
        # The smaller limit applies to the rest of the run; only this update is split again.
        self._size.halve([sizes_of(micro.batch) for micro in self.micro_batches], problem)
        self.micro_batches = self._size.split(self.micro_batches)


class MicroBatchSize:
    """Token limit per micro-batch of a run, halved on OOM."""

    def __init__(self, tokens: int) -> None:
        self._setting = tokens
        self.tokens = tokens
        self._retries = 0

    @classmethod
    def of(cls, settings: TrainSettings, planned: int | None = None) -> MicroBatchSize:
        """Return the initial limit: the setting, capped at `planned` tokens."""
        size = cls(settings.tokens_per_micro_batch)
        fitting = size.tokens if planned is None else min(size.tokens, planned)
        size.tokens = agree(LARGEST_SIZE, fitting)
        return size

    def halve(self, sizes: Sequence[tuple[int, int]], problem: str, unit: str = "sequence") -> None:
        """Halve the limit below the size of the micro-batches that did not fit.

        `sizes` are the tokens and units ("sequence" or "pair") per micro-batch. Raises
        OutOfMemoryStop if each has a single unit.
        """
        # A micro-batch with a single unit cannot be split.
        divisible = [tokens for tokens, num_units in sizes if num_units > 1]
        if not divisible:
            longest = max(tokens for tokens, _ in sizes)
            raise OutOfMemoryStop(
                f"out of memory in training ({problem}) with one {unit} in a micro-batch; the "
                f"longest has {longest} tokens. Set train.activation_checkpointing=true if it is "
                "not, train on shorter ones (rollout.max_tokens), or use a GPU with more memory. "
                "No weight of this update was changed and the last checkpoint is good"
            )
        # All ranks use the minimum, since they share micro-batches.
        self.tokens = agree(LARGEST_SIZE, max(1, min(self.tokens, max(divisible)) // 2))
        self._retries += 1
        logger.warning(
            "out of memory in training (%s): from now on at most %d tokens per micro-batch instead "
            "of train.tokens_per_micro_batch = %d; gradients are the same up to the order of sums "
            "(in eight bits also up to how WGrad groups the tokens)",
            *(problem, self.tokens, self._setting),
        )

    def take_metrics(self) -> Metrics:
        """Return how often the limit was halved since the last call; {} if never."""
        retries, self._retries = self._retries, 0
        return {"memory/train_retries": float(retries)} if retries else {}

    def split(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the same sequences, in order, in micro-batches within the limit."""
        parts = []
        for micro in micro_batches:
            lengths, stems = np.diff(micro.batch.cu_seqlens).tolist(), None
            if micro.batch.stem_ids is not None and micro.batch.stem_lengths is not None:
                stems = list(zip(micro.batch.stem_ids, micro.batch.stem_lengths, strict=True))
            parts += [micro.select(sequences) for sequences in self.ranges(lengths, stems)]
        return parts

    def ranges(
        self, lengths: Sequence[int], stems: Sequence[tuple[int, int]] | None = None
    ) -> list[range]:
        """Return ranges of consecutive sequences within the limit (or one longer sequence).

        `stems` holds the (number, length) of each sequence's stem, which counts once per range.
        """
        ranges: list[range] = []
        start = total = 0
        held: set[int] = set()  # stems in the current range
        for i, length in enumerate(lengths):
            # A stem already in the range adds no tokens.
            stem, shared = stems[i] if stems is not None else (i, 0)
            added = length - shared if stem in held else length
            # The range is full: start the next one with this sequence.
            if i > start and total + added > self.tokens:
                ranges.append(range(start, i))
                start, total, added = i, 0, length
                held.clear()
            total += added
            held.add(stem)
        return [*ranges, range(start, len(lengths))]

    def state(self) -> Any:
        return {"tokens": self.tokens, "setting": self._setting}

    def load_state(self, state: Any) -> None:
        """Restore a saved limit, unless the setting has changed."""
        if state["setting"] == self._setting:
            self.tokens = state["tokens"]


def trained_filter(rollout: RolloutSettings) -> TokenFilter:
    """Return the filter of the distribution that a run's log-probs refer to."""
    if not (rollout.truncated_logprobs and rollout.excludes_tokens):
        return TokenFilter()
    return TokenFilter(rollout.top_p, rollout.top_k, rollout.min_p)


def batch_logprobs(
    policy: Policy,
    batch: Batch,
    temperature: float = 1.0,
    activation_checkpointing: bool = False,
    seen: Sequence[Callable[[Tensor], None]] = (),
    token_filter: TokenFilter = TokenFilter(),  # noqa: B008  (frozen)
    differentiable: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return log-probs, float32 [N], and moments, float32 [2, N], of the N trained tokens.

    Each of `seen` is called with the hidden states [N, D] from which the tokens were sampled,
    differentiable; log-probs are if `differentiable`.
    """
    ids, size = batch.token_ids, policy.config.vocab_size
    if not 0 <= ids.min() <= ids.max() < size:  # an out-of-range id would crash a GPU process
        raise UserError(f"token ids are {ids.min()} to {ids.max()}; the model has 0 to {size - 1}")
    return policy.train_logprobs(
        ForwardInputs.of(batch, policy.image_rows(batch.images)),
        torch.from_numpy(batch.cu_seqlens),
        torch.from_numpy(targets(batch)),
        temperature,
        activation_checkpointing=activation_checkpointing,
        stems=Stems.of(batch),
        seen=seen,
        token_filter=token_filter,
        differentiable=differentiable,
    )


@torch.no_grad()
def hidden_states(policy: Policy, batch: Batch, side: Side) -> Tensor:
    """Return a side's hidden states [N, D] before each of a batch's N trained tokens."""
    return policy.packed_hidden(
        ForwardInputs.of(batch, policy.image_rows(batch.images)).to(policy.device),
        torch.from_numpy(batch.cu_seqlens),
        rows=upload(torch.from_numpy(targets(batch)), policy.device) - 1,
        stems=Stems.of(batch),
        side=side,
    )


def at_targets(values: np.ndarray, batch: Batch, device: torch.device | str) -> Tensor:
    """Return a batch's values [T] at its N trained tokens, on the given device."""
    return upload(torch.from_numpy(values[targets(batch)]), torch.device(device))
