from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch

torch.set_num_threads(1)  # tiny tensors are slower with two, and test workers share the cores


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, None]:
    """Tests feed text that is not valid Unicode (lone surrogates). What was captured of it is
    escaped, since a test process (-n 2) can only report what UTF-8 can write."""
    outcome = yield
    report = outcome.get_result()
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode("utf-8"))
        for name, text in report.sections
    ]
