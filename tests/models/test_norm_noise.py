"""Noise on norms: its schedule, its bits, and that both sides and resumed runs see the same."""

from __future__ import annotations

import pytest
import torch
from benchmarks.shapes import SHAPES

from jetrl import Policy
from jetrl.models.norm_noise import NormNoise, noise_sigma
from jetrl.precision import PrecisionPlan
from jetrl.settings.sections import Settings

CONFIG = {**SHAPES["tiny"], "hidden_size": 128, "intermediate_size": 128, "vocab_size": 96}


def noise_of(p: Policy, seed: int) -> NormNoise:
    adapter = {"kind": "lora", "noise_start": 0.1, "noise_end": 0.01, "noise_stages": 3}
    sections = {"adapter": adapter, "loop": {"steps": 8}, "run": {"seed": seed}}
    return NormNoise(p, Settings.model_validate(sections))


def policy() -> Policy:
    return Policy.from_config(CONFIG, PrecisionPlan.preset("unified"), seed=0)


def norms(p: Policy) -> dict[str, torch.Tensor]:
    tensors = p.weights.quantized_tensors().items()
    return {name: tensor.clone() for name, tensor in tensors if "norm" in name}


def test_sigma_falls_from_stage_to_stage_after_a_part_without_noise() -> None:
    sigmas = [noise_sigma(0.1, 0.01, 3, 8, step) for step in range(1, 9)]
    middle = (0.1 * 0.01) ** 0.5
    assert sigmas == pytest.approx([0, 0, 0.1, 0.1, middle, middle, 0.01, 0.01])


def test_noise_is_a_function_of_seed_step_and_layer() -> None:
    first, again, other = policy(), policy(), policy()
    clean = norms(first)
    noise_of(first, 7).begin_step(3)
    noise = noise_of(again, 7)
    noise.begin_step(5)
    assert noise.begin_step(3) == {"noise/sigma": 0.1}
    noise_of(other, 8).begin_step(3)
    seen = []
    for name, tensor in norms(first).items():
        noisy = name.removesuffix(".0").endswith(("input_norm", "post_norm"))
        assert torch.equal(tensor, clean[name]) != noisy, name
        assert torch.equal(tensor, norms(again)[name])
        if noisy:
            assert not torch.equal(tensor, norms(other)[name])
            seen.append(tensor - clean[name])
    assert len(seen) == 4
    assert not torch.equal(seen[0], seen[1])
    assert float(torch.cat(seen).float().std()) == pytest.approx(0.1, rel=0.2)


def test_noise_stays_for_a_step_and_leaves_no_trace() -> None:
    p = policy()
    clean, addresses = norms(p), [t.data_ptr() for t in p.weights.quantized_tensors().values()]
    masters = {name: master.detach().clone() for name, master in p.master_weights().items()}
    noise = noise_of(p, 7)
    noise.begin_step(3)
    noisy = norms(p)
    p.requantize()  # as after an update
    assert all(torch.equal(tensor, noisy[name]) for name, tensor in norms(p).items())
    with noise.off():
        assert all(torch.equal(tensor, clean[name]) for name, tensor in norms(p).items())
    assert all(torch.equal(tensor, noisy[name]) for name, tensor in norms(p).items())
    assert all(torch.equal(m, masters[name]) for name, m in p.master_weights().items())
    noise.begin_step(1)
    assert all(torch.equal(tensor, clean[name]) for name, tensor in norms(p).items())
    assert addresses == [t.data_ptr() for t in p.weights.quantized_tensors().values()]
