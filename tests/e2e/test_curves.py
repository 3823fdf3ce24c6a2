"""A network trained in FP8 follows its BF16 curve.

Its distance from that curve is within the distance between two BF16 runs that see the same data in
another order.
"""

from __future__ import annotations

import numpy as np
from tests.training.shared import config

from jetrl import Policy, load_config
from jetrl.precision import PrecisionPlan
from jetrl.training.sft import SftTrainer
from jetrl.types import Example

STEPS, WINDOW = 60, 10
CONFIG = config(vocab_size=64, intermediate_size=256, num_hidden_layers=2, num_key_value_heads=2)


def chains(seed: int) -> list[list[Example]]:
    """Yield batches of noisy walks over a fixed random permutation of the vocabulary.

    The next token is the permuted one nine times in ten.
    """
    successor = np.random.default_rng(0).permutation(64)
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(STEPS):
        batch = []
        for _ in range(16):
            walk = [int(rng.integers(64))]
            for _ in range(15):
                noisy = rng.random() < 0.1
                walk.append(int(rng.integers(64)) if noisy else int(successor[walk[-1]]))
            batch.append(Example(walk[:1], walk[1:]))
        batches.append(batch)
    return batches


def curve(preset: str, seed: int) -> np.ndarray:
    """The loss of each update, averaged over windows."""
    settings = load_config(None, ["sft.lr=2e-3", f"sft.steps={STEPS}"])
    trainer = SftTrainer(Policy.from_config(CONFIG, PrecisionPlan.preset(preset), 0), settings)
    losses = [trainer.step(batch)["sft/loss"] for batch in chains(seed)]
    return np.array(losses).reshape(-1, WINDOW).mean(1)


def test_unified_follows_bf16() -> None:
    bf16, shuffled, unified = curve("bf16", 1), curve("bf16", 2), curve("unified", 1)
    assert bf16[-1] < bf16[0] - 10 * np.abs(shuffled - bf16).max(), "there is a curve to follow"
    spread = np.abs(shuffled - bf16).max()
    assert np.abs(unified - bf16).max() <= spread
