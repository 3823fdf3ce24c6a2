"""Activations saved as codes: their values, the gradients at these, runs, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.policies import make_policy
from benchmarks.shapes import SHAPES
from tests.e2e.small import SMALL, trained, without_last_checkpoint
from tests.kernels.bits import different, random
from torch import Tensor

from jetrl import Policy
from jetrl.errors import UserError
from jetrl.kernels.attention.reference import attend_packed
from jetrl.kernels.swiglu import swiglu, swiglu_ref
from jetrl.models.attention import PackedKeyValues
from jetrl.models.dense import DenseBlock
from jetrl.models.layer import Rotary
from jetrl.models.packed import ForwardInputs
from jetrl.precision import PrecisionPlan
from jetrl.precision.gemm import coded_matmul
from jetrl.precision.linear import dgrad, quantize_for_wgrad, quantize_output_gradient
from jetrl.precision.saved import gradient_at_codes, saved_codes, saved_values


def values_of(x: np.ndarray) -> np.ndarray:
    """The values of a group's codes by NumPy, before they are rounded to BF16."""
    x = x.astype(np.float32)
    largest = np.maximum(np.abs(x).max(), np.float32(2.0**-100))
    codes = np.rint(x * (np.float32(127.0) / largest)).clip(-127, 127)
    return codes.astype(np.int8) * (largest / np.float32(127.0))


