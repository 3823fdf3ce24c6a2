"""The draft head on a Hopper GPU: no different bit in the engine or the policy, and it learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.loads import make_samples
from small_models import config, make_policy

from jetrl import Policy, RolloutEngine, SamplingParams
from jetrl.kernels.decode_state import HEAD
from jetrl.models.draft_head import DraftHead
from jetrl.session.parity import random_prompts
from jetrl.settings.loading import Settings
from jetrl.training.extras.draft_head import DraftHeadTraining
from jetrl.training.trainer import Trainer
from jetrl.types import Sample

pytestmark = pytest.mark.gpu

CONFIG = config(vocab_size=512, max_position_embeddings=2048, eos_token_id=7)
PARAMS = SamplingParams(n=4, max_tokens=90, seed=1, temperature=0.5)


def drawn_samples(engine: RolloutEngine, prompts: list[list[int]], seed: int) -> list[Sample]:
    params = SamplingParams(n=4, max_tokens=60, seed=seed, temperature=0.3, ignore_eos=True)
    completions = engine.generate(prompts, params)
    return make_samples(prompts, completions, [float(i % 3) for i in range(len(completions))])


def policy_of_the_last_token() -> Policy:
    """A policy whose layers add nothing, so that the next token follows from the last one alone."""
    policy = make_policy(CONFIG)
    with torch.no_grad():
        for name, master in policy.master_weights().items():
            if name.endswith((".o.weight", ".down.weight")):
                master.zero_()
    policy.requantize()
    return policy


def train(with_head: bool, steps: int = 3) -> tuple[Any, ...]:
    """Return the policy's weights, the head's, and accuracy and acceptance by step."""
    policy = policy_of_the_last_token()
    settings = Settings.model_validate(
        {
            "train": {"lr": 1e-5},
            "draft_head": {"share": 1.0, "lr": 2e-3, "tokens_per_update": 64},
            # The temperature is that of `drawn_samples`.
            "rollout": {"prompts_per_step": 8, "samples_per_prompt": 4, "max_tokens": 60}
            | {"temperature": 0.3, "speculation": "head"},
        }
    )
    head = DraftHead(policy, 3, 0) if with_head else None
    training = None if head is None else DraftHeadTraining(head, settings)
    mode = "off" if head is None else "head"
    engine = RolloutEngine(policy, speculation=mode, draft_head=head)
    trainer = Trainer(policy, settings, extras=[] if training is None else [training])
    prompts = random_prompts(policy, 8, 20, seed=5)
    accuracies, accepted = [], []
    for step in range(steps):
        samples = drawn_samples(engine, prompts, step)
        engine.free_cache()  # as a run does; the graphs stay
        metrics = trainer.step(samples, step).metrics
        assert metrics["mismatch/num_different"] == 0
        accuracies.append(metrics.get("draft_head/accuracy", 0.0))
        drafts = engine.take_speculation()
        if drafts is not None:
            accepted.append(drafts.accepted[HEAD] / max(1, drafts.drafted[HEAD]))
    weights = {n: p.detach().clone() for n, p in policy.master_weights().items()}
    own = {} if training is None else {n: t.clone() for n, t in training.state_tensors().items()}
    return weights, own, accuracies, accepted


def test_a_head_learns_leaves_the_policy_alone_and_repeats_itself() -> None:
    plain, _, _, _ = train(False)
    weights, head, accuracies, accepted = train(True)
    again = train(True)
    assert all(torch.equal(plain[name], weights[name]) for name in plain)
    assert all(torch.equal(head[name], again[1][name]) for name in head)
    assert (accuracies, accepted) == again[2:]
    # Chance is one in 512; on the CPU the third step has an accuracy of 0.97.
    assert accuracies[-1] > max(0.5, accuracies[0])
    assert accepted[0] == 0, "nothing was learned before the first step"
    assert accepted[-1] > 0.25
