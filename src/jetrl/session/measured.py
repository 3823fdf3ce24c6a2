"""Times, speeds and memory of a step."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence

import torch

from jetrl.types import Sample

PHASES = ("rollout", "reward", "update", "optimizer", "requantize")


def measured(
    timings: Mapping[str, float],
    samples: Sequence[Sample],
    rollout_tokens: int,
    device: torch.device,
) -> dict[str, float]:
    """timing/*, throughput/* and memory/* of a step whose rollout, reward and update are done.

    Args:
        timings: seconds by phase. samples: trained on. rollout_tokens: drawn. device: the policy's.
    """
    trained = sum(len(s.prompt_token_ids) + len(s.completion.token_ids) for s in samples)
    return {
        **{f"timing/{n}_s": timings[n] for n in PHASES},
        "throughput/rollout_tokens_per_s": rollout_tokens / timings["rollout"],
        "throughput/train_tokens_per_s": trained / timings["update"],
        "memory/peak_gib": _peak_bytes(device) / 2**30,
    }


def _peak_bytes(device: torch.device) -> int:
    """The most memory used so far: of the GPU if the policy is on one, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
