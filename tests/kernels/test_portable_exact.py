"""The functions of portable/exact.py have the bits of `precision.exact`."""

from __future__ import annotations

from tests.kernels.interpreted import interpreted


def test_functions_have_the_bits_of_the_references() -> None:
    assert interpreted("interpreted_exact.py") == {"exp": 0, "log": 0, "sigmoid": 0}
