"""Chat templates, rendered in a process of their own.

A chat template is a program that comes with a model directory. transformers' sandbox keeps it from
files and attributes, not from loops within loops and texts of gigabytes. So it is rendered in a
child process (`template_worker`) with a limit of time and of memory, which is started when the
first template is rendered and kept.
"""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

from transformers import PreTrainedTokenizerBase

from jetrl.models.tokenizer_files import MOST_TEMPLATE

LIMIT_S = 5.0
MEMORY_MIB = 512
_CACHED = 2**16  # bytes of a request whose text is kept

_PROGRAM = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
sys.modules["torch"] = None  # transformers renders without it, and starts in half a second
from jetrl.models.template_worker import main
main(float(sys.argv[2]), int(sys.argv[3]))
"""


class TemplateError(Exception):
    """A template did not give a text; the message says why."""


class TemplateProcess:
    """The process that renders templates, started again where one ended it.

    Args:
        limit_s: The seconds of CPU time that a template may take.
    """

    def __init__(self, limit_s: float = LIMIT_S, memory_mib: int = MEMORY_MIB) -> None:
        self._limit_s, self._memory_mib = limit_s, memory_mib
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def render(self, request: bytes) -> str:
        """Return the text of a request, a line of JSON.

        Raises:
            TemplateError: The template raised an error, took too much time or memory, or gave a
                text that is far longer than the request.
        """
        most = 2**16 + 8 * len(request)  # the reply's messages are at most as long as the request's
        with self._lock:
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(request + b"\n")
                process.stdin.flush()
                reply = _read_reply(process.stdout, most)
            except (BrokenPipeError, EOFError, ValueError):
                self._process = None
                raise TemplateError(self._why_ended(process)) from None
            except TemplateError:
                self.close()
                raise
            except BaseException:  # Ctrl-C between a request and its reply
                self._process = None
                process.kill()
                raise
        if "error" in reply:
            raise TemplateError(reply["error"])
        return str(reply["text"])

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            limits = (str(self._limit_s), str(self._memory_mib))
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path), *limits],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the parent
            )
        return self._process

    def _why_ended(self, process: subprocess.Popen[bytes]) -> str:
        """Return the reason why the process ended within a request."""
        process.kill()
        code = process.wait()
        if code == -signal.SIGPROF:
            return f"it takes longer than {self._limit_s:g} s of CPU time"
        return f"the process that renders it ended ({code}), for lack of memory or by a crash"


def _read_reply(stream: IO[bytes], most: int) -> dict[str, Any]:
    """Return the next reply of a process, of at most `most` bytes."""
    head = stream.read(8)
    size = int.from_bytes(head, "little")
    if len(head) < 8:
        raise EOFError
    if size > most:
        raise TemplateError(f"it gives a text of {size:,} bytes, and at most {most:,} are read")
    body = stream.read(size)
    if len(body) < size:
        raise EOFError
    reply = json.loads(body)
    if not isinstance(reply, dict) or not ({"text", "error"} & reply.keys()):
        raise ValueError("not a reply")
    return reply


@functools.cache
def _shared() -> TemplateProcess:
    return TemplateProcess()


@functools.lru_cache(maxsize=256)  # a conversation's fixed parts are rendered for each reply
def _rendered(request: bytes) -> str:
    return _shared().render(request)


def render_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], open_turn: bool
) -> str:
    """Return the text of messages by a tokenizer's chat template, as `apply_chat_template` does.

    Raises:
        TemplateError: The template is too long; or as `TemplateProcess.render`.
    """
    template = tokenizer.get_chat_template()
    if len(template) > MOST_TEMPLATE:
        raise TemplateError(f"it has {len(template):,} characters, at most {MOST_TEMPLATE:,}")
    request = {
        "template": template,
        "messages": [{k: v for k, v in m.items() if v is not None} for m in messages],
        "open_turn": open_turn,
        "special_tokens": tokenizer.special_tokens_map,
    }
    line = json.dumps(request, default=str).encode()
    return _rendered(line) if len(line) < _CACHED else _shared().render(line)
