"""Console display of a run: progress bar, one line per step, and sample completions.

In files, pipes and CI, output is plain text, and long phases report progress every 30 seconds. If
the reader of a pipe exits, the terminal closes or the disk is full, the console goes silent and the
run continues.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import IO

import rich.console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from jetrl.distributed.console import drop_output
from jetrl.distributed.world import world
from jetrl.runs.format import clip, count, duration, number, percent, spread, visible
from jetrl.runs.metrics import is_eval_mean, is_share
from jetrl.types import Metrics, Sample, StepStats

logger = logging.getLogger(__name__)

PLAIN_PROGRESS_S = 30.0
SAMPLE_ROWS = 4
_SILENT_S = 5.0
GOOD, BAD, QUIET = "green", "bold red", "dim"

Piece = tuple[str, str]
"""A piece of a line and its style."""


@contextlib.contextmanager
def announced_if_slow(what: str) -> Iterator[None]:
    """Print on rank 0's stderr what the process waits for, if the block takes over 5 seconds."""
    timer = threading.Timer(_SILENT_S, print, [what], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    if world().is_first:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Console:
    """Prints the progress of a run: RL steps, or supervised updates.

    Earlier attempts took `elapsed_s`. Completions are shown every `samples_every` steps; 0: never.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        first_step: int = 0,
        elapsed_s: float = 0.0,
        title: str = "step",
        samples_every: int = 10,
        lines_every: int = 1,
        file: IO[str] | None = None,
    ) -> None:
        self._total, self._first, self._last = total_steps, first_step, first_step
        self._title, self._samples_every, self._lines_every = title, samples_every, lines_every
        self._file = file if file is not None else sys.stdout
        self._began, self._elapsed_before = monotonic(), elapsed_s
        self._phase, self._phase_began, self._last_plain = "", self._began, self._began
        self._rich = rich.console.Console(file=file, highlight=False)
        self.interactive = self._rich.is_terminal and not self._rich.is_dumb_terminal
        self._bar: Progress | None = None
        if self.interactive:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=28),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                _Remaining(self._time_text),
                TextColumn("{task.fields[phase]}", style="cyan", markup=False),
                console=self._rich,
                transient=True,
            )
            self._task = self._bar.add_task(
                title, total=max(total_steps, 1), completed=first_step, phase=""
            )
            self._bar.start()

    def phase(self, name: str) -> None:
        self._phase, self._phase_began = name, monotonic()
        self._last_plain = self._phase_began
        if self._bar is not None:
            self._bar.update(self._task, phase=name)

    def progress(
        self,
        num_finished: int,
        total: int,
        tokens_per_s: float = 0.0,
        pages: tuple[int, int] | None = None,
        eta_s: float | None = None,
    ) -> None:
        """Show the progress of the phase; pages are (used, total) KV pages."""
        text = f"{self._phase} {count(num_finished)}/{count(total)}"
        if tokens_per_s:
            text += f", {count(tokens_per_s)} tokens/s"
        if pages is not None:
            text += f", {100 * pages[0] / pages[1]:.0f}% of the KV pages"
        if eta_s is not None:
            text += f", about {duration(eta_s)} left"
        now = monotonic()
        if self._bar is not None:
            self._bar.update(self._task, phase=text)
        elif now - self._last_plain >= PLAIN_PROGRESS_S:
            self._last_plain = now
            self._print([(f"  {text} after {duration(now - self._phase_began)}", QUIET)])

    def step(self, stats: StepStats) -> None:
        """Print the step's line, advance the bar, and show samples at their interval."""
        self._last = max(self._last, stats.step)
        if stats.step % self._lines_every == 0 or stats.step == self._total:
            self._print(_step_line(self._title, stats.step, self._total, stats.metrics))
        if self._bar is not None:
            self._bar.update(self._task, completed=self._last, phase="")
        every = self._samples_every
        if stats.samples and every and (stats.step % every == 0 or stats.step == self._first + 1):
            self.samples(stats.step, stats.samples)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        shown = spread(sorted(samples, key=lambda s: s.score.reward or 0.0), SAMPLE_ROWS)
        if self._bar is None:
            for s in shown:
                question, answer = clip(visible(s.prompt.asked), 60), visible(s.completion.text)
                raw = f"{question}  ->  {clip(answer, 100)}"
                read = f"{clip(visible(s.readable), 100)}   (written {raw})" if s.readable else raw
                self._print([(f"    reward {number(s.score.reward)}  {read}", "")])
            return
        table = Table(title=f"completions of step {step}", title_style=QUIET, border_style=QUIET)
        table.add_column("reward", justify="right")
        table.add_column("prompt", max_width=48)
        table.add_column("completion")
        if any(s.readable for s in shown):
            table.add_column("read", max_width=48)
        for s in shown:
            texts = ((s.prompt.asked, 120), (s.completion.text, 300), (s.readable, 120))
            cells = [Text(clip(visible(text), width)) for text, width in texts]
            table.add_row(number(s.score.reward), *cells[: len(table.columns) - 1])
        with self._unread():
            self._rich.print(table)

    def note(self, text: str) -> None:
        self._print([(visible(text, newlines=True), "")])

    def close(self) -> None:
        """Remove the bar and keep the lines; may be called twice."""
        if self._bar is not None:
            with self._unread():
                self._bar.stop()
            self._bar = None

    def _time_text(self) -> str:
        elapsed = monotonic() - self._began
        text = duration(elapsed + self._elapsed_before)
        num_steps = self._last - self._first
        if num_steps > 0 and self._last < self._total:
            left = elapsed / num_steps * (self._total - self._last)
            text += f" elapsed, {duration(left)} left"
        return text

    def _print(self, pieces: Sequence[Piece]) -> None:
        with self._unread():
            if self.interactive:
                self._rich.print(Text.assemble(*pieces), soft_wrap=True)
                return
            encoding = getattr(self._file, "encoding", None) or "utf-8"
            text = "".join(piece for piece, _ in pieces)
            self._file.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            self._file.flush()

    @contextlib.contextmanager
    def _unread(self) -> Iterator[None]:
        """Go silent if the reader is gone or the disk is full."""
        try:
            yield
        except OSError as error:
            logger.warning("cannot write to the console anymore (%s)", error.strerror)
            drop_output(self._file.fileno())


class _Remaining(ProgressColumn):
    def __init__(self, text: Callable[[], str]) -> None:
        super().__init__()
        self._text = text

    def render(self, task: Task) -> Text:
        return Text(self._text(), style=QUIET)


def _step_line(title: str, step: int, total: int, metrics: Metrics) -> list[Piece]:
    pieces: list[Piece] = [(f"{title} {step:>{len(str(total))}}/{total}", "bold")]

    def add(label: str, name: str, form: Callable[[float], str], style: str = "") -> None:
        if name in metrics:
            pieces.extend([(f"  {label} ", QUIET), (form(metrics[name]), style)])

    add("loss", "sft/loss", lambda v: f"{v:.4f}")
    for pairs in ("reward_model", "dpo"):
        add("right", f"{pairs}/accuracy", percent)
        add("eval", f"{pairs}/eval_accuracy", percent, "bold cyan")
    add("reward", "reward/mean", lambda v: f"{v:.3f}")
    for name in sorted(metrics):
        if is_eval_mean(name):
            form = percent if is_share(name, [metrics]) else number
            add(f"eval {visible(name[5:-5])}", name, form, "bold cyan")
            add("accuracy", f"{name.removesuffix('mean')}accuracy", percent, "bold cyan")
    add("length", "response_length/mean", lambda v: f"{v:.1f}")
    add("entropy", "policy/entropy", lambda v: f"{v:.3f}")
    different, compared = (metrics.get(f"mismatch/num_{k}") for k in ("different", "tokens"))
    if different is not None:
        text = f"{count(different)} different" + (f" of {count(compared)}" if compared else "")
        pieces += [("  mismatch ", QUIET), (text, BAD if different else GOOD)]
    elif compared == 0:
        pieces.append(("  mismatch nothing compared", QUIET))
    if metrics.get("reward/failures"):
        pieces.append((f"  {count(metrics['reward/failures'])} not scored (log.txt: why)", BAD))
    if "timing/step_s" in metrics:
        pieces.append((f"  {duration(metrics['timing/step_s'])}", ""))
    if "throughput/rollout_tokens_per_s" in metrics:
        pieces.append((f"  {count(metrics['throughput/rollout_tokens_per_s'])} tokens/s", ""))
    return pieces
