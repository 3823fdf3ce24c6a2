"""The portable attention forward has the bits of `attention.integer`."""

from __future__ import annotations

from tests.kernels.interpreted import interpreted


def test_kernels_have_the_bits_of_the_reference() -> None:
    found = interpreted("interpreted_attention_forward.py")
    assert len(found) >= 8
    assert {name: counts for name, counts in found.items() if any(counts.values())} == {}
