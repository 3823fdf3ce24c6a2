"""Kernels of GPUs from sm_80 on are near their references, and decode has the bits of training."""

from __future__ import annotations

from tests.kernels.interpreted import interpreted


def test_kernels_are_near_their_references_and_decode_is_training() -> None:
    found = interpreted("interpreted_plans.py")
    assert len(found) == 17
    assert {case: values for case, values in found.items() if any(values.values())} == {}
