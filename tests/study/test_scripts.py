"""The scripts of docs/study.md give its figures from the committed results."""

from pathlib import Path

import pytest
from benchmarks.study import effects, pooled, setbacks

from jetrl.errors import UserError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "study"


def files(*names):
    return [str(RESULTS / f"{name}.json") for name in names]


def test_the_lost_run_of_the_first_start_is_counted(capsys):
    effects.main([*files("flows_first_start"), "--against", "mixed", "alike"])
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("mixed and alike: 1 of 25; all others: 0 of 63;")
    assert line.endswith("p 0.2841")  # 25 of 88
    with pytest.raises(UserError, match=r"--reference int8: .*losses.json has bf16, mixed"):
        effects.main([*files("losses"), "--reference", "int8"])


def test_the_signs_mark_what_the_study_says(capsys):
    setbacks.main(files("flows", "flows_first_start", "long", "losses", "behind"))
    reward, mismatch = capsys.readouterr().out.splitlines()[-2:]
    assert reward == "| the reward collapses | 3 of 3 | 2 of 10 | 1 of 685 |"
    assert mismatch.endswith(" | 2 of 3 | 4 of 8 | 143 of 398 |")


def test_pooled_pairs_of_one_study_have_the_figures_of_its_report(capsys):
    pooled.main([f"{RESULTS / 'behind.json'}:kv-int8:bf16"])
    assert capsys.readouterr().out == (
        "30 pairs from 1 start, 30 in their own precision: rank estimate +0.07% [-0.33, +0.55], "
        "mean +0.26% [-0.28, +0.80], below in 14; signed ranks p 0.727, within 1% p 0.004\n"
    )
    with pytest.raises(UserError, match="has no run of 'int8'; there are bf16, ends-"):
        pooled.main([f"{RESULTS / 'behind.json'}:int8:bf16"])


def test_pairs_from_other_first_weights_are_an_error():
    runs = [run for run, _ in pooled.pairs(f"{RESULTS / 'losses.json'}:unified:bf16", [])]
    other = next(run for run in runs if run.start_sha256 != runs[0].start_sha256)
    with pytest.raises(UserError, match="began from different weights"):
        pooled.difference(runs[0], other)
