"""Readers of an export are compared question by question."""

import math

from benchmarks.peer_accuracy import row_of


def test_a_reader_is_compared_with_the_model_on_the_same_questions() -> None:
    own = [True, True, False, False, True, False, False, False]
    other = [True, False, True, False, True, False, False, True]
    row = row_of("transformers", other, own)
    assert (row["accuracy"], row["minus_own"], row["different"]) == (0.5, 0.125, 3)
    # Differences of -1 once, +1 twice and 0 five times around 1/8.
    variance = (3 - 8 / 64) / 7
    assert row["error"] == round(math.sqrt(variance / 8), 4)
    assert row_of("jetrl", own, own)["error"] == 0