@pytest.mark.parametrize("width", [64, 128, 320])
def test_values_are_those_of_groups_of_128_codes(width: int) -> None:
    x = (random(5, width) * random(5, width, seed=1).exp2()).bfloat16()
    x[1, 3], x[2] = 3e4, 0.0
    saved = saved_codes(x)
    assert saved.dtype == torch.int8
    assert saved.shape == (5, width + 4 * -(-width // 128))
    for row, found in zip(x.float().numpy(), saved_values(saved), strict=True):
        groups = [values_of(row[start : start + 128]) for start in range(0, width, 128)]
        assert different(found, torch.from_numpy(np.concatenate(groups)).bfloat16()) == 0
    x[3, 0] = torch.nan
    spoiled = saved_values(saved_codes(x))
    assert spoiled[3, :128].isnan().all()
    assert different(spoiled[3, 128:], saved_values(saved)[3, 128:]) == 0


def test_a_gradient_is_that_at_the_values_of_codes() -> None:
    x = random(3, 128).bfloat16().requires_grad_()
    weight = random(128, seed=2).requires_grad_()
    y = gradient_at_codes(lambda x: (x.float().square() * weight).sum(-1), x, torch.arange(3.0))
    assert y.tolist() == [0.0, 1.0, 2.0]
    y.sum().backward()
    again = saved_values(saved_codes(x.detach())).float()
    assert not torch.equal(again, x.float())
    assert torch.equal(x.grad, (2 * again * weight.detach()).bfloat16())
    assert torch.equal(weight.grad, again.square().sum(0))


def policy(saved: str, **options: Any) -> Policy:
    plan = PrecisionPlan.preset("int8").replace(saved=saved, **options)
    return Policy.from_config(SHAPES["tiny"], plan=plan, seed=0)


def test_the_block_reads_gate_and_up_from_codes() -> None:
    """Both products' WGrad and SwiGLU's gradient, by the operations of a layer without codes."""
    block: Any = policy("int8").decoder.layer(0).block
    assert isinstance(block, DenseBlock)
    block.gate_up.gradients.begin_micro_batch([96])
    x, delta, dy = (random(96, 256, seed=seed).bfloat16() for seed in range(3))
    leaves = [t.requires_grad_() for t in (x, delta)]
    _, y = block(*leaves, "train", None)
    y.backward(dy)
    plan, down, gate_up = block.down.plan, block.down, block.gate_up
    with torch.no_grad():
        normed = block.norm(x + delta)
        gates = gate_up(normed, "train")
        again = saved_values(saved_codes(gates))
        rows, tokens = quantize_output_gradient(dy, down.operand("train"), plan)
    leaf = again.clone().requires_grad_()
    swiglu(leaf).backward(dgrad(rows, down.operand("train")))
    gated = quantize_for_wgrad(swiglu_ref(again), plan)
    expected = coded_matmul(tokens.mT, gated.mT).float()
    assert different(down.weight.grad, expected) == 0
    _, tokens = quantize_output_gradient(leaf.grad, gate_up.operand("train"), plan)
    expected = coded_matmul(tokens.mT, quantize_for_wgrad(normed, plan).mT).float()
    assert different(gate_up.weight.grad, expected) == 0


def test_attention_reads_queries_and_norms_their_inputs_from_codes() -> None:
    p, ends = policy("int8"), torch.tensor([0, 40, 96])
    mixer: Any = p.decoder.layer(0).mixer
    plain = Rotary(
        torch.arange(96) % 60, p.decoder.rotary_table, (mixer.q_norm, mixer.k_norm), 2, 1
    )
    qkv, do = random(96, 512).bfloat16(), random(96, 256, seed=1).bfloat16()
    leaf = qkv.clone().requires_grad_()
    rope = replace(plain, saves_codes=True)
    out = PackedKeyValues(ends, p.plan).attend(0, leaf, rope, last=False)
    out.backward(do)
    weights = [norm.weight.grad.clone() for norm in plain.norms]
    with torch.no_grad():
        q, k, v = plain.heads(qkv)
    again = saved_values(saved_codes(q.flatten(1))).view(q.shape)
    leaves = [x.clone().requires_grad_() for x in (again, k, v)]
    attend_packed(*leaves, ends, p.plan.kv).backward(do.view(q.shape))
    before = saved_values(saved_codes(plain.before_norms(qkv)))
    given = torch.cat([before, v.flatten(1)], 1).requires_grad_()
    mixer.q_norm.weight.grad = mixer.k_norm.weight.grad = None
    torch.autograd.backward(plain.heads(given), [x.grad for x in leaves])
    assert different(leaf.grad, given.grad) == 0
    assert not any(map(different, weights, [norm.weight.grad for norm in plain.norms]))
    expected = PackedKeyValues(ends, p.plan).attend(0, qkv, plain, last=False)
    assert different(out.detach(), expected.detach()) == 0


def results(p: Policy, recomputed: bool = False) -> dict[str, Tensor]:
    """Log-probs of two sequences, and the gradients of their mean."""
    ends, ids = torch.tensor([0, 70, 110]), torch.arange(110) * 7 % 256
    inputs, targets = ForwardInputs.packed(ids, ends), torch.arange(1, 110)
    logprobs, _ = p.train_logprobs(inputs, ends, targets, 1.0, recomputed)
    logprobs.mean().backward()
    gradients = {name: master.grad for name, master in p.master_weights().items()}
    return {"logprobs": logprobs.detach(), **{n: g for n, g in gradients.items() if g is not None}}


@pytest.mark.parametrize("options", [{}, {"grad_output": "int8"}, {"grad_output": "bf16"}], ids=str)
def test_only_gradients_change_and_recomputed_layers_have_the_same(options: Any) -> None:
    off, on = results(policy("off", **options)), results(policy("int8", **options))
    assert different(off["logprobs"], on["logprobs"]) == 0
    again = results(policy("int8", **options), recomputed=True)
    assert {name for name in on if different(on[name], again[name])} == set()
    changed = {name for name in on if different(off[name], on[name])}
    assert changed == off.keys() - {"logprobs", "norm.weight", "lm_head.weight"}
    for name in changed:  # an error of E4M3 is a few percent of a value, of codes less than one
        assert (off[name] - on[name]).norm() < 0.1 * off[name].norm(), name


def test_gradients_of_adapters_change_as_little() -> None:
    off, on, again = (
        results(make_policy("tiny", f"int8 saved={saved}", "cpu", 2, adapter_rank=4), recomputed)
        for saved, recomputed in (("off", False), ("int8", False), ("int8", True))
    )
    assert different(off["logprobs"], on["logprobs"]) == 0
    assert len(off) > 8
    for name in off.keys() - {"logprobs"}:
        assert different(on[name], again[name]) == 0, name
        assert different(off[name], on[name]), name
        assert (off[name] - on[name]).norm() < 0.1 * off[name].norm(), name


STEPS = ["sft.steps=2", "checkpoint.every=1", "loop.steps=2", "precision.saved=int8"]


def test_a_resumed_run_has_the_digest_of_an_uncut_one(tmp_path: Path) -> None:
    run = partial(trained, [*SMALL, *STEPS], tmp_path)
    first = run("first")
    without_last_checkpoint(first.run_path, tmp_path / "cut")
    assert run("cut", resume=True).digest == first.digest
    assert run("off", "precision.saved=off").digest != first.digest


@pytest.mark.parametrize(
    "preset, options, why",
    [
        ("bf16", {}, "8-bit linear layers"),
        ("fp32", {}, "8-bit linear layers"),
        ("mixed", {}, "8-bit linear layers"),
        ("integer", {}, "queries in BF16"),
        ("int8", {"first_layers_bf16": 1}, "plans without first_layers_bf16"),
    ],
)
def test_other_plans_are_refused(preset: str, options: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        PrecisionPlan.preset(preset).replace(saved="int8", **options)


def test_a_layer_with_experts_is_refused_by_name() -> None:
    plan = PrecisionPlan.preset("int8").replace(saved="int8")
    assert PrecisionPlan.from_dict(plan.to_dict()) == plan
    assert "saved" not in PrecisionPlan.preset("int8").to_dict()
    with pytest.raises(UserError, match=r"precision\.saved.*layer 0 of \w+ is Qwen3Experts"):
        Policy.from_config(SHAPES["tiny-experts"], plan=plan)
    # The attention of this family does not save codes either, but experts are the reason to give.
    olmoe = SHAPES["olmoe-1b-7b"] | {"num_hidden_layers": 1}
    with pytest.raises(UserError, match=r"precision\.saved.*layer 0 of \w+ is OlmoeExperts"):
        Policy.from_config(olmoe, plan=plan)
