"""Drawing tokens after a forward over prompts: which random bits each draw gets, and which logits
row.

The bits of a draw are a function of (seed, the sequence's key, the position of the token drawn) and
nothing else, so a sequence is the same in any batch, after a pre-emption, and beside any others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from jetrl.kernels.decode_state import BROKEN
from jetrl.kernels.sampling import random_bits, sample
from jetrl.rollout.launched_step import to_device
from jetrl.rollout.scheduler import Step
from jetrl.rollout.sequence import RunningSequence
from jetrl.types import SamplingParams

_LOGITS_AT_ONCE = 2**23  # logits handled together; sampling makes several arrays of this size


def draw_tokens(
    logits: Tensor, step: Step, sequences: Sequence[RunningSequence], params: SamplingParams
) -> tuple[Tensor, Tensor]:
    """Draws a token for each of `step.draws`, without waiting for the device.

    logits: float32 [R, V], a row for each chunk that draws; all draws of a chunk share its row.

    Returns:
        (token ids int64 [draws], their log-probs float32 [draws] under the full distribution at the
        temperature). BROKEN stands for logits without a finite softmax.
    """
    drawing = [chunk.draws for chunk in step.chunks if chunk.draws]
    assert len(drawing) == len(logits), f"{len(logits)} logits rows for {len(drawing)} chunks"
    device = logits.device
    rows = [row for row, draws in enumerate(drawing) for _ in draws]
    drawers = [sequences[index] for draws in drawing for index in draws]
    bits = random_bits(
        np.full(len(drawers), params.seed, dtype=np.int64),
        np.array([sequence.key for sequence in drawers], dtype=np.int64),
        np.array([sequence.num_tokens for sequence in drawers], dtype=np.int64),
    )
    tokens = torch.empty(len(rows), dtype=torch.int64, device=device)
    logprobs = torch.empty(len(rows), device=device)
    at_once = max(1, _LOGITS_AT_ONCE // logits.shape[1])
    for start in range(0, len(rows), at_once):
        part = slice(start, start + at_once)
        count = len(rows[part])
        drawn, logprobs[part], lse = sample(
            logits[to_device(rows[part], device)],
            to_device(bits[part], device),
            torch.full((count,), params.temperature, device=device),
            torch.full((count,), params.top_p, device=device),
            torch.full((count,), params.top_k, device=device, dtype=torch.int64),
            params.top_p < 1 or params.top_k > 0,
        )
        tokens[part] = torch.where(torch.isfinite(lse), drawn, BROKEN)
    return tokens, logprobs
