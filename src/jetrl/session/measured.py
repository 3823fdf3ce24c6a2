"""Times and speeds of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jetrl.types import Sample

PHASES = ("rollout", "reward", "update", "optimizer", "requantize")


def measured(
    timings: Mapping[str, float],
    samples: Sequence[Sample],
    rollout_tokens: int,
) -> dict[str, float]:
    """timing/* and throughput/* of a step whose rollout, reward and update are done.

    Args:
        timings: seconds by phase. samples: trained on. rollout_tokens: drawn.
    """
    trained = sum(len(s.prompt_token_ids) + len(s.completion.token_ids) for s in samples)
    return {
        **{f"timing/{n}_s": timings[n] for n in PHASES},
        "throughput/rollout_tokens_per_s": rollout_tokens / timings["rollout"],
        "throughput/train_tokens_per_s": trained / timings["update"],
    }
