"""Drawing the next tokens: which random bits each draw gets, and which logits row.

The bits of a draw are a function of (seed, the sequence's key, the position of the token drawn) and
nothing else, so a sequence is the same in any batch, after a pre-emption, and beside any others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from jetrl.kernels.sampling import random_bits, sample
from jetrl.rollout.scheduler import Step
from jetrl.rollout.sequence import NonFiniteLogits, RunningSequence
from jetrl.types import SamplingParams

_LOGITS_AT_ONCE = 2**23  # logits handled together; sampling makes several arrays of this size


def draw_tokens(
    logits: Tensor, step: Step, sequences: Sequence[RunningSequence], params: SamplingParams
) -> list[tuple[int, float]]:
    """Draws a token for each of `step.draws`.

    logits: float32 [R, V], a row for each chunk that draws; all draws of a chunk share its row.

    Returns:
        (token id, its log-prob under the full distribution at the temperature) for each draw.

    Raises:
        NonFiniteLogits: logits without a finite softmax.
    """
    drawing = [chunk.draws for chunk in step.chunks if chunk.draws]
    assert len(drawing) == len(logits), f"{len(logits)} logits rows for {len(drawing)} chunks"
    rows = [row for row, draws in enumerate(drawing) for _ in draws]
    drawers = [sequences[index] for draws in drawing for index in draws]
    bits = random_bits(
        np.full(len(drawers), params.seed, dtype=np.int64),
        np.array([sequence.key for sequence in drawers], dtype=np.int64),
        np.array([sequence.num_tokens for sequence in drawers], dtype=np.int64),
    )
    drawn: list[tuple[int, float]] = []
    at_once = max(1, _LOGITS_AT_ONCE // logits.shape[1])
    for start in range(0, len(rows), at_once):
        part = slice(start, start + at_once)
        chosen = torch.tensor(rows[part], device=logits.device)
        try:
            token_ids, logprobs = sample(
                logits[chosen],
                torch.from_numpy(bits[part]).to(logits.device),
                torch.full((len(chosen),), params.temperature, device=logits.device),
                torch.full((len(chosen),), params.top_p, device=logits.device),
                torch.full((len(chosen),), params.top_k, device=logits.device, dtype=torch.int64),
            )
        except FloatingPointError as error:
            broken = ~torch.isfinite(logits[chosen].amax(-1))
            raise NonFiniteLogits(drawers[start + int(broken.int().argmax())].index) from error
        drawn += zip(token_ids.tolist(), logprobs.tolist(), strict=True)
    return drawn
