"""Calibrated clipping on ratios that are given, and in the trainer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jetrl.errors import UserError
from jetrl.models.policy import Policy
from jetrl.precision import PrecisionPlan
from jetrl.settings.loading import load_config
from jetrl.training.extras.calibration import ClipBounds, ClipCalibration, calibrated
from jetrl.training.micro_batches import MicroBatch, MicroBatchSize, Minibatch
from jetrl.training.objectives import Objective
from jetrl.training.packing import pack, with_advantages
from jetrl.training.trainer import Trainer
from jetrl.training.update import Accumulated
from jetrl.types import TokenFilter

REFERENCE = ClipBounds(0.8, 1.2)


def test_noise_lowers_the_lower_bound_to_cut_off_as_much_as_bf16() -> None:
    """Only then is the upper bound set, which keeps the balance of the two pushes."""
    rng = np.random.default_rng(0)
    log_ratio = rng.normal(0, 0.1, 4000)
    advantages = np.where(rng.random(4000) < 0.5, 1.0, -1.0)
    probabilities = rng.uniform(0.1, 1, 4000)
    fp8, bf16 = np.exp(log_ratio + rng.normal(0, 0.15, 4000)), np.exp(log_ratio)
    negative = advantages < 0
    wanted = (bf16[negative] <= 0.8).mean()
    assert (fp8[negative] <= 0.8).mean() > 3 * wanted, "the over-clipping that is to be mended"
    found = calibrated(fp8, bf16, advantages, probabilities, REFERENCE)
    assert found is not None
    step = (fp8[negative] <= found.low + 0.02).mean() - (fp8[negative] <= found.low).mean()
    assert abs((fp8[negative] <= found.low).mean() - wanted) <= step
    assert found.low < 0.76

    def balance(ratios: np.ndarray, low: float, high: float) -> float:
        terms = probabilities * ratios * advantages
        up = terms[(advantages > 0) & (ratios < high)].sum()
        return abs(up / terms[(advantages < 0) & (ratios > low)].sum())

    target = balance(bf16, 0.8, 1.2)
    gap = abs(balance(fp8, found.low, found.high) - target)
    for other in (found.high - 0.02, found.high + 0.02):
        if 1.2 <= other <= 2.0:
            assert gap <= abs(balance(fp8, found.low, other) - target) + 1e-12


def make_policy() -> Policy:
    config = load_config("demo").model.config
    assert isinstance(config, dict)
    return Policy.from_config(config | {"num_hidden_layers": 1}, PrecisionPlan.preset("unified"))


def draw(policy: Policy, sample, count: int) -> list:
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 128, 8).tolist() for _ in range(count)]
    return [
        sample(i // 4, s[:3], s[3:], float(i % 4 == 0), p[2:].tolist())
        for i, (s, p) in enumerate(zip(sequences, policy.logprobs(sequences), strict=True))
    ]


def settings_of(every: int):
    words = [f"algorithm.calibrate_clip_every={every}", "train.lr=1e-2", "algorithm.clip=0.05"]
    return load_config("demo", words)


def calibrated_trainer(policy: Policy, every: int) -> tuple[Trainer, ClipCalibration]:
    settings = settings_of(every)
    objective = Objective.from_settings(settings.algorithm, settings.rollout.max_tokens)
    calibration = ClipCalibration.from_settings(policy, objective, settings)
    assert calibration is not None
    return Trainer(policy, settings, extras=[calibration]), calibration


def test_in_the_trainer(sample) -> None:
    policy = make_policy()
    trainer, calibration = calibrated_trainer(policy, 2)
    lines = [trainer.step(draw(policy, sample, 16)).metrics for _ in range(2)]
    assert "policy/over_clipped" not in lines[0]
    assert (lines[0]["policy/clip_low"], lines[0]["policy/clip_high"]) == (0.95, 1.05)
    assert 0 <= lines[1]["policy/over_clipped"] <= 1
    assert lines[1]["policy/clip_low"] != 0.95
    _, resumed = calibrated_trainer(policy, 2)
    resumed.load_state(calibration.state())
    assert resumed.bounds == calibration.bounds


def test_its_forwards_are_divided_where_memory_runs_out(sample, monkeypatch) -> None:
    policy = make_policy()
    (trainer, _), samples = calibrated_trainer(policy, 1), draw(policy, sample, 8)
    forward, sizes = Policy.train_logprobs, []

    def train_logprobs(policy, inputs, *args, **kwargs):
        if policy.plan.name == "bf16":
            if len(inputs) > 16:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            sizes.append(len(inputs))
        return forward(policy, inputs, *args, **kwargs)

    monkeypatch.setattr(Policy, "train_logprobs", train_logprobs)
    metrics = trainer.step(samples).metrics
    assert "policy/over_clipped" in metrics
    assert max(sizes) == 16
    assert sum(sizes) == 2 * 4 * 8, "before the step and at its end, the last minibatch's samples"
    assert trainer.optimizer.num_updates == 2, "with the gradients that it had"
    assert metrics.get("memory/train_retries", 0) == 1


def test_an_update_that_is_not_finite_moves_no_bound(sample) -> None:
    policy = make_policy()
    samples = draw(policy, sample, 1) * 2
    micro = []
    for batch in pack(samples, 8):  # one sample each
        advantages = np.full(5, (-1.0) ** len(micro), dtype=np.float32)
        micro.append(MicroBatch(with_advantages(batch, [advantages] * 2)))
    for value, moves in ((0.5, True), (float("nan"), False)):
        calibration = ClipCalibration(policy, REFERENCE, 1, 1.0, TokenFilter())
        minibatch = Minibatch(micro, MicroBatchSize(8))
        calibration.begin(0, [minibatch, minibatch])
        outputs = [torch.full((5,), value)] * 2
        metrics = calibration.before_last(Accumulated(minibatch, outputs=outputs))
        assert ("policy/over_clipped" in metrics) == (calibration.bounds != REFERENCE) == moves


@pytest.mark.parametrize(
    "words, message",
    [
        (["train.updates_per_step=1"], "train.updates_per_step of at least 2"),
        (["precision.preset=mixed"], "needs FP8 or INT8 on both sides"),
        (["algorithm.name=gspo"], "no token-level clips"),
        (["rollout.oversample=0.5"], "needs rollout.oversample = 0"),
    ],
)
def test_where_it_means_nothing_it_is_refused(words, message) -> None:
    with pytest.raises(UserError, match=message):
        load_config("demo", ["algorithm.calibrate_clip_every=20", *words])


def test_a_trainer_without_the_calibration_that_its_settings_ask_for_is_refused() -> None:
    with pytest.raises(UserError, match="calibrate_clip_every = 2 needs a ClipCalibration"):
        Trainer(make_policy(), settings_of(every=2))
