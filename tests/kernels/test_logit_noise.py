"""Noise on logits is normal, counted, and of no draw but its own."""

from __future__ import annotations

import math

import numpy as np
import torch

from jetrl.kernels.sampling import (
    NOISE_COUNTER,
    _philox_words,
    normal_noise,
    random_bits,
    with_noise,
)

KEYS = torch.tensor([0, 5, 2**52 + 17, -1])


def test_words_are_those_of_the_samplers_philox() -> None:
    first, second = (word.numpy() for word in _philox_words(KEYS, torch.arange(300)))
    for row, key in enumerate(KEYS.tolist()):
        # The counter (c, 0, 0, n) is that of sequence c and position n * 2**32.
        position = np.full(300, NOISE_COUNTER << 32, dtype=np.int64)
        bits = random_bits(np.full(300, key, dtype=np.int64), np.arange(300), position)
        assert np.array_equal((first[row] << 21) | (second[row] >> 11), bits)


def test_noise_is_standard_normal_and_independent_of_the_row() -> None:
    noise = normal_noise(KEYS, 40_000).double()
    # Six standard deviations of the mean, of the variance and of a correlation of n samples.
    bound = 6 / math.sqrt(noise.shape[1])
    assert noise.mean(1).abs().max() < bound
    assert (noise.square().mean(1) - 1).abs().max() < bound * math.sqrt(2)
    assert (torch.corrcoef(noise) - torch.eye(len(KEYS))).abs().max() < bound
    assert noise.isfinite().all()


def test_noise_is_box_and_mullers() -> None:
    first, second = (word.numpy() for word in _philox_words(KEYS, torch.arange(500)))
    u0, u1 = (((word >> 8) + 0.5) / 2.0**24 for word in (first, second))
    expected = np.sqrt(-2 * np.log(u0)) * np.cos(2 * np.pi * u1)
    # The reference's float64 is good to some 1e-15, and its result is rounded to float32.
    assert np.allclose(normal_noise(KEYS, 500).numpy(), expected, rtol=2.0**-24, atol=1e-13)


def test_noise_depends_on_the_rows_bits_and_the_token_alone() -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    noisy = with_noise(logits.clone(), KEYS, 0.3)
    order = torch.tensor([2, 0])
    assert torch.equal(with_noise(logits[order], KEYS[order], 0.3), noisy[order])
    assert torch.equal(with_noise(logits[:, :60].clone(), KEYS, 0.3), noisy[:, :60])
    assert torch.equal(noisy, logits + 0.3 * normal_noise(KEYS, 100))


def test_no_noise_leaves_the_logits() -> None:
    logits = torch.randn(4, 100)
    assert with_noise(logits, KEYS, 0.0) is logits
