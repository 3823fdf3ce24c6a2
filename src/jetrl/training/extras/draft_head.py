"""Training of the draft head (`models.draft_head`) on sampled tokens.

For a seeded random fraction of the sampled tokens, the trainer's forward saves the hidden state
that the token was sampled from. From this state and the token, the head predicts the next tokens
with teacher forcing, and is trained with cross entropy over its reduced vocabulary. It has its own
optimizer; no gradient reaches the policy.

    begin           choose the training tokens among those of the step's first update
    observer        copy hidden states from a micro-batch's forward
    after_forward   gather copies from all ranks and run the updates, identical on every rank
    after_updates   pass the new weights to the sampler

Legend: P training tokens, D hidden size, K draft length, R trained tokens of a micro-batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from jetrl.distributed.world import world
from jetrl.errors import UserError
from jetrl.memory.out_of_memory import explained
from jetrl.models.draft_head import DraftHead
from jetrl.models.packed import upload
from jetrl.randomness import derive_seed
from jetrl.settings.loading import Settings
from jetrl.training.extras import Learner
from jetrl.training.micro_batches import MicroBatch, Minibatch
from jetrl.training.optimizer import Optimizer
from jetrl.training.packing import targets, trained_lengths
from jetrl.types import Batch, Metrics

_WARMUP_UPDATES = 20
_ADVICE = (
    "lower draft_head.tokens_per_update or draft_head.most_tokens, set "
    "train.optimizer_states=compact, or do without the head (rollout.speculation=text). The last "
    "checkpoint is good"
)
_NOT_KNOWN = -100  # target ignored by cross entropy


@dataclass
class _Lessons:
    """The P training tokens of a step, and the K tokens after each.

    places: per sample, indices among its trained tokens and among the P. tokens: int64 [P, 1 + K].
    follows, bool [P, K]: the token exists and was sampled. hidden [P, D]. copied, bool [P]: set by
    this rank.
    """

    places: dict[int, tuple[np.ndarray, np.ndarray]]
    tokens: np.ndarray
    follows: np.ndarray
    hidden: Tensor
    copied: np.ndarray
    seed: int


class DraftHeadTraining(Learner):
    """A draft head and its optimizer, configured by `draft_head`, `train` and run.seed."""

    name = "draft_head"

    def __init__(self, head: DraftHead, settings: Settings) -> None:
        self.head, self.masters, self._settings = head, head.masters, settings.draft_head
        self._seed = settings.run.seed
        own = {"lr": self._settings.lr, "warmup_steps": _WARMUP_UPDATES, "schedule": "constant"}
        own |= {"weight_decay": 0.0, "betas": (0.9, 0.95)}
        self.optimizer = Optimizer(head.masters, settings.train.model_copy(update=own), 1)
        # Sample counts per vocabulary token: the head's vocabulary is the most frequent tokens.
        self._counts = np.zeros(head.policy.config.vocab_size, dtype=np.int64)
        self._lessons: _Lessons | None = None
        head.round()

    def begin(self, version: int, minibatches: Sequence[Minibatch]) -> None:
        self.choose(version, minibatches[0].micro_batches)

    def choose(self, step: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Choose the training tokens of a step."""
        # Per sample: its batch, the positions of its trained tokens, and its end.
        where: dict[int, tuple[Batch, np.ndarray, int]] = {}
        for batch in (micro.batch for micro in micro_batches):
            drawn = batch.token_ids[targets(batch)]
            self._counts += np.bincount(drawn, minlength=len(self._counts))
            for i, start, end in zip(
                batch.sample_ids, batch.cu_seqlens, batch.cu_seqlens[1:], strict=False
            ):
                where[int(i)] = (batch, start + np.flatnonzero(batch.loss_mask[start:end]), end)
        samples = sorted(where)
        # The last token of a sample has no next token.
        ends = np.cumsum([len(where[i][1]) - 1 for i in samples])
        total = int(ends[-1]) if samples else 0
        # Choose P tokens that have a successor, in an order that is equal on every rank.
        count = min(math.ceil(total * self._settings.share), self._settings.most_tokens)
        seed = derive_seed(self._seed, "draft head", step)
        chance = np.random.Generator(np.random.Philox(key=seed))
        chosen = np.sort(chance.choice(total, count, replace=False)) if total else np.zeros(0, int)
        policy = self.head.policy
        sizes = (count, policy.config.hidden_size)
        lessons = _Lessons(
            places={},
            tokens=np.zeros((count, 1 + self.head.tokens), dtype=np.int64),
            follows=np.zeros((count, self.head.tokens), dtype=bool),
            hidden=torch.zeros(sizes, dtype=policy.weights.dtype, device=policy.device),
            copied=np.zeros(count, dtype=bool),
            seed=seed,
        )
        bounds = np.searchsorted(chosen, [0, *ends])
        for number, sample in enumerate(samples):
            slots = np.arange(bounds[number], bounds[number + 1])
            if len(slots):
                batch, trained, end = where[sample]
                ordinals = chosen[slots] - (ends[number] - len(trained) + 1)
                lessons.places[sample] = (ordinals, slots)
                # The token and its successors, as far as they were sampled.
                at = trained[ordinals][:, None] + np.arange(1 + self.head.tokens)
                inside = np.minimum(at, end - 1)
                lessons.tokens[slots] = batch.token_ids[inside]
                sampled = (at < end) & batch.loss_mask[inside]
                lessons.follows[slots] = sampled[:, 1:].cumprod(1).astype(bool)
        self._lessons = lessons

    def observer(self, batch: Batch) -> Callable[[Tensor], None] | None:
        """Return a callback that copies the chosen rows of hidden states [R, D], or None."""
        lessons = self._lessons
        if lessons is None:
            return None
        firsts = np.cumsum([0, *trained_lengths(batch)])
        rows, slots = [], []
        for first, sample in zip(firsts, batch.sample_ids.tolist(), strict=False):
            if sample in lessons.places:
                ordinals, own = lessons.places[sample]
                rows.append(first + ordinals)
                slots.append(own)
        if not rows:
            return None
        row_N, slot_N = np.concatenate(rows), np.concatenate(slots)

        def copy(hidden: Tensor) -> None:
            into, out_of = (upload(torch.from_numpy(x), hidden.device) for x in (slot_N, row_N))
            lessons.hidden[into] = hidden.detach()[out_of]
            lessons.copied[slot_N] = True

        return copy

    def after_forward(self) -> Metrics:
        """Run the draft-head updates of a step, each on part of the chosen tokens.

        Returns draft_head/loss and draft_head/accuracy before each update, means over tokens;
        timing/draft_head_s; if any, draft_head/skipped_updates. Returns {} if no token was chosen.
        """
        lessons, self._lessons = self._lessons, None
        assert lessons is not None, "choose comes first"
        with explained("the training of the draft head", _ADVICE):
            return self._learn(lessons)

    def _learn(self, lessons: _Lessons) -> Metrics:
        began = self._now()
        # Gather hidden states from all ranks; the head's vocabulary is the most frequent tokens.
        self._gather(lessons)
        self.head.know(self._counts)
        self.head.round()  # the output head used in the forward that produced the states
        places = torch.full((len(self._counts),), _NOT_KNOWN, device=self.head.known.device)
        places[self.head.known] = torch.arange(len(self.head.known), device=places.device)
        finite = torch.isfinite(lessons.hidden).all(1).cpu().numpy()
        # Drop states that were not copied or not finite, and tokens without a successor.
        usable = np.flatnonzero(lessons.copied & finite & lessons.follows[:, 0])
        order = np.random.Generator(np.random.Philox(key=lessons.seed + 1)).permutation(usable)
        numbers: list[Tensor] = []
        skipped = 0
        for first in range(0, len(order), self._settings.tokens_per_update):
            which = order[first : first + self._settings.tokens_per_update]
            sums = self._forward_backward(lessons, which, places)
            # A non-finite loss skips only this update: the head does not affect the policy.
            norm = self.optimizer.gradient_norm()
            if bool(torch.isfinite(norm)):
                self.optimizer.apply(norm)
                numbers.append(sums)
            else:
                self.optimizer.zero_grad()
                skipped += 1
        self.head.trained = self.optimizer.num_updates > 0
        if not numbers:
            return {}
        loss, tokens, right, firsts = torch.stack(numbers).double().sum(0).tolist()
        metrics = {
            "draft_head/loss": loss / tokens if tokens else 0.0,
            "draft_head/accuracy": right / firsts,
            "timing/draft_head_s": self._now() - began,
        }
        return metrics | ({"draft_head/skipped_updates": float(skipped)} if skipped else {})

    def _forward_backward(self, lessons: _Lessons, which: np.ndarray, places: Tensor) -> Tensor:
        head, device = self.head, places.device
        weights = {n: m.to(head.weights[n].dtype) for n, m in head.masters.items()}
        tokens = upload(torch.from_numpy(lessons.tokens[which]), device)
        follows = upload(torch.from_numpy(lessons.follows[which]), device)
        hidden = lessons.hidden[upload(torch.from_numpy(which), device)]
        wanted = torch.where(follows, places[tokens[:, 1:]], _NOT_KNOWN)
        losses = []
        right = torch.zeros((), device=device)
        # Teacher forcing: each prediction uses the head's own state and the true previous token.
        for i in range(head.tokens):
            hidden = head.next_hidden(weights, hidden, tokens[:, i])
            logits = linear(hidden, head.rows).float()
            loss = cross_entropy(logits, wanted[:, i], ignore_index=_NOT_KNOWN, reduction="sum")
            losses.append(loss)
            if i == 0:
                right = (logits.argmax(1) == wanted[:, 0]).sum()
        count = (wanted != _NOT_KNOWN).sum()
        total = torch.stack(losses).sum()
        (total / count.clamp(min=1)).backward()
        sums = total.detach(), count.float(), right.float(), follows[:, 0].sum().float()
        return torch.stack(sums)

    def _gather(self, lessons: _Lessons) -> None:
        """Add the hidden states copied on other ranks."""
        if world().size == 1:
            return
        own, device = np.flatnonzero(lessons.copied), lessons.hidden.device
        share = (own, lessons.hidden[torch.from_numpy(own).to(device)].cpu())
        for slots, hidden in world().gather("hidden states for the draft head", share):
            lessons.hidden[torch.from_numpy(slots).to(device)] = hidden.to(device)
            lessons.copied[slots] = True

    def after_updates(self) -> Metrics:
        """Pass the new weights and the policy's new output head to the sampler."""
        self.head.round()
        return {}

    def equal_tensors(self) -> dict[str, Tensor]:
        return self.state_tensors()

    def _now(self) -> float:
        """Return the time once the device is idle."""
        if self.head.policy.device.type == "cuda":
            torch.cuda.synchronize(self.head.policy.device)
        return time.perf_counter()

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the learner's tensors and the token counts."""
        return super().state_tensors() | {"counts": torch.from_numpy(self._counts)}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        counts = tensors.get("counts")
        if counts is None or counts.shape != self._counts.shape or counts.is_floating_point():
            raise UserError(
                "the checkpoint's draft head is of another model, first in counts: resume with the "
                "settings it was made with, or without it (rollout.speculation=text)"
            )
        super().load_tensors(tensors)
        self._counts = counts.cpu().numpy().astype(np.int64)
        self.head.trained = self.optimizer.num_updates > 0
        self.head.know(self._counts)
        self.head.round()
