"""What hang.txt says beside the stacks: the sequences that were being sampled, and the memory."""

from __future__ import annotations

import torch

from jetrl.memory.device import beside_tensors
from jetrl.models.policy import Policy
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.sequence import RunningSequence


def hang_state(engine: RolloutEngine, policy: Policy) -> list[str]:
    """Lines; asks the GPU nothing, which may be what hangs."""
    sequences = list(engine.sequences)
    finished = sum(sequence.finished for sequence in sequences)
    lines = [f"sequences: {len(sequences)}, of these {finished} finished"]
    lines += [_line(sequence) for sequence in sequences if not sequence.finished]
    if policy.device.type == "cuda":
        lines += ["", torch.cuda.memory_summary(policy.device)]
        lines.append(f"KV pages and graphs, beside it: {beside_tensors() / 2**30:.2f} GiB")
    return lines


def _line(sequence: RunningSequence) -> str:
    what = "waits for its environment" if sequence.awaiting else "runs"
    if not sequence.pages:
        what = "waits for pages"
    return (
        f"  {sequence.index}: {what}; prompt {len(sequence.prompt)} tokens, drawn "
        f"{len(sequence.generated)} of {sequence.rules.max_tokens}, computed "
        f"{sequence.num_computed}, {len(sequence.pages)} pages"
    )
