"""Faults of the sampler, planted one at a time: `measure` sees each, `locate` names where it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.test_images import encode, model, picture
from tests.parity.test_exactness import CONFIG
from torch import Tensor

import jetrl.kernels.sampling as sampling
import jetrl.rollout.decode as decode
import jetrl.rollout.kv_cache as key_values
import jetrl.rollout.sampler as sampler
from jetrl import Policy, RolloutEngine, SamplingParams
from jetrl.precision import PrecisionPlan
from jetrl.rollout.kv_cache import _KVStore
from jetrl.runs.anomalies import Anomalies
from jetrl.session.parity import locate, measure
from jetrl.settings.loading import Settings
from jetrl.training.trainer import Trainer
from jetrl.types import Prompt, PromptInputs, Sample, Score

PROMPTS = [[7] * 70, [3, 1, 4, 1, 5], [9]]
Patch = pytest.MonkeyPatch


def wrong(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replaces a function by one that is also given what it replaces."""
    true = getattr(owner, name)
    patch.setattr(owner, name, lambda *rest, **named: change(true, *rest, **named))


def rule_of_stored_values(patch: Patch) -> None:
    name = "quantize_keys_and_values"
    wrong(patch, key_values, name, lambda true, k, v, form, rule: true(k, v, form, "pow2"))


def position_of_decoded_tokens(patch: Patch) -> None:
    def inputs(true: Any, *rest: Any) -> Any:
        found = true(*rest)
        return dataclasses.replace(found, positions=found.positions + 1)

    wrong(patch, decode, "next_inputs", inputs)


def order_of_the_softmax_sum(patch: Patch) -> None:
    def parts(true: Any, logits: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
        shifted, mass, _ = true(logits, temperature)
        return shifted, mass, mass.sum(-1, keepdim=True).log()  # in float32, in any order

    wrong(patch, sampling, "log_softmax_parts", parts)


def temperature_of_draws(patch: Patch) -> None:
    def sample(true: Any, logits: Tensor, bits: Tensor, temperature: Tensor, **rest: Any) -> Any:
        return true(logits, bits, temperature=temperature * (1 + 2.0**-20), **rest)

    wrong(patch, sampler, "sample", sample)


FAULTS = [
    (rule_of_stored_values, "layers.0.keys and values", "prompt"),
    (position_of_decoded_tokens, "layers.0.rotary", "decode"),
    (order_of_the_softmax_sum, "log-probs", "end"),
    (temperature_of_draws, "log-probs", "end"),
]


@pytest.fixture(scope="module")
def p() -> Policy:
    healthy = Policy.from_config(CONFIG, PrecisionPlan.preset("unified"), seed=0)
    assert measure(healthy, PROMPTS, samples=1, max_tokens=12, temperature=0.7).different == 0
    return healthy


@pytest.mark.parametrize("plant, operation, where", FAULTS, ids=lambda x: getattr(x, "__name__", x))
def test_a_fault_is_seen_and_named(
    p: Policy, plant: Callable[[Patch], None], operation: str, where: str, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    result = measure(p, PROMPTS, samples=1, max_tokens=12, temperature=0.7)
    assert result.different > 0
    prompt, completion = result.first_different
    found = locate(p, prompt, completion, temperature=0.7)
    assert found is not None
    assert found.operation == operation
    first = {"prompt": 0, "decode": len(prompt), "end": len(prompt) - 1}[where]
    assert first <= found.position < len(prompt) + len(completion)
    if where == "decode":
        assert found.position == first, "the first token that was decoded"


@pytest.mark.parametrize("family", ["idefics3", "qwen3_vl"])
def test_a_fault_after_an_image_is_named(family: str, tmp_path: Path, monkeypatch: Patch) -> None:
    policy = Policy.from_pretrained(model(tmp_path / "model", family), "unified")
    prompt, completion = encode(policy, "is<image>it?", [picture(1, 32, 32)]), [7, 9, 11]
    assert locate(policy, prompt, completion) is None
    # As if the sampler decoded as many positions too far as the image spares.
    position_of_decoded_tokens(monkeypatch)
    found = locate(policy, prompt, completion)
    assert found is not None
    assert (found.operation, found.position) == ("layers.0.rotary", len(prompt))
    monkeypatch.undo()

    def of_sampler(true: Any, image: Any) -> Any:
        return true(image) + (not torch.is_grad_enabled())

    wrong(monkeypatch, policy.tower, "features", of_sampler)
    found = locate(policy, prompt, completion)
    assert found is not None
    assert (found.operation, found.position) == ("embed", prompt.images[0].start)


def test_what_depends_on_the_batch_is_in_no_operation_alone(p: Policy, monkeypatch: Patch) -> None:
    """A page that two samples share and that is not copied before the second one writes."""
    monkeypatch.setattr(_KVStore, "copy", lambda *_: None)
    result = measure(p, PROMPTS, samples=3, max_tokens=12)
    assert result.different > 0
    assert locate(p, *result.first_different) is None


def mismatches(stale: bool) -> tuple[list[float], list[str]]:
    """Return K3 KLs and warnings of steps under `mixed`; `stale`: the sampler keeps a layer."""
    small = {**CONFIG, "initializer_range": 0.05, "num_hidden_layers": 1}
    p = Policy.from_config(small, PrecisionPlan.preset("mixed"), seed=0)
    engine, params = RolloutEngine(p), SamplingParams(n=8, max_tokens=12, ignore_eos=True)
    train = {"lr": 2e-2, "updates_per_step": 1}
    trainer = Trainer(p, Settings.model_validate({"train": train}))
    operand = p.weights.quantized_tensors()  # of both sides, in place
    kept = {name: t.clone() for name, t in operand.items() if name.startswith("layers.0.gate_up.")}
    fp8 = {name for name, t in kept.items() if t.dtype != torch.bfloat16}
    watch, found, warnings = Anomalies(), [], []
    for step in range(14):
        completions = engine.generate(PROMPTS, dataclasses.replace(params, seed=step))
        samples = [
            Sample(
                prompt=Prompt(id=str(i // 8), text="?"),
                group=i // 8,
                inputs=PromptInputs(tuple(PROMPTS[i // 8])),
                completion=c,
                score=Score(reward),
            )
            for i, c in enumerate(completions)
            for reward in [float(sum(c.token_ids) % 2)]
        ]
        metrics = trainer.step(samples, step).metrics
        found.append(metrics["mismatch/k3_kl"])
        warnings += [text for text in watch.see(metrics) if "nats apart" in text]
        for name in fp8 if stale else ():
            operand[name].copy_(kept[name])
    return found, warnings


def test_a_sampler_with_a_stale_layer_is_warned_of() -> None:
    healthy, quiet = mismatches(stale=False)
    apart, warnings = mismatches(stale=True)
    assert quiet == []
    assert max(apart) > 10 * max(healthy)
    (text,) = warnings
    assert "stale or wrong weights" in text
