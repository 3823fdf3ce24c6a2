"""The portable kernels of norms, rotary and AdamW: bits of the references, by the interpreter."""

from __future__ import annotations

from tests.kernels.interpreted import interpreted


def test_row_kernels_have_the_bits_of_the_references() -> None:
    assert interpreted("interpreted_rows.py") == []
