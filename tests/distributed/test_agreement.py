"""Decisions of several processes become one by each decision's own rule."""

from __future__ import annotations

import pytest

from jetrl.distributed.agreement import (
    LARGEST_SIZE,
    OUT_OF_MEMORY,
    STOP,
    UPDATE_IS_FINITE,
    Decision,
    agree,
)


@pytest.mark.parametrize("decision", [OUT_OF_MEMORY, STOP])
def test_a_reason_of_any_process_is_the_reason_of_all(decision: Decision[str]) -> None:
    assert decision.combine(["", "the card is full", "SIGTERM"]) == "the card is full"
    assert decision.combine(["", ""]) == ""


def test_an_update_is_finite_when_it_is_so_everywhere() -> None:
    assert UPDATE_IS_FINITE.combine([True, True])
    assert not UPDATE_IS_FINITE.combine([True, False])


def test_a_size_fits_everywhere() -> None:
    assert LARGEST_SIZE.combine([4096, 2048, 8192]) == 2048


def test_one_process_takes_its_own_answer() -> None:
    assert agree(OUT_OF_MEMORY, "out") == "out"
    assert agree(STOP, "") == ""
    assert agree(UPDATE_IS_FINITE, False) is False
    assert agree(LARGEST_SIZE, 7) == 7
