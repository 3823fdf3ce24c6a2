"""A decoder of one layer, settings, samples and measurements that the training tests share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from jetrl.models.policy import Policy
from jetrl.precision.plan import PrecisionPlan
from jetrl.settings.loading import Settings
from jetrl.training.trainer import Trainer
from jetrl.types import SamplingParams

REWARDS = [1.0, 0.0, 0.0, 1.0, 0.5, 0.0, 0.0, 2.0]


def config(**changes: Any) -> dict[str, Any]:
    """Return the contents of a config.json."""
    return {
        "model_type": "qwen3",
        "vocab_size": 16,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        **changes,
    }


def scalar_config(**changes: Any) -> dict[str, Any]:
    """Return the configuration of a model with one layer and a number for a head."""
    kind = {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}
    return config(**kind, tie_word_embeddings=False, **changes)


def make_policy(preset="unified", seed=0, **changes):
    changes = {"vocab_size": 32, "initializer_range": 0.1} | changes
    return Policy.from_config(config(**changes), PrecisionPlan.preset(preset), seed=seed)


def settings(train=None, algorithm=None, **sections):
    """Return GRPO by the mean over tokens, whose numbers are the easiest to work out."""
    train = {"lr": 0.01, "tokens_per_micro_batch": 9} | (train or {})
    algorithm = {"aggregation": "token_mean"} | (algorithm or {})
    return Settings.model_validate({"train": train, "algorithm": algorithm, **sections})


def draw(policy, sample, seed, count=8, longest=6):
    """Return random completions with the policy's own log-probs, `count` in two groups."""
    rng = np.random.default_rng(seed)
    shapes = [(2 + int(rng.integers(4)), 1 + int(rng.integers(longest))) for _ in range(count)]
    vocab_size = policy.config.vocab_size
    sequences = [rng.integers(0, vocab_size, a + b).tolist() for a, b in shapes]
    with torch.no_grad():
        logprobs = policy.logprobs(sequences)
    return [
        sample(i // (count // 2), s[:a], s[a:], float(rng.integers(3)), lp[a - 1 :].tolist())
        for i, ((a, _), s, lp) in enumerate(zip(shapes, sequences, logprobs, strict=True))
    ]


def count_different(policy, prompts, completions, params=SamplingParams()):  # noqa: B008
    """Return how many drawn tokens have a log-prob that is not, as bits, the trainer's."""
    n = len(completions) // len(prompts)
    pairs = [(list(prompts[i // n]), c) for i, c in enumerate(completions)]
    with torch.no_grad():
        sequences = [[*p, *c.token_ids] for p, c in pairs]
        trainer = policy.logprobs(sequences, params.temperature, params.logprobs_filter)
    different = 0
    for (prompt, completion), logprobs in zip(pairs, trainer, strict=True):
        told = {i for start, end in completion.environment for i in range(start, end)}
        drawn = [i for i in range(len(completion.token_ids)) if i not in told]
        ours = torch.tensor(completion.logprobs)[drawn].view(torch.int32)
        theirs = logprobs[len(prompt) - 1 :].cpu()[drawn].view(torch.int32)
        different += int((ours != theirs).sum())
    return different


def rescored(policy, samples):
    """Return the samples with the log-probs that the policy has for them now."""
    found = []
    for s in samples:
        with torch.no_grad():
            (row,) = policy.logprobs([[*s.prompt_token_ids, *s.completion.token_ids]])
        logprobs = tuple(row[len(s.prompt_token_ids) - 1 :].tolist())
        found.append(replace(s, completion=replace(s.completion, logprobs=logprobs)))
    return found


def snapshot(policy):
    return {name: p.detach().clone() for name, p in policy.master_weights().items()}


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def gradients_of_step(trainer, data):
    """Return the gradients that the step's updates see, in order, and the step's metrics."""
    seen, apply = [], trainer.optimizer.apply

    def record(total_norm):
        seen.append({name: p.grad.clone() for name, p in trainer.optimizer.masters.items()})
        apply(total_norm)

    trainer.optimizer.apply = record
    return seen, trainer.step(data).metrics


def trained(policy, run_settings, samples, reference=None):
    """Return gradients and metrics of one step of a new trainer."""
    return gradients_of_step(Trainer(policy, run_settings, reference), samples)
