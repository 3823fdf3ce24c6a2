"""A mistake in a user's advantage function is reported before a model is loaded."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jetrl.errors import UserError
from jetrl.loop import train
from jetrl.session import open as opening
from jetrl.session.open import made_up_rewards, try_advantages
from jetrl.settings.loading import Settings, load_config
from jetrl.training.objectives import Objective

HEAD = "import numpy as np, random, torch\nfrom jetrl.settings.algorithms import Algorithm\n"
SHAPE = ("rollout.prompts_per_step=6", "rollout.samples_per_prompt=4", "rollout.max_tokens=9")


def settings_with(folder: Path, code: str, *words: str, record: str = "") -> Settings:
    """The settings of a run whose advantages the function `found` of this code makes."""
    file = folder / "mine.py"
    file.write_text(
        f"{HEAD}{code}\nmine = Algorithm('m', '', found, 'ratio', 'token_mean'{record})"
    )
    place = (f"run.dir={folder / 'runs'}", "run.device=cpu")
    return load_config("demo", [f"algorithm.name={file}:mine", *place, *SHAPE, *words])


class ModelLoadedError(Exception):
    """The run has come to the loading of its model."""


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: Any) -> None:
        raise ModelLoadedError

    monkeypatch.setattr(opening, "build_policy", build)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def found(): return 1", r"takes 0 positional .* \(it is called with one argument"),
        ("def found(step): return step.reward", r"AttributeError.*mine\.py, line 3"),
        (
            "def found(step): return step.rewards",
            r"of the 24 samples.*; found returned ndarray of shape \[24\], float64",
        ),
        (
            "def found(step): return step.rewards.reshape(6, 4)",
            r"of the 24 samples.*; found returned ndarray of shape \[6, 4\], float64",
        ),
        ("def found(step): pass", "; found returned None"),
        (
            "def found(step): return [np.ones(5)] * len(step.rewards)",
            r"of sample 0 are 5 numbers for its 9 tokens; found returned list of 24",
        ),
        (
            "def found(step): return [p.astype(str) for p in step.penalties]",
            r"of sample 0 are <U.*must be real numbers; found returned list of 24",
        ),
        (
            "def found(step): return [torch.ones(3, requires_grad=True) for _ in step.groups]",
            r"cannot be made NumPy arrays \(RuntimeError: .*the first Tensor of shape \[3\]",
        ),
        (
            "def found(step):\n"
            "    grouped = step.rewards.reshape(6, 4)\n"
            "    grouped = (grouped - 0.5) / grouped.std(1, keepdims=True)\n"
            "    return step.at_tokens(grouped.reshape(-1))",
            r"of sample 4 are not finite",  # of the first group whose rewards are equal
        ),
    ],
)
def test_a_mistake_is_reported_before_a_model_is_loaded(
    tmp_path: Path, code: str, message: str
) -> None:
    with (
        pytest.raises(UserError, match=f"mine.py:mine: its advantages .*{message}") as error,
        np.errstate(all="ignore"),
    ):
        train(settings_with(tmp_path, code))
    assert "(tried before the run on made-up rewards of 6 x 4 samples)" in str(error.value)


def test_a_critic_needs_returns(tmp_path: Path) -> None:
    words = ("critic.path=policy", "algorithm.aggregation=token_mean")
    code = "def found(step): return step.at_tokens(step.scores + step.values[0][0])"
    record = ", options={}, needs_critic=True"
    with pytest.raises(UserError, match="have no returns, which the critic learns"):
        train(settings_with(tmp_path, code, *words, record=record))


def test_equal_groups_are_left_out_where_dynamic_sampling_leaves_them_out(tmp_path: Path) -> None:
    code = "def found(step): return step.at_tokens(step.rewards)"
    for dynamic in (False, True):
        record = f", options={{'dynamic_sampling': {dynamic}}}"
        settings = settings_with(tmp_path, code, record=record)
        objective = Objective.from_settings(settings.algorithm, 9)
        step = made_up_rewards(objective, settings)
        spread = [np.ptp(step.rewards[step.groups == group]) for group in range(6)]
        assert spread == ([1.0] * 6 if dynamic else [1.0, 0.0] * 3)


def test_the_trial_leaves_no_trace_in_what_a_run_computes(tmp_path: Path) -> None:
    """The generators stand where they stood, and a run's own objective has a file of its own."""
    code = (
        "calls = []\n"
        "def found(step):\n"
        "    calls.append(random.random() + np.random.rand() + float(torch.rand(())))\n"
        "    return step.at_tokens(step.rewards + len(calls))\n"
    )
    settings = settings_with(tmp_path, code)

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(5)
    expected = draw()
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(5)
    with pytest.raises(ModelLoadedError):
        train(settings)
    assert draw() == expected
    tried = Objective.from_settings(settings.algorithm, 9)
    try_advantages(tried, settings)
    step = made_up_rewards(tried, settings)
    trainers = Objective.from_settings(settings.algorithm, 9)
    assert trainers.advantages(step).advantages[0][0] == step.rewards[0] + 1
    assert tried.advantages(step).advantages[0][0] == step.rewards[0] + 2
