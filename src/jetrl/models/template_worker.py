"""The child's side of `template_process`: renders chat templates within limits of time and memory.

A request is a line of JSON, a reply the length of a JSON in 8 bytes and that JSON. The process ends
itself, by a timer that nothing in a template can put off, when a request takes too long; so it does
not outlive its parent either. The timer counts CPU time: a template waits for nothing, and a busy
machine is no fault of its.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

MOST_ERROR = 1000  # characters of a template's error


def main(limit_s: float, memory_mib: int) -> None:
    """Answer requests until standard input ends.

    Args:
        limit_s: The seconds of CPU time that a request may take.
    """
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + memory_mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        reply = _reply(line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(len(reply).to_bytes(8, "little") + reply)
        replies.flush()


def _reply(line: bytes) -> bytes:
    """Return the reply to a request: the rendered text, or the reason why there is none."""
    try:
        return json.dumps({"text": _rendered(json.loads(line))}).encode()
    except MemoryError:
        return b'{"error": "it takes too much memory"}'
    except Exception as error:  # a template is a program: what it raises is its author's choice
        text = str(error)[:MOST_ERROR] or type(error).__name__
        return json.dumps({"error": text}).encode()


def _rendered(request: dict[str, Any]) -> str:
    """Return the text of a request's messages, as `apply_chat_template` renders it."""
    rendered: Any = render_jinja_template(
        conversations=[request["messages"]],
        chat_template=request["template"],
        add_generation_prompt=request["open_turn"],
        **request["special_tokens"],
    )
    text: str = rendered[0][
        0
    ]  # of the first conversation, beside the spans that generated text has
    return text
