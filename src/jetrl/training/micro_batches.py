"""Micro-batches: what a forward and backward is given, and how large it may be.

The size is `train.tokens_per_micro_batch`, or what the memory plan has room for, and halved when
memory runs out. Gradients of the micro-batches of an update are added, so how it is split changes
nothing but the order of sums, and under an FP8 plan which 128 tokens share a scale in WGrad. The
size is kept for the rest of the run, also across a resume: the bits of a resumed run depend on it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from jetrl.errors import OutOfMemoryStop
from jetrl.settings import TrainSettings
from jetrl.training.packing import trained_lengths
from jetrl.types import Batch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MicroBatch:
    """A batch, and what of its N trained tokens was known before the step's first update. before:
    the trainer's log-probs, None in the first minibatch. ref_logprobs: the reference's, None
    without one. values, returns: the critic's, and what it should have said; None without one. All
    float32 [N], without gradient."""

    batch: Batch
    before: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None

    def part(self, sequences: range) -> MicroBatch:
        """Some consecutive sequences of it."""
        batch = self.batch
        starts = batch.cu_seqlens[sequences.start : sequences.stop + 1]
        tokens = slice(int(starts[0]), int(starts[-1]))
        ends = np.cumsum([0, *trained_lengths(batch)])
        trained = slice(int(ends[sequences.start]), int(ends[sequences.stop]))
        return MicroBatch(
            Batch(
                token_ids=batch.token_ids[tokens],
                cu_seqlens=starts - starts[0],
                loss_mask=batch.loss_mask[tokens],
                rollout_logprobs=batch.rollout_logprobs[tokens],
                advantages=batch.advantages[tokens],
                sample_ids=batch.sample_ids[sequences.start : sequences.stop],
            ),
            **{
                name: None if value is None else value[trained]
                for name, value in _known(self).items()
            },
        )

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """Everything in it by name, for a file."""
        arrays = {
            field.name: torch.from_numpy(np.ascontiguousarray(getattr(self.batch, field.name)))
            for field in dataclasses.fields(Batch)
        }
        known = {name: value.cpu() for name, value in _known(self).items() if value is not None}
        return arrays | known

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, torch.Tensor], device: torch.device | str
    ) -> MicroBatch:
        """What `to_tensors` gave."""
        names = [field.name for field in dataclasses.fields(Batch)]
        batch = Batch(**{name: tensors[name].numpy() for name in names})
        return cls(batch, **{n: t.to(device) for n, t in tensors.items() if n not in names})


def sizes_of(batch: Batch) -> tuple[int, int]:
    """Its tokens and sequences."""
    return batch.num_tokens, batch.num_sequences


def _known(micro: MicroBatch) -> dict[str, torch.Tensor | None]:
    """Its tensors [N] by name."""
    return {
        field.name: getattr(micro, field.name)
        for field in dataclasses.fields(MicroBatch)
        if field.name != "batch"
    }


class MicroBatchSize:
    """tokens: what a micro-batch may have now. retries: how often it was halved since the count was
    last taken."""

    def __init__(self, tokens: int) -> None:
        self._setting = tokens
        self.tokens = tokens
        self._retries = 0

    @classmethod
    def of(cls, settings: TrainSettings, planned: int | None = None) -> MicroBatchSize:
        """planned: tokens that the memory plan has room for, where that is less."""
        size = cls(settings.tokens_per_micro_batch)
        if planned is not None:
            size.tokens = min(size.tokens, planned)
        return size

    def halve(self, sizes: Sequence[tuple[int, int]], problem: str, of: str = "sequence") -> None:
        """Makes the next micro-batches smaller than the largest of these, which were too large.

        Args:
            sizes: tokens of each, and how many it has of what cannot be divided. of: what that is.

        Raises:
            OutOfMemoryStop: each of them has one.
        """
        shared = [tokens for tokens, parts in sizes if parts > 1]
        if not shared:
            longest = max(tokens for tokens, _ in sizes)
            raise OutOfMemoryStop(
                f"out of memory in training ({problem}) with one {of} in a micro-batch; the "
                f"longest has {longest} tokens. Set train.activation_checkpointing=true if it is "
                "not, train on shorter ones (rollout.max_tokens), or use a GPU with more memory. "
                "No weight of this update was changed and the last checkpoint is good"
            )
        self.tokens = max(1, min(self.tokens, max(shared)) // 2)
        self._retries += 1
        logger.warning(
            "out of memory in training (%s): from now on at most %d tokens a micro-batch instead "
            "of train.tokens_per_micro_batch = %d; gradients are the same up to the order of sums "
            "(under an FP8 plan also up to how WGrad groups the tokens)",
            *(problem, self.tokens, self._setting),
        )

    def take_retries(self) -> int:
        """How often it was halved since the last call."""
        retries, self._retries = self._retries, 0
        return retries

    def parts(self, batch: Batch) -> list[range]:
        """The sequences of a batch in groups that fit, in order; a longer one is alone."""
        found: list[range] = []
        lengths = [int(n) for n in batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]]
        start = total = 0
        for i, length in enumerate(lengths):
            if i > start and total + length > self.tokens:
                found.append(range(start, i))
                start, total = i, 0
            total += length
        return [*found, range(start, len(lengths))]

    def shrink(self, minibatches: list[list[MicroBatch]], k: int, problem: str) -> None:
        """`halve` for one of a step's minibatches, which is divided accordingly.

        Raises:
            OutOfMemoryStop: each of its micro-batches is one sequence.
        """
        self.halve([sizes_of(micro.batch) for micro in minibatches[k]], problem)
        minibatches[k] = self.split(minibatches[k])

    def split(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The same sequences in micro-batches of the size that holds now."""
        return [m.part(part) for m in micro_batches for part in self.parts(m.batch)]

    def state(self) -> Any:
        return {"tokens": self.tokens, "setting": self._setting}

    def load_state(self, state: Any) -> None:
        """Takes over the size of a run that goes on, unless its setting was changed."""
        if state["setting"] == self._setting:
            self.tokens = state["tokens"]
