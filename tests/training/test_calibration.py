"""Calibrated clipping on ratios that are given, and in the trainer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jetrl.errors import OutOfMemoryStop, UserError
from jetrl.models.policy import Policy
from jetrl.precision import PrecisionPlan
from jetrl.settings.loading import load_config
from jetrl.training import Trainer, pack
from jetrl.training.extras.calibration import (
    ClipBounds,
    ClipCalibration,
    calibrated,
    moved,
)
from jetrl.training.micro_batches import MicroBatch, MicroBatchSize, Minibatch
from jetrl.training.packing import with_advantages
from jetrl.training.update import Accumulated

REFERENCE = ClipBounds(0.8, 1.2)


def noisy(noise: float, count: int = 4000) -> tuple[np.ndarray, ...]:
    """Return FP8 ratios, which have more noise, BF16 ratios, advantages and probabilities."""
    rng = np.random.default_rng(0)
    log_ratio = rng.normal(0, 0.1, count)
    advantages = np.where(rng.random(count) < 0.5, 1.0, -1.0)
    probabilities = rng.uniform(0.1, 1, count)
    fp8 = np.exp(log_ratio + rng.normal(0, noise, count))
    return fp8, np.exp(log_ratio), advantages, probabilities


def test_without_noise_the_bounds_stay() -> None:
    fp8, bf16, advantages, probabilities = noisy(0.0)
    found = calibrated(fp8, bf16, advantages, probabilities, REFERENCE)
    assert found is not None
    assert abs(found.low - 0.8) <= 0.02, "a step of the grid"
    assert abs(found.high - 1.2) <= 0.02


def test_noise_lowers_the_lower_bound_to_cut_off_as_much_as_bf16() -> None:
    fp8, bf16, advantages, probabilities = noisy(0.15)
    negative = advantages < 0
    wanted = (bf16[negative] <= 0.8).mean()
    assert (fp8[negative] <= 0.8).mean() > 3 * wanted, "the over-clipping that is to be mended"
    found = calibrated(fp8, bf16, advantages, probabilities, REFERENCE)
    assert found is not None
    step = (fp8[negative] <= found.low + 0.02).mean() - (fp8[negative] <= found.low).mean()
    assert abs((fp8[negative] <= found.low).mean() - wanted) <= step
    assert found.low < 0.76


def test_the_upper_bound_keeps_the_balance() -> None:
    fp8, bf16, advantages, probabilities = noisy(0.15)
    found = calibrated(fp8, bf16, advantages, probabilities, REFERENCE)
    assert found is not None

    def balance(ratios: np.ndarray, low: float, high: float) -> float:
        terms = probabilities * ratios * advantages
        up = terms[(advantages > 0) & (ratios < high)].sum()
        return abs(up / terms[(advantages < 0) & (ratios > low)].sum())

    target = balance(bf16, 0.8, 1.2)
    gap = abs(balance(fp8, found.low, found.high) - target)
    for other in (found.high - 0.02, found.high + 0.02):
        if 1.2 <= other <= 2.0:
            assert gap <= abs(balance(fp8, found.low, other) - target) + 1e-12


def test_one_sided_advantages_say_nothing() -> None:
    ones = np.ones(4)
    assert calibrated(ones, ones, ones, ones, REFERENCE) is None
    assert calibrated(ones, ones, -ones, ones, REFERENCE) is None


def test_bounds_move_half_of_the_way_and_not_far() -> None:
    found = moved(ClipBounds(0.8, 1.2), ClipBounds(0.76, 1.3))
    assert (found.low, found.high) == (pytest.approx(0.78), pytest.approx(1.25))
    found = moved(ClipBounds(0.8, 1.2), ClipBounds(0.5, 2.0))
    assert (found.low, found.high) == (pytest.approx(0.75), pytest.approx(1.3))


def test_in_the_trainer(sample) -> None:
    words = ["algorithm.calibrate_clip_every=2", "train.lr=1e-2", "algorithm.clip=0.05"]
    settings = load_config("demo", words)
    config = settings.model.config
    assert isinstance(config, dict)
    policy = Policy.from_config(config | {"num_hidden_layers": 1}, PrecisionPlan.preset("unified"))
    trainer = Trainer(policy, settings)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 128, 8).tolist() for _ in range(16)]
    lines = []
    for _ in range(2):
        logprobs = policy.logprobs(sequences)
        samples = [
            sample(i // 4, s[:3], s[3:], float(i % 4 == 0), p[2:].tolist())
            for i, (s, p) in enumerate(zip(sequences, logprobs, strict=True))
        ]
        lines.append(trainer.step(samples).metrics)
    assert "policy/over_clipped" not in lines[0]
    assert (lines[0]["policy/clip_low"], lines[0]["policy/clip_high"]) == (0.95, 1.05)
    assert 0 <= lines[1]["policy/over_clipped"] <= 1
    assert lines[1]["policy/clip_low"] != 0.95
    assert trainer.calibration is not None
    state = trainer.calibration.state()
    resumed = Trainer(policy, settings)
    assert resumed.calibration is not None
    resumed.calibration.load_state(state)
    assert resumed.calibration.bounds == trainer.calibration.bounds


@pytest.fixture
def calibrating(sample):
    """Return a trainer that calibrates at its first step, and samples of 8 tokens."""
    words = ["algorithm.calibrate_clip_every=1", "train.lr=1e-2", "algorithm.clip=0.05"]
    settings = load_config("demo", words)
    config = settings.model.config
    assert isinstance(config, dict)
    policy = Policy.from_config(config | {"num_hidden_layers": 1}, PrecisionPlan.preset("unified"))
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 128, 8).tolist() for _ in range(8)]
    samples = [
        sample(i // 4, s[:3], s[3:], float(i % 4 == 0), p[2:].tolist())
        for i, (s, p) in enumerate(zip(sequences, policy.logprobs(sequences), strict=True))
    ]
    return Trainer(policy, settings), samples


def short_of_memory(monkeypatch: pytest.MonkeyPatch, limit: int) -> list[int]:
    """Let BF16 forwards of more than `limit` tokens fail; return the list of sizes that fitted."""
    forward, sizes = Policy.train_logprobs, []

    def train_logprobs(policy, token_ids, *args, **kwargs):
        if policy.plan.name == "bf16":
            if len(token_ids) > limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            sizes.append(len(token_ids))
        return forward(policy, token_ids, *args, **kwargs)

    monkeypatch.setattr(Policy, "train_logprobs", train_logprobs)
    return sizes


@pytest.mark.parametrize("limit", [16, 32])
def test_its_forwards_are_divided_where_memory_runs_out(calibrating, monkeypatch, limit) -> None:
    trainer, samples = calibrating
    sizes = short_of_memory(monkeypatch, limit)
    metrics = trainer.step(samples).metrics
    assert "policy/over_clipped" in metrics
    assert max(sizes) == limit
    assert sum(sizes) == 2 * 4 * 8, "before the step and at its end, the last minibatch's samples"
    assert trainer.optimizer.num_updates == 2, "with the gradients that it had"
    assert metrics.get("memory/train_retries", 0) == {16: 1, 32: 0}[limit]


def test_without_room_for_its_weights_the_run_ends_with_words(calibrating, monkeypatch) -> None:
    trainer, samples = calibrating
    make = Policy.__init__

    def no_room(policy, config, plan, *args, **kwargs):
        if plan.name == "bf16":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 GiB.")
        make(policy, config, plan, *args, **kwargs)

    monkeypatch.setattr(Policy, "__init__", no_room)
    with pytest.raises(OutOfMemoryStop, match=r"calibrated clipping .*calibrate_clip_every=0"):
        trainer.step(samples)
    assert trainer.optimizer.num_updates == 0


def test_an_update_that_is_not_finite_moves_no_bound(sample) -> None:
    config = load_config("demo").model.config
    assert isinstance(config, dict)
    policy = Policy.from_config(config | {"num_hidden_layers": 1}, PrecisionPlan.preset("unified"))
    sequence = list(range(8))
    (logprobs,) = policy.logprobs([sequence])
    samples = [sample(0, sequence[:3], sequence[3:], 1.0, logprobs[2:].tolist())] * 2
    micro = []
    for batch in pack(samples, 8):  # one sample each
        advantages = np.full(5, (-1.0) ** len(micro), dtype=np.float32)
        micro.append(MicroBatch(with_advantages(batch, [advantages] * 2)))
    for value, moves in ((0.5, True), (float("nan"), False)):
        calibration = ClipCalibration(policy, REFERENCE, 1, 1.0)
        minibatch = Minibatch(micro, MicroBatchSize(8))
        calibration.begin(0, [minibatch, minibatch])
        outputs = [torch.full((5,), value)] * 2
        metrics = calibration.before_last(Accumulated(minibatch, outputs=outputs))
        assert ("policy/over_clipped" in metrics) == (calibration.bounds != REFERENCE) == moves


@pytest.mark.parametrize(
    "words, message",
    [
        (["train.updates_per_step=1"], "nothing is clipped"),
        (["precision.preset=mixed"], "no FP8 ratios"),
        (["algorithm.name=gspo"], "no token-level clips"),
        (["rollout.oversample=0.5"], "ratios of tokens that earlier policies drew"),
    ],
)
def test_where_it_means_nothing_it_is_refused(words, message) -> None:
    with pytest.raises(UserError, match=message):
        load_config("demo", ["algorithm.calibrate_clip_every=20", *words])
