"""When a completion ends: stop ids, stop strings, length. No torch.

A stop string is looked for in the decoded text, not in the tokens: it may start and end in the
middle of a token and span several. Decoding everything again after each token would cost the square
of the length, and decoding each token alone is wrong (a character may take several byte tokens, and
some tokenizers put a space before a token or not depending on the one before it). So the text grows
through a small window of tokens, decoded together and committed once it ends in whole characters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Decode = Callable[[list[int]], str]

UNFINISHED_CHARACTER = "\ufffd"
# Tokens that decode to no whole character for this long are committed as they are: a bound on the
# window for models that write invalid bytes, far above the 4 bytes of the longest character.
MAX_WINDOW = 64


@dataclass(frozen=True)
class StopRules:
    """What ends a completion.

    max_tokens: at least 1. token_ids: a completion ends with, and includes, the first of these.
    strings: not empty ones; the text is cut before the first of these. decode: token ids to text
    without special tokens, needed where there are strings. max_turns: how often a stop may hand
    over to an environment and be gone on from, plus one; 1 where there is no environment.
    """

    max_tokens: int
    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    decode: Decode | None = None
    max_turns: int = 1

    def text_watch(self) -> TextWatch | None:
        """A fresh watch for one completion's text, or None when there is no stop string."""
        if not self.strings:
            return None
        assert self.decode is not None, "stop strings need a decoder"
        return TextWatch(self.strings, self.decode)


class TextWatch:
    """Decodes one completion as it grows and finds the first stop string in it.

    The window is `tokens[first:]`, of which `tokens[first:committed]` is context: it is already
    part of `_text` and is decoded again only so that what follows it is decoded as it would be in
    place.
    """

    def __init__(self, strings: tuple[str, ...], decode: Decode) -> None:
        self._strings = strings
        self._decode = decode
        self._reach = max(len(string) for string in strings) - 1
        self._text = ""
        self._first = 0
        self._committed = 0

    def update(self, tokens: list[int]) -> str | None:
        """Takes in the tokens added since the last call.

        Args:
            tokens: all tokens of the completion so far.

        Returns:
            The text before the first stop string once there is one, else None.
        """
        context = self._decode(tokens[self._first : self._committed])
        window = self._decode(tokens[self._first :])
        text = self._text + window[len(context) :]
        searched = max(0, len(self._text) - self._reach)
        found = [at for at in (text.find(string, searched) for string in self._strings) if at >= 0]
        if found:
            return text[: min(found)]
        whole = not window.endswith(UNFINISHED_CHARACTER)
        if whole or len(tokens) - self._committed >= MAX_WINDOW:
            self._text = text
            self._first = self._committed
            self._committed = len(tokens)
        return None
