"""Draft length per batch: how many tokens each decode forward verifies; without torch.

The choice maximizes expected tokens per second. With few sequences, more rows cost little; with
hundreds, each row costs time. The gain depends on the acceptance rate (`AcceptanceModel`). The
choice changes no token.

The extra time of a width is measured against steps without drafts, so widths that may pay off are
tried. As contexts grow, forwards that verify drafts update the estimated time of a plain forward.

When nothing is verified, text is still looked up every few steps, to keep its acceptance rate
current. The draft head only runs when its drafts are verified, so it is tried occasionally.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jetrl.memory.pages import ALWAYS_ROWS, MOST_ROWS
from jetrl.rollout.sizes import padded_batch

WIDTHS = (1, 2, 4, 8)  # Tokens of a sequence in a forward: the last one drawn, and drafts.
# Width, and rows of a forward per sequence.
_SHARES = ((2, 1.25), (2, 2), (4, 2), (4, 4), (8, 4), (8, 8))
_TILE = 64  # Rows per tile of a GEMM: a partial tile is not faster.
_GAIN = 1.02  # Minimum expected speedup for verifying drafts.
_TRIAL = 1.15  # The same for a width that has not run: its graph may need capturing.
_ASK_EVERY = 32  # Steps without verified drafts before the draft head is tried again.
_LOOK_UP_EVERY = 8  # Steps between look-ups while nothing is verified.
_FIRST_STEPS = 4  # Steps at the start that look drafts up.
_FRESH = 8  # Steps after a plain one in which the extra seconds of a width are measured.
_PROBE_EVERY = 64  # Steps with verified drafts between plain steps.
_KEPT = 0.8  # Decay of running means per decode step.
_LEAST, _MOST = 0.5, 2.0  # Bounds of the ratio of accepted to expected tokens.


@dataclass(frozen=True)
class Width:
    """The size of the forwards of a decode step; `rows` includes padded sequences.

    A sequence has at most `most` tokens: the last one drawn, then drafts. `drafts` is whether
    drafts are looked up.
    """

    most: int
    rows: int
    drafts: bool


@dataclass(frozen=True)
class Seen:
    """The drafts of a decode step, one entry per forward and running sequence.

    Attributes:
        drawn: int [N], tokens drawn.
        drafted: int [N], draft tokens verified.
        hit: int [N], 1 if the first token of the draft was drawn.
        offered: int [N], 1 if there was a draft.
        by_head: bool [N], whether the draft came from the draft head.
    """

    drawn: np.ndarray
    drafted: np.ndarray
    hit: np.ndarray
    offered: np.ndarray
    by_head: np.ndarray


@dataclass
class _Source:
    """Running means of the drafts from one source.

    `offered` is the fraction of forwards with a draft, `hit` with an accepted first token. `chain`
    is the acceptance rate of a token after an accepted one.
    """

    offered: float = 0.0
    hit: float = 0.0
    chain: float = 0.0

    def observe(self, seen: Seen, own: np.ndarray) -> None:
        """Add the drafts of a step; `own`, bool [N], marks those from this source."""
        hit, offered = seen.hit * own, seen.offered * own
        self.offered = mean(self.offered, float(offered.mean()))
        self.hit = mean(self.hit, float(hit.mean()))
        # `chain` is measured after accepted first tokens; without any, it follows the acceptance
        # rate of first tokens.
        several = (seen.drafted > 1) & (seen.drawn > 1) & (offered > 0)
        tried = np.minimum(seen.drafted, seen.drawn)[several] - 1
        if tried.sum() > 0:
            right = float((seen.drawn[several] - 2).sum())
            self.chain = mean(self.chain, right / float(tried.sum()))
        elif offered.any():
            self.chain = mean(self.chain, float(hit.sum()) / float(offered.sum()))

    def tokens(self, most: int) -> list[tuple[float, float]]:
        """Return (acceptance rate, fraction of sequences) per draft position."""
        if not self.offered:
            return []
        first = self.hit / self.offered
        return [(first * self.chain**i, self.offered) for i in range(most)]


@dataclass
class AcceptanceModel:
    """Expected accepted tokens, estimated from recent decode steps.

    A forward of B sequences and R rows spends R - B rows on the draft tokens most likely to be
    accepted, first positions first. Drafts from the draft head have up to `head_tokens` tokens, 0
    without a trained head. `ratio` compares accepted with expected tokens.
    """

    head_tokens: int = 0
    ratio: float = 1.0
    text: _Source = field(default_factory=_Source)
    head: _Source = field(default_factory=_Source)

    def observe(self, width: Width, forwards: int, seen: Seen) -> None:
        """Add a decode step with drafts, of at least one sequence."""
        if width.most > 1:
            sequences = len(seen.drawn) / forwards
            expected = self.tokens(sequences, width.most, width.rows) - 1
            if expected > 0:
                ratio = self.ratio * float(seen.drawn.mean() - 1) / expected
                self.ratio = mean(self.ratio, min(max(ratio, _LEAST), _MOST))
            self.head.observe(seen, seen.by_head)
        self.text.observe(seen, ~seen.by_head)

    def tokens(self, sequences: float, width: int, rows: int) -> float:
        """Return the expected tokens per sequence in a forward."""
        tokens = self.text.tokens(width - 1)
        tokens += self.head.tokens(min(width - 1, self.head_tokens))
        # Rows go to the most likely tokens first.
        left, gain = max(0.0, rows / sequences - 1), 0.0
        for chance, share in sorted(tokens, reverse=True):
            gain += chance * min(share, left)
            left -= min(share, left)
        return 1.0 + self.ratio * gain


def mean(before: float, now: float) -> float:
    return _KEPT * before + (1 - _KEPT) * now


class DraftWidths:
    """Chooses the `Width` of each step from acceptance rates and measured seconds.

    With `always`, each forward verifies drafts. `most` limits the tokens per sequence.
    """

    def __init__(self, always: bool, most: int = WIDTHS[-1]) -> None:
        self._always = always
        self._widths = [width for width in WIDTHS if width // 2 < most]
        self.acceptance = AcceptanceModel()
        self.times = _Times()
        self._steps = 0  # Steps observed so far.
        self._without = 0  # Steps since one that verified drafts.
        self._unasked = _ASK_EVERY

    def choose(self, sequences: int) -> Width:
        """Return the width of the next step's forwards."""
        size = padded_batch(sequences)
        if self._always:
            most = max(w for w in self._widths if w == 2 or size * w <= ALWAYS_ROWS)
            return Width(most, rows=size * most, drafts=True)
        most = 1
        rows = size
        # Until a plain forward has been timed, nothing is verified.
        if self.times.known(size):
            most, rows = self._fastest(size, sequences)
            self._unasked = self._unasked + 1 if most == 1 else 0
            # The acceptance rate of the head is only known from trials.
            if (
                self.acceptance.head_tokens
                and self._unasked > _ASK_EVERY
                and size * 2 <= ALWAYS_ROWS
            ):
                self._unasked = 0
                most = 2
                rows = size * 2
        if most > 1:
            self._without = 0
            return Width(most, rows, drafts=True)
        # Occasional look-ups keep the acceptance rate of text current.
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
            self.acceptance.observe(width, forwards, seen)

    def _fastest(self, size: int, sequences: int) -> tuple[int, int]:
        """Return the width and rows with the most expected tokens per second."""
        plain = self.times.plain[size]
        best = (1, size)
        rate = _GAIN / plain
        most_extra = 0.0
        for most, rows in choices(size):
            if most not in self._widths:
                continue
            tokens = self.acceptance.tokens(sequences, most, rows)
            extra = self.times.extra.get((size, most, rows))
            if extra is None:
                # Try it if it would pay off at the time of choices with fewer rows. The time per
                # row does not predict more, since times grow in tiles.
                if tokens / (plain + most_extra) >= _TRIAL / _GAIN * rate:
                    return most, rows
                continue
            if tokens / (plain + extra) > rate:
                best = (most, rows)
                rate = tokens / (plain + extra)
            most_extra = max(most_extra, extra)
        return best


