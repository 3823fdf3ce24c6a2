"""The text of a completion as it grows, and the tool calls in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jetrl.rollout.stopping import MAX_WINDOW, UNFINISHED_CHARACTER

TOOL_CALL = "<tool_call>"
_CALLS = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


class TextStream:
    """The text of tokens in pieces that no later token changes.

    Held back: characters that are not whole yet, a run of byte tokens (one that is not UTF-8 is
    decoded otherwise as a whole), the beginning of a stop string, and what follows `until`, which
    is for the end.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stop: Sequence[str] = (),
        until: str = "",
        is_byte: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._decode, self._stop, self._until = decode, tuple(stop), until
        self._is_byte = is_byte
        self._tokens: list[int] = []
        # Tokens before `_read` are part of the text; those from `_first` are context of the rest.
        self._first = self._read = 0
        self._text = ""
        self._sent = 0
        self._pending = ""  # what is not whole, as it would be written at the end

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        self._tokens += token_ids
        context = self._decode(self._tokens[self._first : self._read])
        window = self._decode(self._tokens[self._first :])
        most_held = 0
        if window.endswith(UNFINISHED_CHARACTER):
            most_held = MAX_WINDOW
        elif self._ends_in_byte():
            most_held = MAX_WINDOW // 2  # a run may be long: the other half is to end a character
        if len(self._tokens) - self._read < most_held:
            self._pending = window[len(context) :]
            return ""
        self._pending = ""
        added = window[len(context) :]
        self._text += added
        # SentencePiece drops a space that no text precedes: special tokens alone are no context.
        if added:
            self._first = self._read
        self._read = len(self._tokens)
        if self._until and self._until in self._text[max(0, self._sent - len(self._until)) :]:
            return self._send(self._text.index(self._until))
        return self._send(len(self._text) - self._begun())

    def _ends_in_byte(self) -> bool:
        """Return whether the last token that has a text is a byte: special tokens end no run."""
        new = self._tokens[self._read :]
        if not any(map(self._is_byte, new)):
            return False
        with_text = (t for t in reversed(new) if self._is_byte(t) or self._decode([t]))
        return self._is_byte(next(with_text))

    def place(self, token_id: int) -> int:
        """Add a token; return where its character begins, counted in characters of the text."""
        length, pending = len(self._text), self._pending
        self.add([token_id])
        was_whole = bool(pending) and self._text.startswith(pending, length)
        return length + len(pending) * was_whole

    def finish(self, text: str) -> str:
        """Return the rest of the completion's whole text."""
        self._text = text
        return self._send(len(text))

    def _begun(self) -> int:
        """Return the length of the longest end of the text that begins a held string."""
        held = [string for string in (*self._stop, self._until) if string]
        longest = max(map(len, held), default=1) - 1
        for size in range(min(longest, len(self._text)), 0, -1):
            if any(string.startswith(self._text[-size:]) for string in held):
                return size
        return 0

    def _send(self, end: int) -> str:
        start, self._sent = self._sent, max(self._sent, end)
        return self._text[start : self._sent]


def no_number(name: str) -> float:
    """Raise ValueError for NaN and infinities, which JSON does not have."""
    raise ValueError(f"{name} is not a number of JSON")


@dataclass(frozen=True)
class ToolCall:
    """A call of a function; `arguments` is the JSON of an object."""

    name: str
    arguments: str


def tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Return the text before the first tool call, and the calls in Hermes's format.

    A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. If one is not whole, there
    are no calls, and the text is all of it.
    """
    if text.count(TOOL_CALL) != len(found := _CALLS.findall(text)) or not found:
        return text, []
    calls = []
    for written in found:
        try:
            call = json.loads(written, parse_constant=no_number)
            json.dumps(call, ensure_ascii=False).encode()  # an escape may be half of a character
        except (ValueError, RecursionError):
            return text, []
        arguments = call.get("arguments", {}) if isinstance(call, dict) else None
        if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
            return text, []
        calls.append(ToolCall(call["name"], json.dumps(arguments, ensure_ascii=False)))
    return text[: text.index(TOOL_CALL)], calls
