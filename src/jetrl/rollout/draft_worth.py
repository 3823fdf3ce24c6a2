"""The tokens that drafts are expected to bring, by what the last steps of decode saw; no torch.

Of a source, text or the draft head, a share o of the sequences has a draft. Its first token is
right with a chance p, and each next one, after one that was, with a chance a. A forward of B
sequences and R rows spends R - B rows on the tokens of drafts that are most likely right
(`kernels.decode_verify`): so of each source on all first tokens, on all second ones, and so on.

Text is looked up also where nothing is verified. The head is asked only where its guesses are, so
steps that verify nothing say nothing of it.
"""

from __future__ import annotations

import numpy as np

_KEPT = 0.8  # The share of a mean that a new step of decode leaves.
_LEAST, _MOST = 0.5, 2.0  # Bounds of what drafts bring beside what they are expected to.


class _Source:
    """The drafts of one source, as means of the last steps.

    Attributes:
        offered: The share of forwards with a draft of this source.
        hit: The share of forwards in which the first token of one was right.
        chain: The chance that the next token of a draft is right, after one that was.
    """

    def __init__(self) -> None:
        self.offered = self.hit = self.chain = 0.0

    def observe(
        self, drawn: np.ndarray, drafted: np.ndarray, hit: np.ndarray, offered: np.ndarray
    ) -> None:
        """Take in the drafts of a step, as `DraftWorth.observe`, of other sources with zeros."""
        self.offered = mean(self.offered, float(offered.mean()))
        self.hit = mean(self.hit, float(hit.mean()))
        # Of the drafts that were right in their first token and had a second: how many in that too,
        # and so on. Without any, the share of first tokens stands for it.
        several = (drafted > 1) & (drawn > 1) & (offered > 0)
        tried = np.minimum(drafted, drawn)[several] - 1
        if tried.sum() > 0:
            self.chain = mean(self.chain, float((drawn[several] - 2).sum()) / float(tried.sum()))
        elif offered.any():
            self.chain = mean(self.chain, float(hit.sum()) / float(offered.sum()))

    def tokens(self, most: int) -> list[tuple[float, float]]:
        """Return (chance to be right, share of sequences) of each token of a draft."""
        if not self.offered:
            return []
        first = self.hit / self.offered
        return [(first * self.chain**i, self.offered) for i in range(most)]


class DraftWorth:
    """The worth of drafts.

    Attributes:
        head_tokens: The most tokens of a draft of the draft head; 0 without a head that has
            learned anything.
    """

    def __init__(self) -> None:
        self._text, self._head = _Source(), _Source()
        self._brought = 1.0  # Beside what was expected.
        self.head_tokens = 0

    def observe(
        self,
        width: int,
        rows: int,
        forwards: int,
        drawn: np.ndarray,
        drafted: np.ndarray,
        hit: np.ndarray,
        offered: np.ndarray,
        by_head: np.ndarray,
    ) -> None:
        """Take in what a step of decode brought that looked drafts up.

        Args:
            width: The most tokens of a sequence in a forward.
            drawn: int [N], the tokens that each forward of a running sequence drew; N above 0.
            drafted: int [N], the tokens that it verified.
            hit: int [N], 1 where the first token of the draft was drawn.
            offered: int [N], 1 where there was a draft.
            by_head: bool [N], whether the draft was the draft head's.
        """
        if width > 1:
            expected = self.tokens(len(drawn) / forwards, width, rows) - 1
            if expected > 0:
                ratio = self._brought * float(drawn.mean() - 1) / expected
                self._brought = mean(self._brought, min(max(ratio, _LEAST), _MOST))
            self._head.observe(drawn, drafted, hit * by_head, offered * by_head)
        self._text.observe(drawn, drafted, hit * ~by_head, offered * ~by_head)

    def tokens(self, sequences: float, width: int, rows: int) -> float:
        """Return the expected tokens of a sequence in a forward.

        Args:
            width: The most tokens of a sequence in a forward.
        """
        tokens = self._text.tokens(width - 1)
        tokens += self._head.tokens(min(width - 1, self.head_tokens))
        left, gain = max(0.0, rows / sequences - 1), 0.0
        for chance, share in sorted(tokens, reverse=True):
            gain += chance * min(share, left)
            left -= min(share, left)
        return 1.0 + self._brought * gain


def mean(before: float, now: float) -> float:
    return _KEPT * before + (1 - _KEPT) * now
