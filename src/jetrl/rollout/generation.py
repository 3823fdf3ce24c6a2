"""The steps of one call of `generate`: they are scheduled, launched, and their draws taken in.

    schedule ─▶ prefill: forward, draw ─▶ ... the next steps ... ─▶ take in
             └▶ decode: forwards       ─▶

On a GPU a step is launched while the one before still runs, and a decode step has several forwards,
so that the device does not wait for Python. Neither changes a token.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from jetrl.rollout.decode import DecodeBatch
from jetrl.rollout.launched_step import LaunchedStep, mark, to_host
from jetrl.rollout.multi_turn import MultiTurn
from jetrl.rollout.prefill import Prefill
from jetrl.rollout.progress import Progress, RolloutStats
from jetrl.rollout.scheduler import ScheduledStep, Scheduler
from jetrl.rollout.sequence import RunningSequence

ProgressCallback = Callable[[Progress], None]


class Generation:
    """The run of one call of `generate`, to its end.

    Args:
        max_tokens: The most tokens of a completion, for the estimate of the time left.
        multi_turn: The conversations with an environment, or None.
        progress: Called after every step with the progress so far, or None.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        prefill: Prefill,
        decode: DecodeBatch,
        max_tokens: int,
        on_end: Callable[[int], None],
        multi_turn: MultiTurn | None,
        progress: ProgressCallback | None,
        repeats: int,
        ahead: int,
        enough: int,
    ) -> None:
        self._scheduler, self._prefill, self._decode = scheduler, prefill, decode
        self._max_tokens, self._multi_turn, self._progress = max_tokens, multi_turn, progress
        self._on_end = on_end
        self._repeats, self._ahead, self._enough = repeats, ahead, enough
        self._launched: deque[LaunchedStep] = deque()
        self._drawn = self._prefilled = self._decoded = self._forwards = self._peak_pages = 0
        self._started = time.perf_counter()
        self._prefill_s = self._idle_s = 0.0
        self._last_ready: torch.cuda.Event | None = None

    def run(self, started: float) -> RolloutStats:
        """Run all steps and return their counts.

        Args:
            started: The value of `time.perf_counter` when the call began.
        """
        self._started = started
        scheduler = self._scheduler
        while not scheduler.done and scheduler.num_complete_groups < self._enough:
            step = scheduler.schedule(self._repeats, self._decode.width)
            if step is not None:
                self._peak_pages = max(self._peak_pages, scheduler.allocator.num_used)
                self._launch(step)
            elif self._launched:
                # The next step depends on draws that are still on their way.
                self._take_in_oldest()
            else:
                # Every sequence waits for its environment.
                assert self._multi_turn is not None, "nothing to wait for"
                self._multi_turn.take_in(wait=True)
                self._report_ends()
        # Steps that are still on their way belong to sequences that have ended or are cut off here.
        return self._stats()

    def _launch(self, step: ScheduledStep) -> None:
        """Launch a step, and take in the draws of an earlier one if enough steps are ahead."""
        self._prefill.copy_pages(step)
        self._decode.forget(step)
        sequences = self._scheduler.sequences
        launch = self._decode.launch if step.decodes else self._launch_prefill
        self._launched.append(launch(step, sequences))
        if not step.decodes:
            self._decode.put_by()
        if len(self._launched) > self._ahead:
            self._take_in_oldest()

    def _launch_prefill(
        self, step: ScheduledStep, sequences: Sequence[RunningSequence]
    ) -> LaunchedStep:
        device = self._prefill.device
        began, called = mark(device), time.perf_counter()
        logits = self._prefill.forward(step, sequences)
        drawn = self._prefill.draw(logits, step, sequences)
        tokens, logprobs = (to_host(x[None]) for x in drawn)
        if began is None:
            self._prefill_s += time.perf_counter() - called
        return LaunchedStep(step, tokens, logprobs, began, mark(device))

    def _take_in_oldest(self) -> None:
        """Wait for the oldest launched step and give its draws to the sequences."""
        launched = self._launched.popleft()
        drawn = launched.drawn()
        seconds = launched.seconds
        if launched.began is not None and launched.ready is not None:
            # A GPU's own clock says how long the device had nothing to do before this step.
            after = self._last_ready or launched.began
            self._idle_s += max(0.0, after.elapsed_time(launched.began)) / 1e3
            if not launched.step.decodes:
                self._prefill_s += seconds
            self._last_ready = launched.ready
        step = launched.step
        taken = self._scheduler.complete(step, drawn)
        if step.decodes:
            self._decode.take_in(launched, seconds)
        if self._multi_turn is not None:
            self._multi_turn.ask(step)
            self._multi_turn.take_in(wait=False)
        self._forwards += step.repeats
        self._drawn += taken
        self._prefilled += step.num_prefill_tokens
        self._decoded += taken if step.decodes else 0
        self._report_ends()
        if self._progress is not None:
            self._progress(self._progress_now())

    def _report_ends(self) -> None:
        for index in self._scheduler.take_ended():
            self._decode.ended(self._scheduler.sequences[index])
            self._on_end(index)

    def _progress_now(self) -> Progress:
        scheduler, tokens = self._scheduler, self._drawn
        seconds = time.perf_counter() - self._started
        total, done = len(scheduler.sequences), scheduler.num_finished
        rate = tokens / seconds if seconds > 0 else 0.0
        # The finished sequences are the short ones. If each token were the last one with the same
        # probability, done / tokens, a sequence had tokens / done more, however long it is by now.
        room = (total - done) * self._max_tokens - (tokens - scheduler.finished_tokens)
        left = min(room, (total - done) * tokens / done) if done else room
        return Progress(
            sequences_done=done,
            sequences_total=total,
            tokens=tokens,
            tokens_per_s=rate,
            pages_in_use=scheduler.allocator.num_used,
            pages_total=scheduler.allocator.num_pages,
            seconds=seconds,
            eta_s=max(0.0, left) / rate if rate > 0 else None,
        )

    def _stats(self) -> RolloutStats:
        scheduler = self._scheduler
        graphs, capture_s = self._decode.captured
        return RolloutStats(
            prompts=scheduler.num_groups,
            sequences=len(scheduler.sequences),
            tokens_drawn=self._drawn,
            tokens_prefilled=self._prefilled,
            tokens_decoded=self._decoded,
            preemptions=scheduler.num_preemptions,
            forwards=self._forwards,
            peak_pages=self._peak_pages,
            pages_total=scheduler.allocator.num_pages,
            seconds=time.perf_counter() - self._started,
            prefill_s=self._prefill_s,
            device_idle_s=self._idle_s,
            graphs=graphs,
            capture_s=capture_s,
            speculation=self._decode.speculated(),
        )
