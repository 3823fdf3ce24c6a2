"""The script reads from the committed results of a study how far its runs fell back."""

import importlib.util
import sys
from pathlib import Path

import pytest
from benchmarks.study.results import Curves
from tests.study.test_analysis import run

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location(
    "setbacks", ROOT / "benchmarks" / "study" / "setbacks.py"
)
setbacks = importlib.util.module_from_spec(SPEC)
sys.modules["setbacks"] = setbacks
SPEC.loader.exec_module(setbacks)


def run_with(held_out, kls, rewards=()):
    """Return a run with these held-out accuracies, and K3 KLs and rewards at every second step."""
    steps = [2 * i for i in range(1, max(len(kls), len(rewards)) + 1)]
    values = {"mismatch/k3_kl": list(kls), "reward/mean": list(rewards)}
    return run("short", "mixed", 0, 0.5).model_copy(
        update={
            "held_out": Curves(steps=list(range(len(held_out))), values={"mean": held_out}),
            "curves": Curves(steps=steps, values=values),
        }
    )


@pytest.mark.parametrize(
    "kls, rise",
    [
        ([1, 1, 1, 1, 4, 4], 10),
        ([1, 1, 1, 1, 4, 2, 4], None),  # one value alone is no rise
        ([1, 1, 1, 4, 4, 1], None),  # three values before it are too few
        ([1, 1, 1, 1, None, 4, 4], 12),
        ([0, 0, 0, 0, 0, 0], None),
    ],
)
def test_a_rise_is_two_values_in_a_row_above_thrice_the_median(kls, rise):
    assert setbacks.setback(run_with([], kls), 3.0).rise == rise


@pytest.mark.parametrize(
    "rewards, step",
    [
        ([0.6, 0.7] * 5 + [0.1] * 3, 24),  # two kept values are the newest four steps
        ([0.6, 0.7] * 5 + [0.5] * 9, None),
        ([0.6, 0.7] * 2 + [0.1] * 2, None),  # eight steps before it are too few
        ([0.7], None),
        ([], None),
    ],
)
def test_a_reward_collapses_as_in_a_run_that_is_watched(rewards, step):
    assert setbacks.setback(run_with([], [], rewards), 3.0).collapse == step


def test_the_signs_mark_what_the_study_says(capsys):
    files = ("flows", "flows_first_start", "long", "losses", "behind")
    setbacks.main([str(ROOT / f"benchmarks/results/study/{name}.json") for name in files])
    reward, mismatch = capsys.readouterr().out.splitlines()[-2:]
    assert reward == "| the reward collapses | 3 of 3 | 2 of 10 | 1 of 685 |"
    assert mismatch.endswith(" | 2 of 3 | 4 of 8 | 143 of 398 |")
