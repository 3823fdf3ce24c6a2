"""Decode of integer attention by the portable kernels, in Triton's interpreter."""

from __future__ import annotations

from tests.kernels.interpreted import interpreted


def test_decode_has_the_bits_of_the_reference() -> None:
    found, too_long_is_nan = interpreted("interpreted_attention_decode.py")
    assert {case: result for case, result in found.items() if result["different"]} == {}
    special = [result for case, result in found.items() if "special=''" not in case]
    assert all(result["nan"] and result["finite"] for result in special), special
    assert too_long_is_nan
