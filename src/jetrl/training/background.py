"""One job at a time in another thread; what goes wrong there surfaces here."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs jobs one after the other while its owner goes on. Use it from one thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, job: Callable[[], object], name: str) -> None:
        """Starts a job, when the one before it has ended; raises what that one raised."""
        self.wait()
        # A daemon, so that a second Ctrl-C need not wait for it.
        self._thread = threading.Thread(target=self._run, args=(job,), name=name, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises what a job raised that has ended; does not wait for one that runs."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Waits for the job that runs, if one does; raises what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:
            self._error = error
