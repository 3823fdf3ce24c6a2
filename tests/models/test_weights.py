"""Quantized weights stay where they are; what is not trained is read and kept once."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from tests.models.stored_weights import our_config
from torch import nn

from jetrl.errors import UserError
from jetrl.models import hf
from jetrl.models.decoder import embed
from jetrl.models.policy import Policy
from jetrl.models.scalar_model import ScalarModel
from jetrl.models.source import ModelSource
from jetrl.models.tiny import RandomWeights, make_tiny
from jetrl.models.weights import Weights
from jetrl.precision import PrecisionPlan, quantize
from jetrl.precision.formats import FP8, Rounding
from jetrl.precision.gradients import Gradients
from jetrl.precision.quantized_weight import QuantizedWeight

CONFIG = our_config(
    "qwen2", tied=True, vocab_size=128, hidden_size=128, intermediate_size=256, head_dim=64
)
PRESETS = ["unified", "jet", "int8", "mixed", "bf16", "fp32"]


def policy(preset: str = "unified") -> Policy:
    return Policy(ModelSource.from_seed(CONFIG, 0), PrecisionPlan.preset(preset))


def quantized(p: Policy) -> list[QuantizedWeight]:
    return [module.quantized for module in p.decoder.modules() if hasattr(module, "quantized")]


@pytest.mark.parametrize("preset", PRESETS)
def test_requantize_overwrites_in_place(preset: str) -> None:
    p = policy(preset)
    tensors = [tensor for weight in quantized(p) for tensor in weight.tensors()]
    addresses = [tensor.data_ptr() for tensor in tensors]
    with torch.no_grad():
        for master in p.master_weights().values():
            master.mul_(-1.5)
    p.requantize()
    after = [tensor for weight in quantized(p) for tensor in weight.tensors()]
    assert [tensor.data_ptr() for tensor in after] == addresses
    fresh = Policy(ModelSource.from_tensors(CONFIG, p.master_weights()), p.plan)
    expected = [tensor for weight in quantized(fresh) for tensor in weight.tensors()]
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(tensors, expected, strict=True))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_base_is_trained_around(preset: str) -> None:
    whole = policy(preset)
    source = ModelSource.from_seed(CONFIG, 0)
    around = Policy(source, whole.plan, trains=lambda name: "norm" in name)
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
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    class Counted(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            nonlocal most
            tensor = super().__getitem__(name).clone()
            alive.append(weakref.ref(tensor))
            most = max(most, sum(ref() is not None and ref().dim() > 1 for ref in alive))
            return tensor

    weights = Counted(dict(RandomWeights(CONFIG, 0)))
    plan = PrecisionPlan.preset("unified")
    Policy(ModelSource.from_tensors(CONFIG, weights), plan, trains=lambda name: False)
    assert most <= 2
    assert len(alive) >= len(weights)


def embed_of(token_ids: torch.Tensor, master: nn.Parameter) -> torch.Tensor:
    """Return BF16 rows of a master weight."""
    plan = PrecisionPlan.preset("bf16").replace(bf16_rounding="nearest")
    formats = plan.linear_formats(0, 1)
    roundings = {side: plan.rounding(side, format) for side, format in formats.items()}
    weight = QuantizedWeight("embed", master, formats, roundings)
    return embed(token_ids, weight, Gradients())


def test_embedded_rows_and_gradients_are_those_of_torch() -> None:
    g = torch.Generator().manual_seed(0)
    ours, theirs = (nn.Parameter(torch.randn(50, 8, generator=g)) for _ in "ab")
    theirs.data.copy_(ours.data)
    for _ in range(2):  # the second time there is a gradient to add to
        token_ids = torch.randint(0, 20, (64,), generator=g)
        upstream = torch.randn(64, 8, generator=g).bfloat16()
        rows = embed_of(token_ids, ours)
        expected = nn.functional.embedding(token_ids, theirs).bfloat16()
        assert torch.equal(rows, expected)
        rows.backward(upstream)
        expected.backward(upstream)
    assert ours.grad is not None
    # At most 2 * 64 terms of a token are added in another order: 128 roundings of 2**-24 each.
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=128 * 2**-24, atol=128 * 2**-24 * 8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_a_gpu_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = make_tiny(tmp_path / "model")
    plan = PrecisionPlan.preset("unified")
    config = hf.read_config(path)
    for make in (
        lambda: Policy.from_config(config, plan, device="cuda"),
        lambda: Policy.from_pretrained(path, plan, "cuda"),
        lambda: Policy.from_pretrained(path, plan, "cuda", frozen=True),
        lambda: ScalarModel.from_language_model(path, plan, "cuda"),
    ):
        with pytest.raises(UserError, match=r"device cuda: not there; use run\.device=cpu"):
            make()


@pytest.mark.parametrize("preset, drawn_on", [("integer", "cpu"), ("int8", "cuda")])
def test_random_weights_of_a_defined_plan_are_drawn_on_a_cpu(preset: str, drawn_on: str) -> None:
    class AskedError(Exception):
        pass

    def weights(device: torch.device) -> RandomWeights:
        raise AskedError(device.type)

    source = ModelSource(our_config(), weights)
    with pytest.raises(AskedError, match=drawn_on):
        Weights(source, PrecisionPlan.preset(preset), torch.device("cuda"))


def test_a_layer_that_moves_its_weight_is_an_error() -> None:
    p = policy()
    weight = p.decoder.layers[1].mixer.o.quantized
    weight.requantize = lambda: weight._stored.update(
        {Rounding(FP8): quantize(weight.master.detach(), (128, 128))}
    )
    with pytest.raises(AssertionError, match=r"quantized weight of layers\.1\.o has moved"):
        p.requantize()
