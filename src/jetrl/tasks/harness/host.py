"""The program of the harness process, which runs episodes of somebody's own harness.

It may run under the Python of another environment, in which jetrl is not installed, so it imports
the standard library only. It reads and writes lines of JSON:

    read     {"target": "play.py:play", "arguments": {}, "command": [], "slots": 64}
    write    {"ready": true}
    read     {"rows": "train"}                      write    {"rows": [{...}, ...]}
    read     {"id": 7, "timeout_s": 600.0, "episode": {"row": {...}, "base_url": "http://...", ...}}
    write    {"id": 7, "result": 1.0}               or       {"id": 7, "failure": "ValueError: ..."}

It ends when its input does. What a harness prints goes to the standard error.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jetrl.types import Json

_MOST_FAILURE = 1000  # characters
_MOST_OUTPUT = 2**20  # bytes of a command


@dataclass(frozen=True)
class Episode:
    """An episode to play, as a harness gets it.

    Attributes:
        row: The row of the task's data.
        base_url: Of OpenAI's API, for this episode only.
        api_key: Any text will do; the base URL is the secret.
        model: Name of the model in requests.
        seed: For randomness of the environment: the same in all episodes of a row in a step.
        sample: Number of the episode among those of its row, from 0.
    """

    row: Json
    base_url: str
    api_key: str
    model: str
    seed: int
    sample: int


def main() -> None:
    sys.path[0] = os.getcwd()  # not the folder of this file
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # Requests stay on this machine.
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1,localhost")))
    lock = threading.Lock()

    def answer(**line: Any) -> None:
        with lock:
            answers.write(json.dumps(line) + "\n")
            answers.flush()

    setup = json.loads(sys.stdin.readline() or "null")
    if setup is None:
        return
    try:
        harness = _Harness(**setup)
    except BaseException as error:
        answer(error=_words(error))
        return
    answer(ready=True)
    asyncio.run(_serve(harness, answer))
    os._exit(0)  # threads of a harness may still run


async def _serve(harness: _Harness, answer: Callable[..., None]) -> None:
    """Play the episodes that are read, until the input ends."""
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[str] = asyncio.Queue()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, "")

    async def play(line: Json) -> None:
        limit = asyncio.timeout(line["timeout_s"])
        try:
            async with limit:
                result = _plain(await harness.play(Episode(**line["episode"])))
                answer(id=line["id"], result=result)
        except BaseException as error:
            late = f"no end after {line['timeout_s']:g} s"
            answer(id=line["id"], failure=late if limit.expired() else _words(error))

    threading.Thread(target=read, daemon=True).start()
    playing: set[asyncio.Task[None]] = set()
    while text := await lines.get():
        line = json.loads(text)
        if "rows" in line:
            try:
                answer(rows=await asyncio.to_thread(harness.rows, line["rows"]))
            except BaseException as error:
                answer(error=_words(error))
            continue
        task = asyncio.create_task(play(line))
        playing.add(task)
        task.add_done_callback(playing.discard)
    harness.close()


class _Harness:
    """A function, a class with `play` and perhaps `rows`, or a command."""

    def __init__(self, target: str, arguments: Json, command: list[str], slots: int) -> None:
        self._command = command
        self._processes: set[int] = set()
        self._pool = ThreadPoolExecutor(slots)
        self._rows: Callable[[str], Any] | None = None
        if command:
            return
        thing = _load(target)
        if isinstance(thing, type):
            made = thing(**arguments)
            self._play, self._rows = made.play, getattr(made, "rows", None)
        else:
            self._play, self._rows = thing, getattr(thing, "rows", None)
            if arguments:
                self._play = lambda episode: thing(episode, **arguments)
        if not callable(self._play):
            raise TypeError(f"{target} is a {type(thing).__name__}, not a function or class")

    def rows(self, split: str) -> list[Any]:
        """Return the harness's own rows of a split."""
        if self._rows is None:
            raise LookupError("the harness has no `rows`: set task.path to a file of rows")
        return [_plain(row) for row in self._rows(split)]

    async def play(self, episode: Episode) -> Any:
        if self._command:
            return await self._run(episode)
        if inspect.iscoroutinefunction(self._play):
            return await self._play(episode)
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self._pool, self._play, episode)
        return await result if inspect.isawaitable(result) else result

    async def _run(self, episode: Episode) -> Any:
        """Run the command for an episode; the last line that it prints is the result."""
        own = {
            "OPENAI_BASE_URL": episode.base_url,
            "OPENAI_API_KEY": episode.api_key,
            "OPENAI_MODEL": episode.model,
        }
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **own},
        )
        self._processes.add(process.pid)
        try:
            line = json.dumps(asdict(episode)) + "\n"
            output, errors = await process.communicate(line.encode())
        finally:
            self._end(process.pid)
        sys.stderr.write(errors[-_MOST_OUTPUT:].decode(errors="replace"))
        if process.returncode:
            last = errors.decode(errors="replace").strip().rpartition("\n")[2]
            raise RuntimeError(f"{self._command[0]} ended with {process.returncode}: {last}")
        last = output[-_MOST_OUTPUT:].decode(errors="replace").strip().rpartition("\n")[2]
        try:
            return json.loads(last)
        except ValueError:
            raise ValueError(
                f"{self._command[0]} printed {last[:200]!r}: its last line must be the reward, a "
                "number or an object of JSON"
            ) from None

    def _end(self, pid: int) -> None:
        """End a command with all that it started."""
        self._processes.discard(pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)

    def close(self) -> None:
        for pid in list(self._processes):
            self._end(pid)


def _load(target: str) -> Any:
    """Return what `module:name` or `file.py:name` names."""
    place, _, name = target.rpartition(":")
    if place.endswith(".py"):
        file = Path(place).resolve()
        sys.path.insert(1, str(file.parent))
        spec = importlib.util.spec_from_file_location(f"harness_{file.stem}", file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    if not hasattr(module, name):
        raise AttributeError(f"{place} has no {name!r}")
    return getattr(module, name)


def _plain(value: Any) -> Any:
    """Return a value with numbers of Python in place of those of NumPy."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.item() if getattr(value, "shape", None) == () else value


def _words(error: BaseException) -> str:
    """Return an error with its place, in one text of limited length."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:_MOST_FAILURE] + place


if __name__ == "__main__":
    main()
