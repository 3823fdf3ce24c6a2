from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks a network, whatever machine it runs on
# Only the first process that a test starts compiles jetrl: 0.7 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
torch.set_num_threads(1)  # tiny tensors are slower with two, and test workers share the cores

# A limit is for what hangs, never for what is slow: no verdict depends on other work.
LONGEST_S = 30.0  # seconds that the longest test takes alone on an idle core
HANG_S = 40 * LONGEST_S  # with room for forty others on that core
LONGEST_FILES = (
    "test_triton.py",
    "test_portable_matrix.py",
    "test_portable_gemm.py",
    "test_portable_rows.py",
    "test_portable_probs.py",
    "test_kill_and_resume.py",
    "test_soak.py",
)


@pytest.hookimpl(tryfirst=True)  # before pytest-timeout reads its option
def pytest_configure(config: pytest.Config) -> None:
    """Limit each test to `HANG_S`, unless `--timeout` gives a limit or pytest-timeout is absent."""
    if config.pluginmanager.hasplugin("timeout") and config.option.timeout is None:
        config.option.timeout = HANG_S


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest tests first, so that no worker ends with a long test while another waits."""
    items.sort(key=lambda item: item.path.name not in LONGEST_FILES)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, None]:
    """Escape what a test printed that is not valid Unicode, such as lone surrogates.

    A test process (-n 2) can only report what UTF-8 can write.
    """
    outcome = yield
    report = outcome.get_result()
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode("utf-8"))
        for name, text in report.sections
    ]


@pytest.fixture(scope="session")
def wait_until() -> Callable[[Callable[[], object]], None]:
    """Return a function that waits until a condition holds, for as long as that takes."""

    def wait(condition: Callable[[], object]) -> None:
        while not condition():
            time.sleep(0.005)

    return wait


@pytest.fixture
def plain_task(tmp_path: Path) -> str:
    """`task`: a file's task of one prompt, with a score and nothing else."""
    file = tmp_path / "plain.py"
    file.write_text(
        "from jetrl.tasks import Task\nfrom jetrl.types import Prompt\n"
        "class Plain(Task):\n"
        "    alphabet = '01'\n"
        "    def prompts(self, split): return [Prompt(id='0', text='0', answer='1')]\n"
        "    def score(self, prompt, completion): return 1.0\n"
    )
    return f"{file}:Plain"
