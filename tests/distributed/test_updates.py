"""Updates have the same bits at any number of ranks: weights, moments, codes, metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.distributed.ranks import run_ranks
from tests.distributed.tiny_policy import CONFIG, digest_of, random_samples, whole

from jetrl.distributed.world import world
from jetrl.models.policy import Policy
from jetrl.precision import PrecisionPlan, gradients
from jetrl.settings.loading import Settings
from jetrl.training.sft import SftTrainer
from jetrl.training.trainer import Trainer
from jetrl.types import Example

GLM = {
    "model_type": "glm4_moe",
    "n_routed_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 0,
}


def _train(
    preset: str,
    tied: bool,
    states: str,
    updates: int,
    options: dict[str, Any],
    at_once: int = 2**29,
    mixture: bool = False,
) -> Any:
    """Return digests and metrics of supervised and reinforcement updates of a tiny policy."""
    gradients._AT_ONCE = at_once
    plan = PrecisionPlan.preset(preset).replace(**options)
    vocabulary = 320 if plan.lm_head == "fp8" else CONFIG["vocab_size"]  # FP8: halves of blocks
    config = {**CONFIG, "tie_word_embeddings": tied, "vocab_size": vocabulary}
    policy = Policy.from_config(config | (GLM if mixture else {}), plan, seed=1)
    training = {"updates_per_step": updates, "optimizer_states": states, "lr": 1e-3}
    settings = Settings.model_validate(
        {
            "precision": {"preset": preset},
            "train": {"tokens_per_micro_batch": 45, "warmup_steps": 0, **training},
            "sft": {"steps": 2, "lr": 1e-3},
            "rollout": {"prompts_per_step": 5, "samples_per_prompt": 2, "max_tokens": 64},
            "algorithm": {"name": "grpo"},
        }
    )
    g = np.random.default_rng(3)
    examples = [
        Example(tuple(map(int, g.integers(0, 300, 4))), tuple(map(int, g.integers(0, 300, 20))))
        for _ in range(5)
    ]
    results: list[Any] = [SftTrainer(policy, settings).step(examples)]
    trainer = Trainer(policy, settings)
    for step in range(2):
        metrics = trainer.step(random_samples(policy, step, 2)).metrics
        results.append({n: v for n, v in metrics.items() if "timing" not in n})
    states_now, shard_of = trainer.optimizer.state_tensors(), trainer.optimizer.shard_of
    moments = {name: whole(tensor, shard_of(name)) for name, tensor in states_now.items()}
    masters, quantized = policy.whole_masters(), policy.weights.quantized_tensors()
    return results, digest_of(masters), digest_of(moments), digest_of(quantized), world().size


def test_a_router_with_a_frozen_bias_is_the_same_on_all_ranks() -> None:
    options = ("int8", True, "compact", 1, {}, 20_000, True)
    alone = _train(*options)
    for results in run_ranks(2, _train, *options):
        assert results[:-1] == alone[:-1]


@pytest.mark.parametrize(
    "preset, tied, states, updates, options, sizes",
    [
        ("unified", True, "compact", 1, {}, (2, 3, 4)),
        ("unified", False, "compact", 2, {"grad_output": "bf16"}, (2,)),
        ("int8", True, "compact", 1, {"lm_head": "int8x2"}, (3,)),
        ("bf16", True, "fp32", 1, {}, (3,)),
        ("nvfp4", True, "fp32", 1, {"first_layers_bf16": 0, "last_layers_bf16": 0}, (2, 3)),
        ("fp4", True, "fp32", 1, {}, (2, 3)),
        ("mixed", False, "compact", 2, {"lm_head": "fp8"}, (2,)),
    ],
)
def test_an_update_has_the_same_bits_on_any_number_of_ranks(
    preset: str, tied: bool, states: str, updates: int, options: dict[str, Any], sizes: tuple[int]
) -> None:
    alone = _train(preset, tied, states, updates, options)
    assert alone[0][1]["policy/grad_norm"] > 0
    for size in sizes:
        for results in run_ranks(size, _train, preset, tied, states, updates, options, 20_000):
            assert results[-1] == size
            assert results[:-1] == alone[:-1]
