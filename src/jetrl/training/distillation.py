"""On-policy distillation: the student learns from a teacher on the completions that it drew.

Agarwal et al. 2024, "On-Policy Distillation of Language Models", arXiv 2306.13649. The loss of a
token is

    teacher.reward * (the algorithm's loss of the token) + teacher.weight * KL(student || teacher)

with the KL of the distributions after the tokens before, which are taken as given: no token is
credited for later ones. Both estimates have that gradient:

    vocabulary   the KL over the whole vocabulary, without sampling noise
    token        of the drawn token alone: its advantage gets weight * (log q - log p), with the
                 sampler's log p. Its expected gradient is that of the KL

The teacher is frozen and forwards the packed micro-batch of the student. Its hidden states, not its
logits, cover all tokens; logits of both exist for a chunk of rows. On a GPU, forward keeps the
gradient of the student's logits in BF16, in place of that of the drawn tokens' log-probs. On a CPU,
or if layers are recomputed or drawn tokens have a gradient too, backward makes the logits again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from jetrl.kernels.reverse_kl import MOST_LOGITS, reverse_kl
from jetrl.models.policy import Policy
from jetrl.precision.backend import backend_of, has_defined_bits
from jetrl.settings.model_sections import TeacherSettings
from jetrl.training import loss_math
from jetrl.training.micro_batches import MicroBatchLoss, batch_logprobs, hidden_states
from jetrl.training.packing import with_prompts
from jetrl.types import Batch, PromptInputs


@dataclass(frozen=True)
class Distilled:
    """Part of a teacher in the loss of the N trained tokens of a micro-batch.

    Attributes:
        advantages: float32 [N], for the algorithm's loss.
        kl: Reverse KL, nats, float32 [N]: of the vocabulary, differentiable, or of the drawn token.
        weight: Factor of a differentiable KL in the loss; 0 if it is in the advantages.
    """

    advantages: Tensor
    kl: Tensor
    weight: float

    def added_to(self, loss: MicroBatchLoss, token_weights: Tensor, share: float) -> MicroBatchLoss:
        """Return the algorithm's loss with the KL, given each token's weight in the update.

        `share` is one token's share of the update's means.
        """
        metrics = {**loss.metrics, "teacher/kl": loss_math.total(self.kl.detach()) * share}
        total = loss.loss
        if self.weight:
            total = total + loss_math.loss_sum(self.weight * self.kl * token_weights)
        return replace(loss, loss=total, metrics=metrics)


@dataclass(frozen=True)
class Distillation:
    """A frozen teacher and how its distribution enters the loss.

    `prompts` are the teacher's own, by the keys of the student's (`teacher.prompt`); empty: it
    reads the student's.
    """

    teacher: Policy
    settings: TeacherSettings
    temperature: float
    prompts: Mapping[bytes, PromptInputs]

    @property
    def uses_draws(self) -> bool:
        """True if the log-probs of drawn tokens have a gradient."""
        return self.settings.kl == "token" or self.settings.reward > 0

    def __call__(
        self,
        student: Policy,
        batch: Batch,
        hidden: Tensor,
        advantages: Tensor,
        rollout_logprobs: Tensor,
        recompute: bool = True,
    ) -> Distilled:
        """Return the teacher's part in the loss of the N trained tokens of a batch.

        Args:
            hidden: The student's hidden states [N, D] before each token, differentiable.
            advantages: float32 [N], by the rewards.
            rollout_logprobs: The sampler's, float32 [N].
            recompute: Whether backward computes logits again; a CPU always does.
        """
        # The teacher may read another prompt before the same completion.
        own, asked = self.settings, with_prompts(batch, self.prompts) if self.prompts else batch
        advantages = own.reward * advantages
        # A KL of the vocabulary is a loss of its own; one of drawn tokens is an advantage.
        if own.kl == "vocabulary":
            teachers = hidden_states(self.teacher, asked, "train")
            kl = self._vocabulary_kl(student, hidden, teachers, recompute)
            return Distilled(advantages, kl, own.weight)
        with torch.no_grad():
            kl = rollout_logprobs - batch_logprobs(self.teacher, asked, self.temperature)[0]
        return Distilled(advantages - own.weight * kl, kl, 0.0)

    def _vocabulary_kl(
        self, student: Policy, hidden: Tensor, teachers: Tensor, recompute: bool
    ) -> Tensor:
        """Return the KL over the vocabulary, float32 [N], a chunk of rows at a time."""

        def chunk_kl(rows: Tensor, teacher_rows: Tensor) -> Tensor:
            with torch.no_grad():
                logits = self.teacher.decoder.logits(teacher_rows, "train")
            return reverse_kl(student.decoder.logits(rows, "train"), logits, self.temperature)

        most = min(backend_of(hidden).logits_at_once, MOST_LOGITS)
        size = max(1, most // self.teacher.config.vocab_size)
        chunks = zip(hidden.split(size), teachers.split(size), strict=True)
        # Forward keeps the gradient of each chunk, 2 bytes per logit, in place of its logits.
        if not (recompute or has_defined_bits(hidden)):
            return torch.cat([chunk_kl(x, y) for x, y in chunks])
        # Backward computes the logits of a chunk again, so that no two chunks are held.
        return torch.cat([checkpoint(chunk_kl, x, y, use_reentrant=False) for x, y in chunks])
