"""The portable kernels of log-probs and sampling have the bits of their references."""

from __future__ import annotations

from tests.kernels.interpreted import interpreted


def test_kernels_have_the_bits_of_the_references() -> None:
    assert interpreted("interpreted_probs.py") == {}
