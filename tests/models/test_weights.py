"""Quantized weights stay where they are, and no weight is left out of the register."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

from jetrl.errors import UserError
from jetrl.models.attention import PackedKeyValues
from jetrl.models.families import ModelConfig
from jetrl.models.policy import Policy
from jetrl.models.tiny import random_weights
from jetrl.precision import PrecisionPlan, quantize
from jetrl.precision.linear import Linear
from jetrl.precision.plan import Rounding
from jetrl.precision.quantized_weight import FP8Weight, QuantizedWeight

CONFIG = ModelConfig.from_hf(
    {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 128,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
)
PRESETS = ["unified", "jet", "mixed", "bf16", "fp32"]


def policy(preset: str = "unified", **more: torch.Tensor) -> Policy:
    return Policy(CONFIG, PrecisionPlan.preset(preset), random_weights(CONFIG, 0) | more)


def quantized(p: Policy) -> list[QuantizedWeight]:
    return [module.quantized for module in p.decoder.modules() if hasattr(module, "quantized")]


@pytest.mark.parametrize("preset", PRESETS)
def test_requantize_overwrites_in_place(preset: str) -> None:
    """With the bits of a model that is made of the new master weights."""
    p = policy(preset)
    tensors = [tensor for weight in quantized(p) for tensor in weight.tensors()]
    addresses = [tensor.data_ptr() for tensor in tensors]
    with torch.no_grad():
        for master in p.master_weights().values():
            master.mul_(-1.5)
    p.requantize()
    after = [tensor for weight in quantized(p) for tensor in weight.tensors()]
    assert [tensor.data_ptr() for tensor in after] == addresses
    fresh = Policy(CONFIG, p.plan, p.master_weights())
    expected = [tensor for weight in quantized(fresh) for tensor in weight.tensors()]
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(tensors, expected, strict=True))


def test_a_layer_that_moves_its_weight_is_an_error() -> None:
    p = policy()
    weight = p.decoder.layers[1].o.quantized

    def made_again() -> None:
        codes = quantize(weight.master.detach(), (128, 128))
        weight._stored[Rounding("fp8")] = FP8Weight(codes)

    p.requantize()
    weight.requantize = made_again
    with pytest.raises(RuntimeError, match=r"quantized weight of layers\.1\.o has moved"):
        p.requantize()


def test_a_weight_that_no_layer_reads_is_an_error() -> None:
    with pytest.raises(AssertionError, match=r"no layer reads .*layers\.1\.router\.weight"):
        policy(**{"layers.1.router.weight": torch.zeros(8, 128)})


def test_two_layers_of_one_name_are_an_error() -> None:
    p = policy()
    formats = p.plan.linear_formats(0, 2)
    with pytest.raises(AssertionError, match="two layers are called embed"):
        p.weights.quantized("embed", "embed.weight", formats)


@pytest.mark.parametrize("side", ["rollout", "train"])
def test_every_product_has_one_place_where_more_is_added(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, seen = policy(), []
    add_to = Linear.add_to
    monkeypatch.setattr(
        Linear, "add_to", lambda layer, y, x: seen.append(layer.name) or add_to(layer, y, x)
    )
    if side == "train":
        p.logprobs([[1, 2, 3]])
    else:
        kv = PackedKeyValues(torch.tensor([0, 3]), p.plan)
        p.rollout_logits(p.rollout_forward(torch.tensor([1, 2, 3]), torch.arange(3), kv))
    layers = [f"layers.{i}.{name}" for i in range(2) for name in ("qkv", "o", "gate_up", "down")]
    assert seen == [*layers, "lm_head"]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_base_is_trained_around(preset: str) -> None:
    """Weights that are not trained serve both sides, and have neither masters nor gradients."""
    whole = policy(preset)
    around = Policy(
        CONFIG, whole.plan, random_weights(CONFIG, 0), trains=lambda name: "norm" in name
    )
    assert all("norm" in name for name in around.master_weights())
    sequences = [[1, 2, 3, 4, 5], [6, 7]]
    for one in (whole, around):
        torch.cat(one.logprobs(sequences)).sum().backward()
    for name, master in around.master_weights().items():
        assert torch.equal(master.grad, whole.master_weights()[name].grad), name
    kept = [w for w in quantized(around) if w.fixed]
    assert len(kept) == 9
    assert all(w.master.grad is None for w in kept)
    tensors = around.weights.quantized_tensors()
    assert tensors.keys() == whole.weights.quantized_tensors().keys()
    if preset != "fp32":
        assert all(w.master.untyped_storage().nbytes() <= 4 for w in kept)
    with torch.no_grad():
        around.master_weights()["norm.weight"].mul_(2.0)
    around.requantize()
    assert torch.equal(around.decoder.norm.rounded.float(), around.master_weights()["norm.weight"])
    with pytest.raises(AssertionError, match="fixed weight"):
        kept[0].requantize()


def test_a_base_is_read_one_tensor_at_a_time() -> None:
    """A weight that is not trained is dropped before the next one is read."""
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    class Counted(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            nonlocal most
            tensor = super().__getitem__(name).clone()
            alive.append(weakref.ref(tensor))
            most = max(most, sum(ref() is not None and ref().dim() > 1 for ref in alive))
            return tensor

    weights = Counted(random_weights(CONFIG, 0))
    Policy(CONFIG, PrecisionPlan.preset("unified"), weights, trains=lambda name: False)
    assert most <= 2
    assert len(alive) >= len(weights)


def nvfp4_policy(trains: Callable[[str], bool] | None, **changes: torch.Tensor) -> Policy:
    plan = PrecisionPlan.preset("unified").replace(base="nvfp4")
    return Policy(CONFIG, plan, {**random_weights(CONFIG, 0), **changes}, trains=trains)


def test_a_base_in_nvfp4_takes_at_most_57_hundredths_of_one_in_fp8() -> None:
    def linear_bytes(p: Policy) -> int:
        tensors = p.weights.quantized_tensors().items()
        return sum(t.nbytes for name, t in tensors if "layers" in name and "norm" not in name)

    nvfp4 = nvfp4_policy(lambda name: False)
    fp8 = Policy(
        CONFIG,
        PrecisionPlan.preset("unified"),
        random_weights(CONFIG, 0),
        trains=lambda name: False,
    )
    assert linear_bytes(nvfp4) <= 0.57 * linear_bytes(fp8)


def test_what_nvfp4_cannot_keep_is_refused_by_the_layers_name() -> None:
    with pytest.raises(UserError, match=r"layers\.0\.qkv: precision.base=nvfp4.*adapter\.kind"):
        nvfp4_policy(None)
    bad = random_weights(CONFIG, 0)["layers.1.o.weight"].clone()
    bad[3, 4] = torch.inf
    with pytest.raises(UserError, match=r"layers\.1\.o: the weight has values that are NaN or Inf"):
        nvfp4_policy(lambda name: False, **{"layers.1.o.weight": bad})
