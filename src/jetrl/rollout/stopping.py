"""The rule by which a completion ends: stop ids, stop strings, length; without torch.

`StopRules` applies the rule on the host, token by token, and has the last word. On
the device `kernels.decode` applies the part of the rule that needs no text (stop ids and length),
so that a decode step of several forwards stops early; draws past an end that only the host sees, at
a stop string, are dropped.

A stop string is looked for in the decoded text, not in the tokens: it may start and end in the
middle of a token and span several. Decoding everything again after each token would cost the square
of the length, and decoding each token alone is wrong (a character may take several byte tokens, and
some tokenizers put a space before a token or not depending on the one before it). So the text grows
through a small window of tokens, decoded together and committed once it ends in whole characters.
"""

from __future__ import annotations

from collections.abc import Callable
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
        max_tokens: The most tokens, at least 1, already limited to the model's context.
        token_ids: Ids that end the completion and belong to it.
        strings: Texts, none empty, that end the completion; its text is cut before the first.
        decode: Maps token ids to text without special tokens; needed for stop strings.
        max_turns: The most turns; at a stop before the last one an environment replies. 1 without
            an environment.
    """

    max_tokens: int
    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    decode: Decode | None = None
    max_turns: int = 1

    def text_watch(self) -> TextWatch | None:
        """Return a new watch for the text of one turn, or None when there is no stop string."""
        if not self.strings:
            return None
        assert self.decode is not None, "stop strings need a decoder"
        return TextWatch(self.strings, self.decode)

    def reason_to_stop(
        self, token_id: int, num_tokens: int, stop_string: bool
    ) -> Literal["stop", "length"] | None:
        """Return the reason why a completion or turn ends with a token, None if it continues.

        Args:
            token_id: The token drawn last.
            num_tokens: Tokens of the completion, this one included.
            stop_string: Whether the turn's text contains a stop string.
        """
        if token_id in self.token_ids or stop_string:
            return "stop"
        return "length" if num_tokens == self.max_tokens else None


class TextWatch:
    """The text of one turn as it grows, searched for the first stop string.

    The window is `tokens[first:]`, of which `tokens[first:committed]` is context: these tokens are
    part of `_text` already and are decoded again only so that the tokens after them decode as they
    would in the whole text.
    """

    def __init__(self, strings: tuple[str, ...], decode: Decode) -> None:
        self._strings = strings
        self._decode = decode
        self._reach = max(len(string) for string in strings) - 1
        self._text = ""
        self._first = 0
        self._committed = 0

    def update(self, tokens: list[int]) -> str | None:
        """Search the text that the newest tokens add.

        Args:
            tokens: All tokens of the turn so far.

        Returns:
            The text before the first stop string, None while no stop string has appeared.
        """
        context = self._decode(tokens[self._first : self._committed])
        window = self._decode(tokens[self._first :])
        text = self._text + window[len(context) :]
        searched = max(0, len(self._text) - self._reach)
        starts = [text.find(string, searched) for string in self._strings]
        starts = [start for start in starts if start >= 0]
        if starts:
            return text[: min(starts)]
        whole = not window.endswith(UNFINISHED_CHARACTER)
        if whole or len(tokens) - self._committed >= MAX_WINDOW:
            self._text = text
            self._first = self._committed
            self._committed = len(tokens)
        return None
