"""A tiny policy whose matrices are divided among ranks, and its optimizer after an update."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from tests.training.shared import config

from jetrl.distributed.collectives import whole_tensor
from jetrl.distributed.shards import Shard
from jetrl.models.policy import Policy
from jetrl.precision import PrecisionPlan
from jetrl.settings.loading import Settings
from jetrl.training.optimizer import Optimizer
from jetrl.types import Completion, Prompt, PromptInputs, Sample, Score

# Rows of the vocabulary are two whole blocks and a ragged one; of a hidden size of one block one of
# several ranks owns it, and the others no row.
SIZES = {"vocab_size": 300, "intermediate_size": 384, "max_position_embeddings": 2048}
CONFIG = config(**SIZES, num_key_value_heads=2, tie_word_embeddings=False)


def make_policy(seed: int, states: str = "compact") -> tuple[Policy, Optimizer]:
    """Return a policy of random weights and an optimizer without moments."""
    policy = Policy.from_config(CONFIG, PrecisionPlan.preset("unified"), seed=seed)
    settings = Settings.model_validate({"train": {"lr": 1e-3, "optimizer_states": states}})
    return policy, Optimizer(
        policy.master_weights(), settings.train, total_updates=9, shards=policy.weights.shards
    )


def update(policy: Policy, optimizer: Optimizer) -> None:
    """Make an update by gradients that do not depend on the number of ranks."""
    g = torch.Generator().manual_seed(optimizer.num_updates)
    for name, master in policy.master_weights().items():
        shard = policy.weights.shards.get(name)
        rows = len(master) if shard is None else shard.num_rows
        grad = torch.randn((rows, *master.shape[1:]), generator=g)
        master.grad = grad if shard is None else grad[shard.own_rows].clone()
    optimizer.apply(torch.tensor(1.0))
    policy.requantize()


def whole(tensor: torch.Tensor, shard: Shard | None) -> torch.Tensor:
    return tensor if shard is None else whole_tensor(tensor, shard)


def random_samples(policy: Policy, step: int, group_size: int) -> list[Sample]:
    """Return eight samples of random tokens, with log-probs of the policy."""
    g = np.random.default_rng(step)
    samples = []
    for i in range(8):
        prompt = tuple(map(int, g.integers(0, 300, 5)))
        tokens = tuple(map(int, g.integers(0, 300, int(g.integers(3, 30)))))
        with torch.no_grad():
            logprobs = policy.logprobs([[*prompt, *tokens]])[0][len(prompt) - 1 :]
        completion = Completion(tokens, tuple(logprobs.tolist()), "stop", "")
        reward, group = Score(float(g.integers(0, 2))), i // group_size
        asked, inputs = Prompt(id=str(group), text=""), PromptInputs(prompt)
        samples.append(Sample(asked, group, inputs, completion, reward))
    return samples


def digest_of(tensors: dict[str, torch.Tensor]) -> str:
    """Return a digest of the bytes of tensors and of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]
