"""Jobs in another thread, one at a time, whose errors are raised in the thread of their owner."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs jobs one after the other in a thread of its own; to be used from one thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, job: Callable[[], object], name: str) -> None:
        """Start a job when the job before has ended; raise what that one raised."""
        self.wait()
        # A daemon, so that a second Ctrl-C need not wait for it.
        self._thread = threading.Thread(target=self._run, args=(job,), name=name, daemon=True)
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        """True if the last job has ended with an error, which `wait` raises."""
        return self._error is not None

    def wait(self, limit_s: float | None = None) -> None:
        """Wait for the job that runs, if one does, and raise what it raised.

        Args:
            limit_s: The most seconds to wait; None: until it has ended.
        """
        if self._thread is not None:
            self._thread.join(limit_s)
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, job: Callable[[], object]) -> None:
        """Do the job, and keep its error for the owner's thread."""
        try:
            job()
        except BaseException as error:
            self._error = error
