"""The row of four plots is a function of its file, and says which runs have no KL."""

from pathlib import Path

import pytest
from benchmarks.study.four_plots import main

from jetrl.errors import UserError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "study"


def test_the_plots_are_the_same_bytes_each_time(tmp_path):
    files = [tmp_path / name for name in ("a.svg", "b.svg")]
    for file in files:
        main([f"{RESULTS / 'eight_bits.json'}", "--arms", "bf16", "int8", "--out", f"{file}"])
    text, again = (file.read_text() for file in files)
    assert text == again
    for words in ("Reward", "Held-out accuracy", "K3 KL", "Gradient norm", "mean of 5 seeds"):
        assert words in text
    assert ">int8: 0 of 9.9M tokens differ<" in text  # and not of bf16, of which some do


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["eight_bits"],
            "--arms mixed: no run of this arm; there are bf16, int8, int8-e4m3, unified",
        ),
        (["flows", "--point", "30m"], "--point 30m: single out one of: 30m, program-512; 30m, pro"),
        (["flows", "--point", "6m"], "--point 6m: single out one of: 30m, program-512; 30m, progr"),
    ],
)
def test_arms_and_points_that_are_not_there_are_named(words, message, tmp_path):
    file, *options = words
    with pytest.raises(UserError, match=f"^{message}"):
        main([f"{RESULTS / file}.json", *options, "--out", f"{tmp_path / 'a.svg'}"])
