"""The rule by which a completion ends: stop ids, stop strings, length; without torch.

`StopRules` applies the rule on the host, token by token, and has the last word. `kernels.decode` is
its device form, without text: it only lets a step of several forwards stop early, by the shared
stop ids and a last position per sequence.

A stop string is looked for in the decoded text, since it may span several tokens. Decoding all text
after each token would cost the square of the length, and a character may take several byte tokens.
So the text grows through a small window of tokens, committed once it ends in whole
characters. The draws of a step are searched together, and one by one if they have a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Decode = Callable[[list[int]], str]

UNFINISHED_CHARACTER = "\ufffd"
# So many tokens that decode to no whole character are committed as they are: a bound on the window
# for models that write invalid bytes, far above the 4 bytes of the longest character.
MAX_WINDOW = 64


@dataclass(frozen=True)
class StopRules:
    """The limits of one completion.

    Attributes:
        max_tokens: At least 1, already limited to the model's context.
        token_ids: Stop ids, which belong to the completion.
        strings: Stop strings, none empty; the text is cut before the first.
        decode: Maps token ids to text without special tokens; None without stop strings.
        max_turns: At a stop before the last turn an environment replies; 1 without an environment.
    """

    max_tokens: int
    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    decode: Decode | None = None
    max_turns: int = 1

    def text_watch(self, start: int = 0) -> TextWatch | None:
        """Return a new watch for the turn that starts at a token; None without stop strings."""
        if not self.strings:
            return None
        assert self.decode is not None, "stop strings need a decoder"
        return TextWatch(self.strings, self.decode, start)

    def none_ends(self, token_ids: Sequence[int], num_tokens: int) -> bool:
        """Return whether none of the newest tokens ends the completion, stop strings apart."""
        return (
            num_tokens + len(token_ids) < self.max_tokens
            and self.token_ids.isdisjoint(token_ids)
            and min(token_ids, default=0) >= 0
        )

    def reason_to_stop(
        self, token_id: int, num_tokens: int, stop_string: bool
    ) -> Literal["stop", "length"] | None:
        """Return why a completion or turn ends with a token, None if it continues."""
        if token_id in self.token_ids or stop_string:
            return "stop"
        return "length" if num_tokens == self.max_tokens else None


class TextWatch:
    """The text of one turn as it grows, searched for the first stop string.

    The window is `tokens[first:]`. Of it `tokens[first:committed]` is context: part of `_text`
    already, decoded again only so that later tokens decode as in the whole text.
    """

    def __init__(self, strings: tuple[str, ...], decode: Decode, start: int = 0) -> None:
        self._strings = strings
        self._decode = decode
        self._reach = max(len(string) for string in strings) - 1
        self._text = ""
        self._start = start
        self._first = self._committed = start
        # A character that is not whole yet decodes to the mark, which is gone with its last byte: a
        # stop string with the mark would have to be looked for after each token.
        self._at_once = not any(UNFINISHED_CHARACTER in string for string in strings)

    def pass_over(self, tokens: list[int], added: Sequence[int]) -> bool:
        """Add several tokens at once; return False, adding none, if `update` has to see each."""
        if not self._at_once or len(added) >= MAX_WINDOW:
            return False
        text, window = self._decoded([*tokens[self._first :], *added])
        if UNFINISHED_CHARACTER in window or self._ends(text) is not None:
            return False
        self._commit(text, len(tokens) + len(added))
        return True

    def update(self, tokens: list[int]) -> str | None:
        """Return the text before the first stop string; None while none has appeared."""
        text, window = self._decoded(tokens[self._first :])
        if self._ends(text) is not None:
            # A later byte may change how earlier byte tokens decode, also committed ones: the text
            # that is kept is decoded at once, as without stop strings.
            whole = self._decode(tokens[self._start :])
            end = self._first_stop(whole, 0)
            if end is not None:
                return whole[:end]
        # Tokens are committed once they end in whole characters.
        is_whole = not window.endswith(UNFINISHED_CHARACTER)
        if is_whole or len(tokens) - self._committed >= MAX_WINDOW:
            self._commit(text, len(tokens))
        return None

    def _decoded(self, window_tokens: list[int]) -> tuple[str, str]:
        """Return the turn's text up to the end of a window, and the window's own text."""
        context = self._decode(window_tokens[: self._committed - self._first])
        window = self._decode(window_tokens)
        return self._text + window[len(context) :], window

    def _ends(self, text: str) -> int | None:
        return self._first_stop(text, max(0, len(self._text) - self._reach))

    def _first_stop(self, text: str, searched: int) -> int | None:
        starts = [text.find(string, searched) for string in self._strings]
        return min((start for start in starts if start >= 0), default=None)

    def _commit(self, text: str, num_tokens: int) -> None:
        # SentencePiece drops a space that no text precedes: special tokens alone are no context.
        if text != self._text:
            self._first = self._committed
        self._text, self._committed = text, num_tokens
