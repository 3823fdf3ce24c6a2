"""Updates that train an image tower have the same bits at any number of ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.distributed.ranks import run_ranks
from tests.distributed.tiny_policy import digest_of, whole
from tests.models.test_images import encode, picture
from tests.models.test_images import model as make_model

from jetrl.distributed.world import world
from jetrl.models.policy import Policy
from jetrl.models.source import ModelSource
from jetrl.models.vision_trained import TrainedTower
from jetrl.precision import PrecisionPlan
from jetrl.settings.loading import Settings
from jetrl.training.trainer import Trainer
from jetrl.types import Completion, Prompt, Sample, Score

# Rows of these layers are two whole blocks of 128, which two ranks divide.
INNER = "intermediate_size"
WIDE = {"idefics3": INNER, "qwen2_5_vl": INNER, "qwen3_vl": "hidden_size"}


def wide_model(path: Path, family: str) -> Path:
    make_model(path, family)
    config = json.loads((path / "config.json").read_text())
    config["vision_config"][WIDE[family]] = 256
    (path / "config.json").write_text(json.dumps(config))
    return path


def samples_of(policy: Policy, step: int) -> list[Sample]:
    """Eight samples, of which the middle ones have no images; of step 1 none has."""
    g, samples = np.random.default_rng(step), []
    for i in range(8):
        group = i // 2
        images = [picture(group, 16, 16)] if group in (0, 3) and step != 1 else []
        inputs = encode(policy, "<image>" * len(images) + f"how {group}?", images)
        tokens = tuple(map(int, g.integers(0, 90, int(g.integers(3, 9)))))
        text = replace(inputs, token_ids=(*inputs.token_ids, *tokens))
        with torch.no_grad():
            logprobs = policy.logprobs([text])[0][len(inputs) - 1 :]
        completion = Completion(tokens, tuple(logprobs.tolist()), "stop", "")
        reward = Score(float(i % 2))
        samples.append(Sample(Prompt(str(group), text=""), group, inputs, completion, reward))
    return samples


def trained_digests(
    path: Path, plan: str, part: str, states: str, tokens: int, out_of_memory: bool = False
) -> Any:
    """Return digests and metrics of three steps of two updates each."""
    given = ModelSource.from_path(path)
    source = ModelSource.from_seed(given.config, seed=1, tokenizer=given.tokenizer)
    source = replace(source, trained_tower=part)
    policy = Policy(source, PrecisionPlan.preset(plan))
    training = {"updates_per_step": 2, "optimizer_states": states, "lr": 1e-3, "tower": part}
    settings = Settings.model_validate(
        {
            "precision": {"preset": plan},
            "train": {"tokens_per_micro_batch": tokens, "warmup_steps": 0, **training},
            "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_tokens": 64},
            "algorithm": {"name": "grpo"},
        }
    )
    trainer, results = Trainer(policy, settings), []
    assert isinstance(policy.tower, TrainedTower)
    if out_of_memory:
        adds = failing_once(policy.tower.add_gradients)
        policy.tower.add_gradients = adds  # type: ignore[method-assign]
    weights, of_tower = [], policy.weights.of_tower
    for step in range(3):
        metrics = trainer.step(samples_of(policy, step)).metrics
        results.append({n: v for n, v in metrics.items() if not n.startswith("memory")})
        weights.append(digest_of({name: policy.weights.whole(name) for name in of_tower}))
    states_now, shard_of = trainer.optimizer.state_tensors(), trainer.optimizer.shard_of
    moments = {name: whole(tensor, shard_of(name)) for name, tensor in states_now.items()}
    parts = (policy.whole_masters(), moments, policy.weights.quantized_tensors())
    divided = len(policy.weights.shards.keys() & {*of_tower})
    return (results, weights, *map(digest_of, parts)), divided, world().size


def failing_once(function: Any) -> Any:
    calls = iter([True])

    def fails(*args: Any) -> None:
        if next(calls, False):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        function(*args)

    return fails


@pytest.mark.parametrize(
    "family, plan, part, states",
    [
        ("idefics3", "int8", "all", "compact"),
        ("qwen2_5_vl", "bf16", "all", "fp32"),
        ("qwen3_vl", "unified", "connector", "fp32"),
    ],
)
def test_ranks_have_the_bits_of_one_process(
    family: str, plan: str, part: str, states: str, tmp_path: Path
) -> None:
    options = (wide_model(tmp_path / "model", family), plan, part, states, 40)
    alone, _, _ = trained_digests(*options)
    results, weights = alone[:2]
    assert results[1]["policy/grad_norm"] > 0
    assert weights[0] == weights[1] != weights[2]  # no image in the second step
    for found, divided, size in run_ranks(2, trained_digests, *options):
        assert (found, size, divided > 0) == (alone, 2, True)


def test_a_backward_that_runs_out_of_memory_is_made_again_with_smaller_micro_batches(
    tmp_path: Path,
) -> None:
    path = wide_model(tmp_path / "model", "idefics3")
    (uncut, *_), _, _ = trained_digests(path, "int8", "all", "fp32", 80)
    (retried, *_), _, _ = trained_digests(path, "int8", "all", "fp32", 80, out_of_memory=True)
    for first, second in zip(uncut, retried, strict=True):
        assert second["mismatch/num_different"] == 0  # the smaller ones have their images
        assert second["policy/grad_norm"] == pytest.approx(first["policy/grad_norm"], rel=0.01)
    assert retried != uncut
