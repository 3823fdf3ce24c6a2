"""The number of tokens that a forward of decode verifies, chosen for the batch; without torch.

A forward of Q tokens a sequence takes longer than one of 1, by how much depends on the batch: a few
sequences hardly notice, hundreds pay for every row. What it brings depends on the drafts. So the
width is the one with the most expected tokens a second:

    tokens(Q) = 1 + h * (1 + a + a^2 + ... + a^(Q - 2))

where h is the share of forwards in which a draft's first token is right, and a the chance that the
next one is, after one that was. Both are means of the last steps, of text and of the draft head by
themselves, whose tokens are added. Text is looked up also where nothing is verified, so its h is
known there too. The head is asked only where its guesses are verified; so where none is, a step is,
once in a while. Seconds are those of the last steps of a size and width; of a
width that has not run, those of a forward of width 1, changed by what the two took when their
graphs were captured, with no sequence in them.

Nothing here changes a token.
"""

from __future__ import annotations

import numpy as np

from jetrl.rollout.batch_sizes import padded_batch

WIDTHS = (1, 2, 4, 8)  # Tokens of a sequence in a forward: the last one drawn, and drafts.
_KEPT = 0.8  # The share of a mean that a new step of decode leaves.
_GAIN = 1.05  # The expected gain from which on drafts are verified: what is left is the risk.
_TRIAL = 1.15  # The same, where a width has not run and its graph is not captured.
_ALWAYS_ROWS = 256  # Tokens of a forward where drafts are always verified, if not two a sequence.
_MOST_ROWS = 1024  # Tokens of a forward at most, where the width is chosen.
_ASK_EVERY = 32  # Steps without a verified draft after which the draft head is asked again.


class _Worth:
    """The worth of one source's drafts, as means of the last steps.

    Attributes:
        hit: The share of forwards in which the first token of a draft of this source was right.
        chain: The chance that the next token of a draft is right, after one that was.
    """

    def __init__(self) -> None:
        self.hit = self.chain = 0.0

    def tokens(self, most: int) -> float:
        """Return the tokens that drafts of at most so many tokens are expected to bring."""
        return self.hit * sum(self.chain**i for i in range(most))

    def observe(
        self, drawn: np.ndarray, drafted: np.ndarray, hit: np.ndarray, offered: np.ndarray
    ) -> None:
        """Take in the drafts of a step, as `DraftWidths.observe`, of other sources with zeros."""
        self.hit = _KEPT * self.hit + (1 - _KEPT) * float(hit.mean())
        # Of the drafts that were right in their first token and had a second: how many in that too,
        # and so on. Without any, the share of first tokens stands for it.
        several = (drafted > 1) & (drawn > 1) & (offered > 0)
        tried = np.minimum(drafted, drawn)[several] - 1
        if tried.sum() > 0:
            chain = float((drawn[several] - 2).sum()) / float(tried.sum())
        elif offered.any():
            chain = float(hit.sum()) / float(offered.sum())
        else:
            return
        self.chain = _KEPT * self.chain + (1 - _KEPT) * chain


class DraftWidths:
    """The choice of the tokens that a forward verifies.

    Args:
        always: Whether each forward verifies drafts; otherwise only where that is faster.
        most: The most tokens of a sequence that a forward can use.

    Attributes:
        head_tokens: The most tokens of a draft of the draft head; 0 without a head that has
            learned anything.
    """

    def __init__(self, always: bool, most: int = WIDTHS[-1]) -> None:
        self._always = always
        self._widths = [width for width in WIDTHS if width // 2 < most]
        self._seconds: dict[tuple[int, int], float] = {}
        self._idle: dict[tuple[int, int], float] = {}
        self._text, self._head = _Worth(), _Worth()
        self.head_tokens = 0
        self._unasked = _ASK_EVERY

    def choose(self, rows: int) -> int:
        """Return the width of the next step.

        Args:
            rows: The sequences of the step.
        """
        size = padded_batch(rows)
        if self._always:
            return max(w for w in self._widths if w == 2 or size * w <= _ALWAYS_ROWS)
        plain = self._seconds.get((size, 1))
        if plain is None:
            return 1  # How long a forward takes has to be known first.
        best = self._best(size, plain)
        self._unasked = self._unasked + 1 if best == 1 else 0
        if self.head_tokens and self._unasked > _ASK_EVERY and size * 2 <= _ALWAYS_ROWS:
            self._unasked = 0
            return 2
        return best

    def _best(self, size: int, plain: float) -> int:
        """Return the width with the most expected tokens a second.

        Args:
            size: The rows of the step's graph.
            plain: The seconds of a forward of width 1.
        """
        best, rate, slope = 1, _GAIN / plain, 0.0
        for width in self._widths[1:]:
            if size * width > _MOST_ROWS:
                break
            tokens, seconds = self._tokens(width), self._expected_seconds(size, width)
            if seconds is None:
                # Tried where it pays if a token more costs what it cost up to the width before.
                guess = plain + slope * (width - 1)
                return width if tokens / guess >= _TRIAL / _GAIN * rate else best
            if tokens / seconds > rate:
                best, rate = width, tokens / seconds
            slope = max(0.0, (seconds - plain) / (width - 1))
        return best

    def captured(self, rows: int, width: int, seconds: float) -> None:
        """Take in how long a forward takes in which no sequence runs.

        Args:
            rows: The rows of its graph.
            width: The tokens of a row.
            seconds: The seconds of the forward.
        """
        self._idle[rows, width] = seconds

    def observe(
        self,
        rows: int,
        width: int,
        forwards: int,
        seconds: float,
        drawn: np.ndarray,
        drafted: np.ndarray,
        hit: np.ndarray,
        offered: np.ndarray,
        by_head: np.ndarray,
    ) -> None:
        """Take in what a step of decode brought.

        Args:
            rows: The sequences of the step.
            width: The most tokens of a sequence in a forward.
            forwards: The number of forwards.
            seconds: The seconds of all of them.
            drawn: int [N], the tokens that each forward of a running sequence drew.
            drafted: int [N], the tokens that it verified.
            hit: int [N], 1 where the first token of the draft was drawn.
            offered: int [N], 1 where there was a draft.
            by_head: bool [N], whether the draft was the draft head's.
        """
        size = (padded_batch(rows), width)
        now = seconds / forwards
        before = self._seconds.get(size, now)
        self._seconds[size] = 0.5 * before + 0.5 * now
        if not len(drawn):
            return
        self._text.observe(drawn, drafted, hit * ~by_head, offered * ~by_head)
        if width > 1:
            self._head.observe(drawn, drafted, hit * by_head, offered * by_head)

    def _tokens(self, width: int) -> float:
        """Return the expected tokens of a sequence in a forward."""
        guessed = self._head.tokens(min(width - 1, self.head_tokens))
        return 1.0 + self._text.tokens(width - 1) + guessed

    def _expected_seconds(self, size: int, width: int) -> float | None:
        """Return the expected seconds of a forward; None where nothing is known of its width."""
        known = self._seconds.get((size, width))
        idle, plain_idle = self._idle.get((size, width)), self._idle.get((size, 1))
        if known is None and idle is not None and plain_idle is not None:
            known = self._seconds[size, 1] + idle - plain_idle
        return known
