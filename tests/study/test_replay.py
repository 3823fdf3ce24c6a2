"""Routes replayed in the trainer: the seam, and their study on a toy size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.study.deviation import SamplerDeviation
from benchmarks.study.deviation import main as deviating_main
from benchmarks.study.replay import weights_of
from benchmarks.study.results import read_results
from tests.study.conftest import PoolInThisProcess

from benchmarks import letter_counts, word_problems
from jetrl.cli.main import main
from jetrl.errors import UserError
from jetrl.kernels.routing import route
from jetrl.kernels.routing_rule import RoutingRule
from jetrl.models.experts import blocks_of, observed_routes
from jetrl.models.packed import ForwardInputs
from jetrl.models.policy import Policy
from jetrl.precision import PrecisionPlan
from jetrl.training.routes import share_of_other_routes

ROOT = Path(__file__).parents[2]
CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": 32, "hidden_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "intermediate_size": 128,
    "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip


@pytest.mark.parametrize("rule", [RoutingRule(3), RoutingRule(3, "sigmoid", True, 1e-20, 1.8)])
def test_the_weights_of_a_choice_are_those_of_the_router(rule: RoutingRule) -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.randn(40, 9, generator=generator).requires_grad_() for _ in range(2))
    theirs.data.copy_(ours.data)
    chosen, expected = route(ours, rule)
    found = weights_of(chosen, theirs, rule, None)[1]
    (expected.square().sum() + found.square().sum()).backward()
    for a, b in ((expected, found), (ours.grad, theirs.grad)):
        assert (a - b).norm() <= 2.0**-20 * a.norm()  # some ten roundings to float32


def test_the_trainer_has_the_samplers_routes_in_the_context_only() -> None:
    plan = SamplerDeviation(replayed_routes=True).plan_of(PrecisionPlan.preset("mixed"))
    policy = Policy.from_config(CONFIG, plan)
    tokens = [torch.randint(0, 32, (60,), generator=torch.Generator().manual_seed(1)).tolist()]
    decoder = policy.decoder

    def sampler_forward() -> None:
        with torch.no_grad():
            decoder_hidden(policy, tokens, "rollout")

    with observed_routes(decoder) as sampled:
        sampler_forward()
    with observed_routes(decoder) as apart:
        policy.logprobs(tokens)
    with plan.training_forward(decoder, sampler_forward), observed_routes(decoder) as replayed:
        policy.logprobs(tokens)[0].sum().backward()
    assert share_of_other_routes(apart, sampled) > 0
    assert share_of_other_routes(replayed, sampled) == 0
    assert policy.master_weights()["layers.0.router.weight"].grad.any()
    assert all(block.choose is route for block in blocks_of(decoder))


def decoder_hidden(policy: Policy, tokens: list[list[int]], side: Any) -> None:
    ends = torch.tensor([0, len(tokens[0])])
    inputs = ForwardInputs.packed(torch.tensor(tokens[0]), ends)
    policy.packed_hidden(inputs, ends, torch.arange(len(tokens[0])), side=side)


def test_a_model_without_experts_is_refused() -> None:
    plan = SamplerDeviation(replayed_routes=True).plan_of(PrecisionPlan.preset("int8"))
    assert not plan.exact
    dense = Policy.from_config({**CONFIG, "model_type": "qwen3"}, plan)
    with (
        pytest.raises(UserError, match="the model has no experts"),
        plan.training_forward(dense.decoder, lambda: None),
    ):
        pass


class Deviating(PoolInThisProcess):
    def run(self, words: list[str]) -> int:
        return deviating_main(words)


TOY = {
    "seeds = [1, 2, 3, 4, 5, 6]": "seeds = [1]",
    'results = "benchmarks/results/study/routes.json"': 'out = "out"',
    'config = "benchmarks/study/models/mixture.json"': 'config = "mixture.json"',
    "steps = 600": "steps = 2",
    "warmup_steps = 50": "warmup_steps = 0",
    "examples_per_step = 64": "examples_per_step = 2",
    "prompts_per_step = 16": "prompts_per_step = 2",
    "samples_per_prompt = 8": "samples_per_prompt = 2",
    "max_tokens = 192": "max_tokens = 6",
    "prompts = 1000": "prompts = 2",
    "prompts = 128": "prompts = 2",
    "steps = 40": "steps = 1",
    "every = 20": "every = 0",
    "every = 40": "every = 1",
    "updates_per_step = 1": "warmup_steps = 0\nupdates_per_step = 1",
}


def test_the_study_runs_on_a_toy_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "benchmarks" / "study" / "routes.toml").read_text()
    for old, new in TOY.items():
        assert old in text
        text = text.replace(old, new)
    config = (ROOT / "benchmarks" / "study" / "models" / "mixture.json").read_text()
    small = {'_layers": 6': '_layers": 1', 'hidden_size": 384': 'hidden_size": 128'}
    small |= {'num_experts": 16': 'num_experts": 6', "256": "128"}
    for old, new in small.items():
        assert old in config
        config = config.replace(old, new)
    (tmp_path / "mixture.json").write_text(config)
    (tmp_path / "routes.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    words = ["letters", "build/letters-short", "--steps", "2", "3"]
    monkeypatch.setattr("sys.argv", [*words, "--most=8", "--train=40", "--test=20"])
    word_problems.main(letter_counts.KINDS)
    monkeypatch.setattr("benchmarks.study.running.Pool", Deviating)
    monkeypatch.setattr("benchmarks.study.scheduler.POLL_S", 0.0)
    assert main(["study", "routes.toml"]) == 0
    runs = read_results(tmp_path / "out" / "results.json").runs
    routes = {run.arm: run.curves.values["experts/routes_different"] for run in runs.values()}
    assert list(routes) == ["int8", "apart", "apart-replay", "mixed", "mixed-replay"]
    for arm, values in routes.items():
        assert (max(values) > 0) is (arm in ("apart", "mixed")), arm
    different = {run.arm: run.different_tokens for run in runs.values()}
    assert different["int8"] == 0 < different["apart-replay"]
