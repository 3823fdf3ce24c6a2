"""A task whose score leaves something behind: files, threads, processes."""

import faulthandler
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

from jetrl.tasks import Task
from jetrl.types import Prompt

KEPT: list[object] = []
MAX_FILES = 40  # so that it takes few of them


class Leaking(Task):
    """A task whose scores start processes and leave them behind.

    Args:
        folder: Folder that the numbers of started processes go to.
    """

    name = "leaking"

    def __init__(self, folder: str = "") -> None:
        self._folder = Path(folder)

    def prompts(self, split: str) -> list[Prompt]:
        return [Prompt(id="0", text="?")]

    def self_test(self) -> list[tuple[Prompt, str, float | None]]:
        return []

    def score(self, prompt: Prompt, completion: str) -> float:
        getattr(self, completion)()
        return 1.0

    def files(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILES, hard))
        KEPT.append(open("/dev/null"))  # noqa: SIM115

    def files_behind_another_error(self) -> None:
        try:
            self.files()
        except OSError as error:
            raise ConnectionError("cannot reach it") from error

    def threads(self) -> None:
        # Each has a stack: task.memory_mib has room for a few.
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()

    def process(self) -> None:
        self._note(subprocess.Popen(["sleep", "36000"]).pid)

    def process_and_hang(self) -> None:
        self.process()
        faulthandler.dump_traceback_later(0.1, exit=True, file=2)  # the time limit passes
        time.sleep(3600)

    def process_and_crash(self) -> None:
        self.process()
        os.abort()

    def fork_that_leaves(self) -> None:
        if child := os.fork():
            self._note(child)
            os.waitpid(child, 0)
        else:
            sys.exit(0)

    def fork_that_returns(self) -> None:
        if child := os.fork():
            self._note(child)
            time.sleep(0.1)

    def _note(self, pid: int) -> None:
        (self._folder / str(pid)).touch()
