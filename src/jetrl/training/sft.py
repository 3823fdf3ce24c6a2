"""Supervised training on worked answers: token-mean cross entropy of the completions, through the
same forward (and the same FP8) as reinforcement learning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jetrl.config import Settings
from jetrl.errors import UserError
from jetrl.training.forward import batch_logprobs
from jetrl.training.losses import cross_entropy
from jetrl.training.optimizer import Optimizer
from jetrl.training.packing import pack_examples

if TYPE_CHECKING:
    from jetrl.policy import Policy


class SftTrainer:
    """Updates a policy on examples. It has an optimizer of its own: lr, warm-up and schedule from
    `settings.sft`, the rest (betas, clip, decay, micro-batch size) from `settings.train`."""

    def __init__(self, policy: Policy, settings: Settings) -> None:
        self.policy = policy
        self.settings = settings
        sft = settings.sft
        train = settings.train.model_copy(
            update={"lr": sft.lr, "warmup_steps": sft.warmup_steps, "schedule": sft.schedule}
        )
        self.optimizer = Optimizer(policy.named_masters(), train, total_updates=sft.steps)

    def step(self, examples: Sequence[tuple[Sequence[int], Sequence[int]]]) -> dict[str, float]:
        """One optimizer update on (prompt token ids, completion token ids) pairs, all of them.

        Returns:
            sft/loss (nats a completion token, before the update), sft/grad_norm, sft/lr, sft/tokens
            (completion tokens).

        Raises:
            UserError: an example with an empty prompt or completion, or no examples.
            RunStopped: the gradient is not finite.
        """
        if not examples:
            raise UserError("supervised training got no examples")
        train = self.settings.train
        batches = pack_examples(examples, train.tokens_per_micro_batch)
        num_tokens = sum(int(batch.loss_mask.sum()) for batch in batches)
        self.optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            logprobs, _ = batch_logprobs(
                self.policy, batch, checkpoint_layers=train.activation_checkpointing
            )
            loss = cross_entropy(logprobs, num_tokens)
            loss.backward()
            total += float(loss.detach())
        metrics = {"sft/loss": total, "sft/lr": self.optimizer.lr, "sft/tokens": float(num_tokens)}
        metrics["sft/grad_norm"] = self.optimizer.step()
        self.policy.requantize()
        return metrics
