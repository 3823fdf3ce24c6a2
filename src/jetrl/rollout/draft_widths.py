"""The choice of how many tokens a forward of decode verifies, per batch; without torch.

The choice maximizes expected tokens per second: a few sequences hardly notice more rows, hundreds
pay for every row, and the gain depends on the drafts (`DraftWorth`). It changes no token.

The extra time of a choice is measured next to steps without drafts, so a choice that may pay is
tried. Contexts grow meanwhile: for a while a forward that verifies tells the time of a plain one.

When nothing is verified, text is looked up every few steps so that its worth stays known. The
draft head only guesses when its guesses are verified, so it is tried at times.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jetrl.memory.pages import ALWAYS_ROWS, MOST_ROWS
from jetrl.rollout.sizes import padded_batch

_KEPT = 0.8  # The share of a mean that a new step of decode leaves.
_LEAST, _MOST = 0.5, 2.0  # Bounds of what drafts bring next to what they are expected to.


@dataclass(frozen=True)
class Seen:
    """The drafts of a step of decode, an entry per forward and sequence that ran in it.

    Attributes:
        drawn: int [N], tokens drawn.
        drafted: int [N], of these the verified draft tokens.
        hit: int [N], 1 if the first token of the draft was drawn.
        offered: int [N], 1 if there was a draft.
        by_head: bool [N], whether the draft was the draft head's.
    """

    drawn: np.ndarray
    drafted: np.ndarray
    hit: np.ndarray
    offered: np.ndarray
    by_head: np.ndarray


@dataclass
class _Source:
    """Running means of one source's drafts.

    `offered` and `hit` are shares of forwards: with a draft, and with a right first token. `chain`
    is the chance that the next token is right after one that was.
    """

    offered: float = 0.0
    hit: float = 0.0
    chain: float = 0.0

    def observe(self, seen: Seen, own: np.ndarray) -> None:
        """Add the drafts of a step, of which `own`, bool [N], came from this source."""
        hit, offered = seen.hit * own, seen.offered * own
        self.offered = mean(self.offered, float(offered.mean()))
        self.hit = mean(self.hit, float(hit.mean()))
        # Of the drafts that were right in their first token and had a second: how many in that too,
        # and so on. Without any, the share of first tokens stands for it.
        several = (seen.drafted > 1) & (seen.drawn > 1) & (offered > 0)
        tried = np.minimum(seen.drafted, seen.drawn)[several] - 1
        if tried.sum() > 0:
            right = float((seen.drawn[several] - 2).sum())
            self.chain = mean(self.chain, right / float(tried.sum()))
        elif offered.any():
            self.chain = mean(self.chain, float(hit.sum()) / float(offered.sum()))

    def tokens(self, most: int) -> list[tuple[float, float]]:
        """Return (chance to be right, share of sequences) of each token of a draft."""
        if not self.offered:
            return []
        first = self.hit / self.offered
        return [(first * self.chain**i, self.offered) for i in range(most)]


@dataclass
class DraftWorth:
    """The tokens that drafts are expected to bring, from the last steps of decode.

    A forward of B sequences and R rows spends R - B rows on the draft tokens that are most likely
    right: of each source on all first tokens, on all second ones, and so on. A draft of the draft
    head has up to `head_tokens`, 0 without a trained head. `brought` is the ratio of the tokens
    that drafts brought to the expected ones.
    """

    head_tokens: int = 0
    brought: float = 1.0
    text: _Source = field(default_factory=_Source)
    head: _Source = field(default_factory=_Source)

    def observe(self, width: Width, forwards: int, seen: Seen) -> None:
        """Add a step of decode that looked drafts up, of at least one sequence."""
        if width.most > 1:
            sequences = len(seen.drawn) / forwards
            expected = self.tokens(sequences, width.most, width.rows) - 1
            if expected > 0:
                ratio = self.brought * float(seen.drawn.mean() - 1) / expected
                self.brought = mean(self.brought, min(max(ratio, _LEAST), _MOST))
            self.head.observe(seen, seen.by_head)
        self.text.observe(seen, ~seen.by_head)

    def tokens(self, sequences: float, width: int, rows: int) -> float:
        """Return the expected tokens per sequence in a forward."""
        tokens = self.text.tokens(width - 1)
        tokens += self.head.tokens(min(width - 1, self.head_tokens))
        # The likeliest tokens have rows first.
        left, gain = max(0.0, rows / sequences - 1), 0.0
        for chance, share in sorted(tokens, reverse=True):
            gain += chance * min(share, left)
            left -= min(share, left)
        return 1.0 + self.brought * gain


def mean(before: float, now: float) -> float:
    return _KEPT * before + (1 - _KEPT) * now


WIDTHS = (1, 2, 4, 8)  # Tokens of a sequence in a forward: the last one drawn, and drafts.
# Such a width, and the rows of a forward for each sequence.
_SHARES = ((2, 1.25), (2, 2), (4, 2), (4, 4), (8, 4), (8, 8))
_TILE = 64  # Rows of a forward come in steps of so many, as in a GEMM: fewer are not faster.
_GAIN = 1.02  # The expected gain from which on drafts are verified: what is left is the risk.
_TRIAL = 1.15  # The same for a choice that has not run, whose graph is perhaps not captured.
_ASK_EVERY = 32  # Steps without a verified draft after which the draft head is asked again.
_LOOK_UP_EVERY = 8  # Steps without a verified draft from one that looks drafts up to the next.
_FIRST_STEPS = 4  # Steps at the start that look drafts up.
_FRESH = 8  # Steps after one without drafts by which a choice's seconds are measured.
_PROBE_EVERY = 64  # Steps that verify drafts, from one that does not to the next.


@dataclass(frozen=True)
class Width:
    """The size of a decode step's forwards; `rows` includes padded sequences.

    A sequence has at most `most` tokens: the last one drawn, and drafts, looked up if `drafts`.
    """

    most: int
    rows: int
    drafts: bool


class DraftWidths:
    """The choice of a step's `Width` by the worth of drafts and the seconds of forwards.

    With `always` each forward verifies drafts; a sequence has at most `most` tokens in it.
    """

    def __init__(self, always: bool, most: int = WIDTHS[-1]) -> None:
        self._always = always
        self._widths = [width for width in WIDTHS if width // 2 < most]
        self.worth = DraftWorth()
        self.times = _Times()
        self._steps = 0  # Steps observed so far.
        self._without = 0  # Steps since one that verified drafts.
        self._unasked = _ASK_EVERY

    def choose(self, sequences: int) -> Width:
        """Return what the forwards of the next step verify."""
        size = padded_batch(sequences)
        if self._always:
            most = max(w for w in self._widths if w == 2 or size * w <= ALWAYS_ROWS)
            return Width(most, size * most, True)
        most, rows = 1, size
        # Until a plain forward has been timed, nothing is verified.
        if self.times.known(size):
            most, rows = self._fastest(size, sequences)
            self._unasked = self._unasked + 1 if most == 1 else 0
            # The head only guesses for a forward that verifies, so its worth needs a trial.
            if self.worth.head_tokens and self._unasked > _ASK_EVERY and size * 2 <= ALWAYS_ROWS:
                self._unasked = 0
                most, rows = 2, size * 2
        if most > 1:
            self._without = 0
            return Width(most, rows, True)
        # Text is looked up now and then, so that its worth stays known.
        self._without += 1
        looks_up = self._steps < _FIRST_STEPS or self._without % _LOOK_UP_EVERY == 1
        return Width(1, size, looks_up)

    def observe(
        self, sequences: int, width: Width, forwards: int, seconds: float, seen: Seen
    ) -> None:
        """Add the result of a decode step."""
        self._steps += 1
        self.times.observe(padded_batch(sequences), width, seconds / forwards)
        if len(seen.drawn) and width.drafts:
            self.worth.observe(width, forwards, seen)

    def _fastest(self, size: int, sequences: int) -> tuple[int, int]:
        """Return the width and the rows with the most expected tokens per second."""
        plain = self.times.plain[size]
        best, rate, most_extra = (1, size), _GAIN / plain, 0.0
        for most, rows in choices(size):
            if most not in self._widths:
                continue
            tokens = self.worth.tokens(sequences, most, rows)
            extra = self.times.extra.get((size, most, rows))
            if extra is None:
                # Tried where it pays if it takes no longer than choices of fewer rows. What a row
                # more takes says little, since times grow in steps.
                if tokens / (plain + most_extra) >= _TRIAL / _GAIN * rate:
                    return most, rows
                continue
            if tokens / (plain + extra) > rate:
                best, rate = (most, rows), tokens / (plain + extra)
            most_extra = max(most_extra, extra)
        return best


@dataclass
class _Times:
    """The seconds of forwards, by the sequences of their graphs.

    Attributes:
        plain: By size, the seconds of a forward without drafts.
        since: By size, steps since one without drafts.
        extra: By (size, width, rows), the seconds on top of a plain forward's.
        last: Choice and seconds of the previous step, if it verified drafts.
    """

    plain: dict[int, float] = field(default_factory=dict)
    since: dict[int, int] = field(default_factory=dict)
    extra: dict[tuple[int, int, int], float] = field(default_factory=dict)
    last: tuple[tuple[int, int, int], float] | None = None

    def begin(self) -> None:
        """Forget the plain seconds: the contexts of a new call differ."""
        self.plain.clear()
        self.since.clear()
        self.last = None

    def known(self, size: int) -> bool:
        """Return whether the seconds of a plain forward are known well enough."""
        return size in self.plain and self.since.get(size, 0) < _PROBE_EVERY

    def observe(self, size: int, width: Width, now: float) -> None:
        """Add the seconds of a forward, to its own width or to what all widths share."""
        plain, last, self.last = self.plain.get(size), self.last, None
        if width.most == 1:
            self.plain[size] = now if plain is None or last is not None else (plain + now) / 2
            # Of two steps side by side, contexts are the same.
            if last is not None and last[0][0] == size:
                self.extra[last[0]] = max(0.0, last[1] - now)
            self.since[size] = 0
            return
        key = (size, width.most, width.rows)
        self.last = key, now
        self.since[size] = self.since.get(size, 0) + 1
        if plain is None:
            return
        extra = self.extra.get(key)
        if extra is None or self.since[size] <= _FRESH:
            measured = max(0.0, now - plain)
            self.extra[key] = measured if extra is None else (extra + measured) / 2
        else:
            self.plain[size] = (plain + max(now - extra, 0.0)) / 2


def choices(size: int) -> list[tuple[int, int]]:
    """Return the widths and rows with which forwards of a size may verify drafts."""
    found = set()
    for width, share in _SHARES:
        rows = min(size * width, -(-int(size * share) // _TILE) * _TILE)
        if rows <= MOST_ROWS:
            found.add((width, rows))
    return sorted(found, key=lambda choice: (choice[1], choice[0]))
