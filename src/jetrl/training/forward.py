"""The one way from a packed batch of numpy arrays to log-probs of the policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from jetrl.models.packed import upload
from jetrl.models.stems import Stems
from jetrl.training.packing import targets
from jetrl.types import Batch

if TYPE_CHECKING:
    from jetrl.models.policy import Policy


def batch_logprobs(
    policy: Policy,
    batch: Batch,
    temperature: float = 1.0,
    checkpoint_layers: bool = False,
    seen: Callable[[torch.Tensor], None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and moments of the N trained tokens of a batch, in batch order.

    Args:
        checkpoint_layers: Whether to compute layers again on the way back instead of keeping what
            they computed.
        seen: Called with the hidden states [N, D] from which the tokens were drawn.

    Returns:
        Log-probs, float32 [N], differentiable unless under no_grad, and the moments of
        `Policy.train_logprobs`, float32 [2, N].
    """
    return policy.train_logprobs(
        torch.from_numpy(batch.token_ids),
        torch.from_numpy(batch.cu_seqlens),
        torch.from_numpy(targets(batch)),
        temperature,
        checkpoint_layers=checkpoint_layers,
        stems=Stems.of(batch),
        seen=seen,
    )


def at_targets(values: np.ndarray, batch: Batch, device: torch.device | str) -> torch.Tensor:
    """Return values of a batch at its N trained tokens, [N] of the same dtype.

    Args:
        values: [T], a value for each token of the batch.
    """
    return upload(torch.from_numpy(values[targets(batch)]), torch.device(device))
