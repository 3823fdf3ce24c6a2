"""The script puts pairs of several studies together, as the committed results have them."""

import importlib.util
from pathlib import Path

import pytest

from jetrl.errors import UserError

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "study"
SPEC = importlib.util.spec_from_file_location("pooled", ROOT / "benchmarks" / "study" / "pooled.py")
pooled = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(pooled)

BEHIND = f"{RESULTS / 'behind.json'}:kv-int8:bf16"
LOSSES = f"{RESULTS / 'losses.json'}:unified:bf16"


def printed(capsys, *words):
    """Return what the script prints."""
    pooled.main(words)
    return capsys.readouterr().out


def test_one_study_has_the_figures_of_its_report(capsys):
    assert printed(capsys, BEHIND) == (
        "30 pairs from 1 start, 30 in their own precision: rank estimate +0.07% [-0.33, +0.55], "
        "mean +0.26% [-0.28, +0.80], below in 14; signed ranks p 0.727, within 1% p 0.004\n"
    )


def test_one_collapsed_run_does_not_decide_the_rank_estimate():
    """The 95% interval of six pairs is their whole range."""
    assert pooled.rank_estimate([0, 1, 2, 3, 4, 5]) == (2.5, 0, 5)
    estimate, low, high = pooled.rank_estimate([*range(10), -100])
    assert (estimate, low, high) == (4.0, -45.5, 6.5)


@pytest.mark.parametrize(
    "words, message",
    [
        (["behind.json"], "say FILE:ARM:ARM"),
        ([f"{RESULTS / 'behind.json'}:int8:bf16"], "has no run of 'int8'; there are bf16, ends-"),
        (["missing.json:a:b"], "missing.json"),
    ],
)
def test_wrong_words_are_errors(words, message):
    with pytest.raises(UserError, match=message):
        pooled.main(words)


def test_other_first_weights_are_an_error():
    runs = [run for run, _ in pooled.pairs(LOSSES, [])]
    other = next(run for run in runs if run.start_sha256 != runs[0].start_sha256)
    with pytest.raises(UserError, match="began from different weights"):
        pooled.difference(runs[0], other)
