"""exp, log and sigmoid of portable/exact.py on a GPU: the bits of `precision.exact`."""

from __future__ import annotations

import pytest
from tests.kernels.interpreted_exact import differences

pytestmark = pytest.mark.gpu


def test_functions_have_the_bits_of_the_references() -> None:
    assert differences("cuda") == {"exp": 0, "log": 0, "sigmoid": 0}
