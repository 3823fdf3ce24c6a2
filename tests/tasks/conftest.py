from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from jetrl.tasks.sandbox.process import WorkerProcess


@pytest.fixture
def limits_of_starts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that gives workers their time limits of a score, in the order of starts.

    The last limit is also that of all later starts. So only the score that is to hang has a short
    limit, which other scores might exceed on a busy machine.
    """

    def use(*limits_s: float) -> None:
        coming, start = list(limits_s), WorkerProcess.start

        def start_with_limit(worker: WorkerProcess) -> None:
            limit_s = coming.pop(0) if len(coming) > 1 else coming[0]
            worker.setup = dataclasses.replace(worker.setup, timeout_s=limit_s)
            start(worker)

        monkeypatch.setattr(WorkerProcess, "start", start_with_limit)

    return use
