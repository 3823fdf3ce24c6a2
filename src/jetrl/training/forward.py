"""The one way from a packed batch of numpy arrays to log-probs of the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from jetrl.models.packed import upload
from jetrl.training.packing import targets
from jetrl.types import Batch

if TYPE_CHECKING:
    from jetrl.models.policy import Policy


def batch_logprobs(
    policy: Policy, batch: Batch, temperature: float = 1.0, checkpoint_layers: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the N trained tokens of a batch, in batch order.

    Returns:
        (log-probs, float32 [N], differentiable unless under no_grad; entropy in nats, float32 [N]).
    """
    return policy.train_logprobs(
        torch.from_numpy(batch.token_ids),
        torch.from_numpy(batch.cu_seqlens),
        torch.from_numpy(targets(batch)),
        temperature,
        checkpoint_layers=checkpoint_layers,
    )


def at_targets(values: np.ndarray, batch: Batch, device: torch.device | str) -> torch.Tensor:
    """Values [T] of a batch at its N trained tokens, as a tensor [N] of the same dtype."""
    return upload(torch.from_numpy(values[targets(batch)]), torch.device(device))
