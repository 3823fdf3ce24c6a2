"""Training a reward model on pairs of completions, the better one first."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from jetrl.config import Settings
from jetrl.errors import UserError
from jetrl.scalar_model import ScalarModel
from jetrl.training.losses import preference_loss
from jetrl.training.optimizer import Optimizer

Pair = tuple[Sequence[int], Sequence[int]]
"""Token ids of the better and of the worse sequence, prompts included."""


class RewardTrainer:
    """Updates a scalar model on pairs. Its optimizer has lr, warm-up and schedule from
    `settings.sft`, the rest from `settings.train`."""

    def __init__(self, model: ScalarModel, settings: Settings) -> None:
        self.model = model
        self._tokens = settings.train.tokens_per_micro_batch
        self._checkpoint_layers = settings.train.activation_checkpointing
        sft = settings.sft
        train = settings.train.model_copy(
            update={"lr": sft.lr, "warmup_steps": sft.warmup_steps, "schedule": sft.schedule}
        )
        self.optimizer = Optimizer(model.named_masters(), train, total_updates=sft.steps)

    def step(self, pairs: Sequence[Pair]) -> dict[str, float]:
        """One optimizer update on all of the pairs.

        Returns:
            sft/loss (Bradley-Terry, nats a pair), sft/grad_norm, sft/lr, sft/tokens;
            reward_model/accuracy (pairs in which the better one scores higher) and
            reward_model/margin (mean difference), all before the update.

        Raises:
            UserError: no pairs, or a sequence that the model cannot take.
            NonFiniteError: the gradient is not finite; the model was not changed.
        """
        if not pairs:
            raise UserError("a reward model cannot be trained on no pairs")
        self.model.check_sequences([sequence for pair in pairs for sequence in pair])
        self.optimizer.zero_grad()
        loss, margins = 0.0, []
        for part in _micro_batches(pairs, self._tokens):
            better, worse = self._scores(part)
            share = preference_loss(better, worse, len(pairs))
            share.backward()
            loss += float(share.detach())
            margins.append((better - worse).detach())
        margin = torch.cat(margins)
        metrics = {
            "sft/loss": loss,
            "sft/lr": self.optimizer.lr,
            "sft/tokens": float(sum(len(s) for pair in pairs for s in pair)),
            "reward_model/accuracy": float((margin > 0).double().mean()),
            "reward_model/margin": float(margin.double().mean()),
        }
        metrics["sft/grad_norm"] = self.optimizer.step()
        self.model.requantize()
        return metrics

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
        length = len(pair[0]) + len(pair[1])
        if found[-1] and total + length > tokens:
            found.append([])
            total = 0
        found[-1].append(pair)
        total += length
    return found
