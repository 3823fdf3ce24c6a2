"""The gradient of every weight of a whole model, against transformers' in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.shared import config
from torch import Tensor
from transformers import AutoModelForCausalLM

import jetrl.precision.linear as linear
from jetrl.models.families import stored_tensors
from jetrl.models.policy import Policy
from jetrl.precision import PrecisionPlan
from jetrl.training.micro_batches import batch_logprobs
from jetrl.training.packing import pack_examples
from jetrl.types import Example

# o and down are square: a transposed or a scaled WGrad of theirs has the right shape.
CONFIG = config(vocab_size=128, num_hidden_layers=2, initializer_range=0.1)
WITHIN, OF_VECTORS = 0.03, 0.1


def examples() -> list[Example]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 128, (8, 48), generator=generator).tolist()
    return [Example(row[:8], row[8:]) for row in tokens]


def weights_of_tokens() -> Tensor:
    return torch.randn(8 * 40, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def gradients(policy: Policy) -> dict[str, Tensor]:
    (batch,) = pack_examples(examples(), 10**6)
    policy.weights.gradients.begin_update()
    policy.weights.gradients.begin_micro_batch([batch.num_tokens], True)
    logprobs, _ = batch_logprobs(policy, batch)
    (logprobs * weights_of_tokens().float()).sum().backward()
    policy.weights.gradients.end_micro_batch(failed=False)
    policy.weights.gradients.end_update()
    return {name: master.grad.double() for name, master in policy.master_weights().items()}


def true_gradients(policy: Policy, folder: Path) -> dict[str, Tensor]:
    """Return the gradients of transformers' model in float64, by our names."""
    policy.save_pretrained(folder, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    rows = [[*e.prompt, *e.completion] for e in examples()]
    logits = model(torch.tensor(rows)).logits
    drawn = torch.log_softmax(logits[:, 7:-1], -1)
    logprobs = drawn.gather(2, torch.tensor(rows)[:, 8:, None]).flatten()
    (logprobs * weights_of_tokens()).sum().backward()
    theirs = {name: p.grad for name, p in model.named_parameters()}
    return {
        name: torch.cat([theirs[part.name] for part in parts])
        for name, parts in stored_tensors(policy.config).items()
    }


def norms(policy: Policy, true: dict[str, Tensor]) -> dict[str, float]:
    """Return the norm of each gradient over that of the true one."""
    return {name: float(g.norm() / true[name].norm()) for name, g in gradients(policy).items()}


@pytest.fixture(scope="module")
def true(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    policy = Policy.from_config(CONFIG, PrecisionPlan.preset("fp32"), seed=0)
    return true_gradients(policy, tmp_path_factory.mktemp("model") / "float32")


def differing(preset: str, true: dict[str, Tensor]) -> set[str]:
    """Return the weights whose gradient is too long or too short."""
    policy = Policy.from_config(CONFIG, PrecisionPlan.preset(preset), seed=0)
    found = norms(policy, true)
    assert found.keys() == true.keys()
    # A norm has 64 or 128 numbers, in which the noise of 8 bits does not average out.
    coded = policy.plan.train_linear in ("fp8", "int8")
    bounds = {n: OF_VECTORS if coded and t.dim() == 1 else WITHIN for n, t in true.items()}
    return {name for name, norm in found.items() if abs(norm - 1) > bounds[name]}


@pytest.mark.parametrize("preset", ["fp32", "bf16", "unified", "jet", "int8", "integer"])
def test_every_weight_has_a_gradient_of_the_right_size(
    preset: str, true: dict[str, Tensor]
) -> None:
    assert differing(preset, true) == set()


@pytest.mark.parametrize("preset", ["bf16", "unified", "int8", "integer"])
@pytest.mark.parametrize("name", ["layers.0.o.weight", "layers.1.down.weight"])
def test_a_smaller_wgrad_of_one_square_layer_is_seen(
    name: str, preset: str, true: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    wgrad, order = linear.wgrad, itertools.count(1)
    # Backward comes to the head, then to down, gate_up, o and qkv, the last layer first.
    target = {"layers.1.down.weight": 2, "layers.0.o.weight": 8}[name]
    target -= PrecisionPlan.preset(preset).defined  # whose head has products of its own

    def faulty(tokens: Any, x: Any, *rest: Any) -> Any:
        if next(order) == target:
            x = x * 0.9 if isinstance(x, Tensor) else replace(x, scales=x.scales * 0.9)
        return wgrad(tokens, x, *rest)

    monkeypatch.setattr(linear, "wgrad", faulty)
    assert differing(preset, true) == {name}


@pytest.mark.parametrize("preset", ["bf16", "unified", "int8"])
def test_a_smaller_dgrad_of_one_layer_is_seen(
    preset: str, true: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    dgrad, order = linear.dgrad, itertools.count(1)
    factors = {2: 0.9}  # of the last layer's down
    monkeypatch.setattr(linear, "dgrad", lambda *a: dgrad(*a) * factors.get(next(order), 1.0))
    assert "layers.1.gate_up.weight" in differing(preset, true)