@dataclass
class _Times:
    """Seconds per forward, by padded batch size.

    Attributes:
        plain: Seconds of a forward without drafts, per size.
        since: Steps since one without drafts, per size.
        extra: Seconds in addition to a plain forward, per (size, width, rows).
        last: Choice and seconds of the previous step, if it verified drafts.
    """

    plain: dict[int, float] = field(default_factory=dict)
    since: dict[int, int] = field(default_factory=dict)
    extra: dict[tuple[int, int, int], float] = field(default_factory=dict)
    last: tuple[tuple[int, int, int], float] | None = None

    def begin(self) -> None:
        """Forget the plain seconds, since the contexts of a new call differ."""
        self.plain.clear()
        self.since.clear()
        self.last = None

    def known(self, size: int) -> bool:
        """Return whether the seconds of a plain forward are recent."""
        return size in self.plain and self.since.get(size, 0) < _PROBE_EVERY

    def observe(self, size: int, width: Width, now: float) -> None:
        """Add the seconds of a forward to those of its width, or to the plain ones."""
        plain = self.plain.get(size)
        last, self.last = self.last, None
        if width.most == 1:
            self.plain[size] = now if plain is None or last is not None else (plain + now) / 2
            # Consecutive steps have the same contexts.
            if last is not None and last[0][0] == size:
                self.extra[last[0]] = max(0.0, last[1] - now)
            self.since[size] = 0
            return
        key = (size, width.most, width.rows)
        self.last = (key, now)
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
