"""The program of one rank in tests/gpu/test_ranks.py: updates of a small model, as digests."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch
from benchmarks.loads import make_samples
from small_models import config, make_policy

from jetrl import Policy, RolloutEngine, SamplingParams
from jetrl.distributed.collectives import gather_rows
from jetrl.distributed.process_group import open_world
from jetrl.distributed.world import world
from jetrl.settings.loading import Settings
from jetrl.training.trainer import Trainer

# A vocabulary of eight whole blocks of rows, and a ragged one.
SIZES = {"vocab_size": 1100, "intermediate_size": 1280, "head_dim": 64, "initializer_range": 0.02}


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return a digest of tensors, of own rows with those of all ranks."""
    made = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
        made.update(name.encode() + flat.numpy().tobytes())
    return made.hexdigest()[:12]


def whole(policy: Policy, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a master weight, or its moment, with the rows of all ranks."""
    shard = next((s for n, s in policy.weights.shards.items() if name.endswith(n)), None)
    if shard is None or tensor.dim() < 2:
        return tensor
    rows = tensor.new_zeros((shard.num_rows, *tensor.shape[1:]))
    rows[shard.own_rows] = tensor.detach()
    gather_rows(rows, shard.counts())
    return rows


def train(preset: str, tied: bool) -> dict[str, Any]:
    """Return digests and metrics of two steps of two updates each."""
    policy = make_policy(config(**SIZES, tie_word_embeddings=tied), preset)
    settings = Settings.model_validate(
        {
            "precision": {"preset": preset},
            "train": {"tokens_per_micro_batch": 700, "updates_per_step": 2, "lr": 1e-3},
            "rollout": {"prompts_per_step": 8, "samples_per_prompt": 4, "max_tokens": 150},
        }
    )
    trainer, engine = Trainer(policy, settings), RolloutEngine(policy)
    prompts = [[(7 * i + k) % 1100 for k in range(5 + i)] for i in range(8)]
    metrics = []
    for step in range(2):
        drawn = engine.generate(prompts, SamplingParams(n=4, max_tokens=150, seed=step))
        samples = make_samples(prompts, drawn, [float(i % 3) for i in range(len(drawn))])
        metrics.append(trainer.step(samples).metrics)
    masters = {n: whole(policy, n, p) for n, p in policy.master_weights().items()}
    moments = {n: whole(policy, n, t) for n, t in trainer.optimizer.state_tensors().items()}
    tensors = policy.weights.quantized_tensors()
    return {
        "different": sum(m["mismatch/num_different"] for m in metrics),
        "norms": [m["policy/grad_norm"].hex() for m in metrics],
        "masters": digest(masters),
        "moments": digest(moments),
        "quantized": digest(tensors),
        "size": world().size,
    }


if __name__ == "__main__":
    with open_world("cuda"):
        results = {f"{p} {t}": train(p, t) for p in sys.argv[1:] for t in (True, False)}
        everyone = world().gather("digests", results)
        assert all(other == results for other in everyone), "ranks differ"
        if world().is_first:
            print(json.dumps(results))
