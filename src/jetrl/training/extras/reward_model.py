"""Training a reward model on pairs of completions, the better one first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from jetrl.errors import UserError
from jetrl.memory.out_of_memory import explained, within_memory
from jetrl.models.scalar_model import ScalarModel
from jetrl.settings.loading import Settings
from jetrl.training.guard import Guard, NonFiniteUpdate
from jetrl.training.losses import preference_loss
from jetrl.training.micro_batches import MicroBatchSize
from jetrl.training.optimizer import ADVICE, supervised_optimizer

Pair = tuple[Sequence[int], Sequence[int]]
"""Token ids of the better and of the worse sequence, prompts included."""

_WATCHED = ("sft/loss", "sft/grad_norm")


class RewardTrainer:
    """Updates a scalar model on pairs. Its optimizer has lr, warm-up and schedule from
    `settings.sft`, the rest from `settings.train`.

    Attributes:
        micro_batch_size: what a micro-batch may have now.
        guard: refuses updates that are not finite. optimizer: its state goes into checkpoints.
    """

    def __init__(
        self, model: ScalarModel, settings: Settings, size: MicroBatchSize | None = None
    ) -> None:
        self.model = model
        self.micro_batch_size = size or MicroBatchSize.of(settings.train)
        self.guard = Guard(settings.train.on_nonfinite, "sft.lr")
        self._checkpoint_layers = settings.train.activation_checkpointing
        self.optimizer = supervised_optimizer(model.named_masters(), settings)

    def step(self, pairs: Sequence[Pair]) -> dict[str, float]:
        """One optimizer update on all of the pairs.

        Returns:
            sft/loss (Bradley-Terry, nats a pair), sft/grad_norm, sft/lr, sft/tokens;
            reward_model/accuracy (pairs in which the better one scores higher) and
            reward_model/margin (mean difference), all before the update. Of a skipped update
            sft/lr, sft/tokens and reward_model/skipped_updates alone. Where it happened,
            memory/train_retries.

        Raises:
            UserError: no pairs, or a sequence that the model cannot take.
            NonFiniteError: the loss or gradient is not finite, and train.on_nonfinite is "stop" or
                too many were in a row; the model was not changed.
            OutOfMemoryStop: memory ran out with one pair in a micro-batch.
        """
        if not pairs:
            raise UserError("a reward model cannot be trained on no pairs")
        self.model.check_sequences([sequence for pair in pairs for sequence in pair])
        found, total_norm = within_memory(
            lambda: self._accumulate(pairs), lambda problem: self._shrink(pairs, problem)
        )
        metrics = {
            "sft/lr": self.optimizer.lr,
            "sft/tokens": float(sum(_num_tokens(pair) for pair in pairs)),
        }
        retries = self.micro_batch_size.take_retries()
        if retries:
            metrics["memory/train_retries"] = float(retries)
        watched = {name: found[name] for name in _WATCHED}
        if not self.guard.passes(watched):
            again = partial(self._accumulate, pairs)
            self.guard.refuse(NonFiniteUpdate.of(0, self.model, self.optimizer, watched, again))
            return metrics | {"reward_model/skipped_updates": 1.0}
        with explained("the optimizer", ADVICE):
            self.optimizer.apply(total_norm)
            self.model.requantize()
        return metrics | found

    def _accumulate(self, pairs: Sequence[Pair]) -> tuple[dict[str, float], torch.Tensor]:
        """Forward and backward of an update: what is measured of it, and the gradient norm."""
        self.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=self.model.device)
        margins = []
        for part in _micro_batches(pairs, self.micro_batch_size.tokens):
            better, worse = self._scores(part)
            share = preference_loss(better, worse, len(pairs))
            share.backward()
            total += share.detach()
            margins.append((better - worse).detach())
        margin, total_norm = torch.cat(margins).double(), self.optimizer.gradient_norm()
        values = [total, total_norm.double(), (margin > 0).double().mean(), margin.mean()]
        names = (*_WATCHED, "reward_model/accuracy", "reward_model/margin")
        return dict(zip(names, torch.stack(values).tolist(), strict=True)), total_norm

    def _shrink(self, pairs: Sequence[Pair], problem: str) -> None:
        self.optimizer.zero_grad()
        parts = _micro_batches(pairs, self.micro_batch_size.tokens)
        sizes = [(sum(map(_num_tokens, part)), len(part)) for part in parts]
        self.micro_batch_size.halve(sizes, problem, "pair")

    def _scores(self, pairs: Sequence[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores of the better and of the worse sequences, float32 [P], differentiable."""
        device = self.model.device
        sequences = [sequence for pair in pairs for sequence in pair]
        lengths = torch.tensor([len(s) for s in sequences], device=device)
        token_ids = torch.tensor([t for s in sequences for t in s], device=device)
        cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        scores = self.model.values(
            token_ids, cu_seqlens, cu_seqlens[1:] - 1, self._checkpoint_layers
        )
        return scores[0::2], scores[1::2]


def _micro_batches(pairs: Sequence[Pair], tokens: int) -> list[list[Pair]]:
    """The pairs in order, as many at once as have at most `tokens` tokens, or one longer pair."""
    found: list[list[Pair]] = [[]]
    total = 0
    for pair in pairs:
        length = _num_tokens(pair)
        if found[-1] and total + length > tokens:
            found.append([])
            total = 0
        found[-1].append(pair)
        total += length
    return found


def _num_tokens(pair: Pair) -> int:
    return len(pair[0]) + len(pair[1])
