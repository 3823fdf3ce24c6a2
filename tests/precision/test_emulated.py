"""The plan nvfp4: its products and its switches. Both emulated plans: whole runs and refusals."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.policies import make_policy
from benchmarks.shapes import SHAPES
from tests.e2e.small import SMALL, trained, without_last_checkpoint
from tests.kernels.bits import different, random
from tests.precision.numpy_blocks import by_numpy
from torch import Tensor, nn

from jetrl import Policy, load_config
from jetrl.errors import UserError
from jetrl.models.packed import ForwardInputs
from jetrl.precision import PrecisionPlan
from jetrl.precision.block_formats import (
    NVFP4_ROWS,
    NVFP4_SQUARES,
    block_rotation,
    quantize_blocks,
    uniform_draws,
)
from jetrl.precision.exact import exact_matmul
from jetrl.precision.plan import plan_table
from jetrl.session.parity import measure
from jetrl.training.sft import SftTrainer
from jetrl.types import Example

NVFP4 = PrecisionPlan.preset("nvfp4").replace(first_layers_bf16=0, last_layers_bf16=0)
FP4 = PrecisionPlan.preset("fp4")
BOTH = pytest.mark.parametrize("plan", [NVFP4, FP4], ids=lambda plan: plan.name)
SWITCHES = {"wgrad_hadamard": False, "stochastic_rounding": False, "weight_block": "1x16"}
KEY = (5, "sft", 2, 1)


def policy(plan: PrecisionPlan = NVFP4, **options: Any) -> Policy:
    return Policy.from_config(SHAPES["tiny"], plan=plan.replace(**options), seed=0)


def by_draws(x: Tensor, key: tuple[int | str, ...]) -> Tensor:
    draws = uniform_draws(key, range(len(x)), x.shape[1], x.device)
    return quantize_blocks(x, NVFP4_ROWS, draws).values


@pytest.mark.parametrize("options", [{}, *({k: v} for k, v in SWITCHES.items())], ids=str)
def test_products_are_those_of_the_operands_that_numpy_rounds(options: Any) -> None:
    p, tokens = policy(**options), 41
    p.weights.gradients.draws = KEY
    linear: Any = p.decoder.layer(1).block.down
    x = random(tokens, 512).bfloat16().requires_grad_()
    dy = random(tokens, 256, seed=1).mul(0.01).bfloat16()
    y = linear(x, "train")
    y.backward(dy)
    masters = [master is linear.weight for master, _ in p.weights.gradients.expected]
    number = masters.index(True)
    is_square = "weight_block" not in options
    w = by_numpy(linear.weight.detach(), NVFP4_SQUARES if is_square else NVFP4_ROWS)
    values = x.detach()
    expected = exact_matmul(by_numpy(values, NVFP4_ROWS), w.mT).float().bfloat16()
    assert different(y.detach(), expected) == 0
    draws = "stochastic_rounding" not in options
    rows = by_draws(dy, (*KEY, number, "dgrad")) if draws else by_numpy(dy, NVFP4_ROWS)
    turned = w if is_square else by_numpy(w.mT, NVFP4_ROWS).mT
    assert different(x.grad, exact_matmul(rows, turned).float().bfloat16()) == 0
    along = [nn.functional.pad(t, (0, 0, 0, 7)).mT for t in (dy, values)]
    if "wgrad_hadamard" not in options:
        along = [block_rotation(t) for t in along]
    of_dy = by_draws(along[0], (*KEY, number, "wgrad")) if draws else by_numpy(along[0], NVFP4_ROWS)
    expected = exact_matmul(of_dy, by_numpy(along[1], NVFP4_ROWS).mT).float()
    assert different(linear.weight.grad, expected) == 0


def results(p: Policy, recomputed: bool = False) -> dict[str, Tensor]:
    """Log-probs of two sequences, and the gradients of their mean."""
    ends, ids = torch.tensor([0, 70, 110]), torch.arange(110) * 7 % 256
    inputs, targets = ForwardInputs.packed(ids, ends), torch.arange(1, 110)
    p.weights.gradients.begin_update()
    logprobs, _ = p.train_logprobs(inputs, ends, targets, 1.0, recomputed)
    logprobs.mean().backward()
    p.weights.gradients.end_update()
    gradients = {name: master.grad for name, master in p.master_weights().items()}
    return {"logprobs": logprobs.detach(), **{n: g for n, g in gradients.items() if g is not None}}


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_changes_what_it_says(switch: str) -> None:
    on, again = results(policy()), results(policy(), recomputed=True)
    assert not any(different(on[name], again[name]) for name in on)
    off = results(policy(**{switch: SWITCHES[switch]}))
    assert (different(on["logprobs"], off["logprobs"]) > 0) == (switch == "weight_block")
    changed = {name for name in on if different(on[name], off[name])}
    weights = {name for name in on if name.endswith(("qkv.weight", "down.weight"))}
    assert len(weights) == 4
    assert weights <= changed
    if switch == "wgrad_hadamard":  # only the gradients of linear layers' own weights
        linears = ("qkv.weight", "o.weight", "gate_up.weight", "down.weight")
        assert all(name.endswith(linears) for name in changed)


def test_gradients_are_near_those_of_bf16_and_no_draws_repeat() -> None:
    bf16, name = results(policy(PrecisionPlan.preset("bf16"))), "layers.1.down.weight"
    found = []
    for number in range(2):
        p = policy()
        p.weights.gradients.draws = (*KEY[:-1], number)
        found.append(results(p)[name])
    assert different(found[0], found[1]) > 0
    for gradient in found:
        cosine = nn.functional.cosine_similarity(gradient.flatten(), bf16[name].flatten(), dim=0)
        assert 0.85 < cosine < 0.99


@BOTH
def test_layers_stay_in_bf16_and_sampler_and_trainer_agree(
    plan: PrecisionPlan, tmp_path: Path
) -> None:
    p = policy(plan, first_layers_bf16=1)
    bf16 = policy(PrecisionPlan.preset("bf16").replace(bf16_rounding="nearest"))
    for layer, same in ((0, True), (1, False)):
        ours, theirs = (x.weights.quantized_tensors()[f"layers.{layer}.down.0"] for x in (p, bf16))
        assert (different(ours, theirs) == 0) == same
    found = measure(p, num_prompts=4, samples=2, max_tokens=12)
    assert (found.tokens, found.different) == (96, 0)
    p.save_pretrained(tmp_path, dtype="float32")
    again = Policy.from_pretrained(tmp_path, p.plan)
    assert different(again.logprobs([[1, 2, 3]])[0], p.logprobs([[1, 2, 3]])[0]) == 0


def test_every_micro_batch_of_every_update_has_draws_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["run.seed=7", "sft.steps=2", "train.tokens_per_micro_batch=64"]
    p, seen, settings = policy(), [], load_config("demo", words)
    begin, gradients = p.weights.gradients.begin_micro_batch, p.weights.gradients
    monkeypatch.setattr(
        gradients, "begin_micro_batch", lambda *given: (seen.append(gradients.draws), begin(*given))
    )
    trainer = SftTrainer(p, settings)
    for _ in range(2):
        trainer.step([Example(tuple(range(20)), tuple(range(30)))] * 2)
    assert seen == [(7, "sft", update, number) for update in range(2) for number in range(2)]


STEPS = ["sft.steps=2", "checkpoint.every=1", "loop.steps=2"]
STEPS += ["precision.first_layers_bf16=0", "precision.last_layers_bf16=0"]


@pytest.mark.parametrize(
    "preset, switched",
    [("nvfp4", "stochastic_rounding=false"), ("fp4", "gradient_estimator=false")],
)
def test_a_resumed_run_has_the_digest_of_an_uncut_one(
    preset: str, switched: str, tmp_path: Path
) -> None:
    run = partial(trained, [*SMALL, *STEPS, f"precision.preset={preset}"], tmp_path)
    first = run("first")
    without_last_checkpoint(first.run_path, tmp_path / "cut")
    assert run("cut", resume=True).digest == first.digest
    assert run("other", f"precision.{switched}").digest != first.digest


def test_the_plan_says_that_it_is_emulated_and_comes_back() -> None:
    plan = PrecisionPlan.preset("nvfp4")
    assert plan.exact
    rows = dict(plan_table(plan))
    assert "emulated by BF16 products" in rows["rollout linears"]
    assert "rotated along tokens; output gradients rounded" in rows["training linears"]
    assert "no kernels" in rows["speed"]
    for changed in (plan, plan.replace(**SWITCHES)):
        assert PrecisionPlan.from_dict(changed.to_dict()) == changed
    assert not PrecisionPlan.preset("int8").to_dict().keys() & SWITCHES.keys()
    assert FP4.exact
    rows = dict(plan_table(FP4))
    assert "quantile 0.99, outliers compensated in BF16" in rows["rollout linears"]
    assert "weight gradients by a smooth quantizer" in rows["training linears"]
    assert "no kernels" in rows["speed"]
    off = FP4.replace(gradient_estimator=False, outlier_quantile=1.0, outlier_compensation=False)
    for changed in (FP4, off):
        assert PrecisionPlan.from_dict(changed.to_dict()) == changed
    assert "smooth" not in dict(plan_table(off))["training linears"]
    assert "quantile" not in dict(plan_table(off))["rollout linears"]


@pytest.mark.parametrize(
    "preset, options, why",
    [
        ("int8", {"wgrad_hadamard": True}, r"precision\.wgrad_hadamard.*precision\.preset = nvfp4"),
        ("bf16", {"weight_block": "1x16"}, r"precision\.weight_block = 1x16.*NVFP4"),
        ("unified", {"stochastic_rounding": True}, r"stochastic_rounding.*NVFP4"),
        ("nvfp4", {"saved": "int8"}, r"precision\.saved.*8-bit linear layers.*NVFP4"),
        ("nvfp4", {"base": "nvfp4"}, r"precision\.base = nvfp4.*unified or jet"),
        ("nvfp4", {"grad_output": "int8"}, r"grad_output = int8 needs precision\.preset = int8"),
        ("nvfp4", {"lm_head": "int8x2"}, "lm_head"),
        ("nvfp4", {"train_linear": "bf16"}, "emulated formats are for both sides.*nvfp4 or fp4"),
        ("nvfp4", {"train_linear": "fp4-emulated"}, "emulated formats are for both sides"),
        ("nvfp4", {"outlier_quantile": 0.9}, r"outlier_quantile = 0\.9 is for FP4.*preset = fp4"),
        ("fp4", {"weight_block": "1x16"}, r"weight_block = 1x16 is for NVFP4.*preset = nvfp4"),
        ("int8", {"gradient_estimator": True}, r"precision\.gradient_estimator.*FP4"),
        ("bf16", {"outlier_compensation": True}, r"precision\.outlier_compensation.*preset = fp4"),
        ("fp4", {"outlier_quantile": 0.5}, r"precision\.outlier_quantile.*greater than 0\.5"),
        ("fp4", {"saved": "int8"}, r"precision\.saved.*8-bit linear layers.*FP4"),
        ("fp4", {"base": "nvfp4"}, r"precision\.base = nvfp4.*unified or jet"),
        ("fp4", {"queries": "int8"}, r"precision\.kv = bf16.*int8"),
        *(
            (preset, option, rf"precision\.{name} = {value} is for FP8: leave it out")
            for preset in ("nvfp4", "fp4")
            for name, value in (
                ("grad_output", "e5m2"),
                ("grad_output", "bf16"),
                ("wgrad_input", "1x128"),
                ("scales", "pow2"),
            )
            for option in [{name: value}]
        ),
    ],
)
def test_other_plans_are_refused(preset: str, options: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        PrecisionPlan.preset(preset).replace(**options)


def test_models_are_refused_by_layer() -> None:
    with pytest.raises(UserError, match=r"first_layers_bf16 = 1 .* keep all 2 layers in BF16"):
        policy(PrecisionPlan.preset("nvfp4"))
    for plan in (NVFP4, FP4):
        of_experts = rf"in {plan.name.upper()} is not for experts.*precision\.preset=int8"
        with pytest.raises(UserError, match=of_experts):
            Policy.from_config(SHAPES["tiny-experts"], plan=plan)
        of_adapters = rf"layer layers\.0\.\w+: .*preset = {plan.name} is not for adapters"
        with pytest.raises(UserError, match=of_adapters + r".*precision\.base=nvfp4"):
            make_policy("tiny", f"{plan.name} first_layers_bf16=0", "cpu", 2, adapter_rank=4)
    odd = SHAPES["tiny"] | {"intermediate_size": 520}
    with pytest.raises(UserError, match=r"layers\.0\.down: NVFP4 .* 16.*precision\.preset=bf16"):
        Policy.from_config(odd, plan=NVFP4)
