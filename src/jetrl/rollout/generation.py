"""One call of `generate` as it runs: steps are scheduled, launched and taken in.

    schedule ─▶ prompts: forward, draw ─▶ ... the next steps ... ─▶ take in
             └▶ decode: forwards       ─▶

On a GPU a step is launched while the one before still runs, and decode steps have several forwards,
so that the device does not wait for Python. None of it changes a token.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from jetrl.rollout.decode import DecodeBatch
from jetrl.rollout.launched_step import LaunchedStep, mark, to_host
from jetrl.rollout.multi_turn import MultiTurn
from jetrl.rollout.prefill import Runner
from jetrl.rollout.prefill_draws import draw_tokens
from jetrl.rollout.progress import Progress, RolloutStats
from jetrl.rollout.scheduler import Scheduler, Step
from jetrl.rollout.sequence import RunningSequence
from jetrl.types import SamplingParams

ProgressCallback = Callable[[Progress], None]


class RolloutRun:
    """The steps of one call, to its end.

    Args:
        ended: told of each sequence that finishes. repeats: forwards of a decode step at most.
            ahead: steps that are launched before the draws of an earlier one are taken in.
            enough: groups that end the call once complete.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        decode: DecodeBatch,
        params: SamplingParams,
        dialogues: MultiTurn | None,
        progress: ProgressCallback | None,
        ended: Callable[[int], None],
        repeats: int,
        ahead: int,
        enough: int,
    ) -> None:
        self._scheduler, self._runner, self._decode = scheduler, runner, decode
        self._params, self._dialogues, self._progress = params, dialogues, progress
        self._ended = ended
        self._repeats, self._ahead, self._enough = repeats, ahead, enough
        self._in_flight: deque[LaunchedStep] = deque()
        self._drawn = self._prefilled = self._decoded = self._forwards = self._peak_pages = 0
        self._started = time.perf_counter()
        self._prefill_s = self._idle_s = 0.0
        self._last_ready: torch.cuda.Event | None = None

    def run(self, started: float) -> RolloutStats:
        """All of it. started: `time.perf_counter` when the call began."""
        self._started = started
        scheduler = self._scheduler
        while not scheduler.done and scheduler.num_complete_groups < self._enough:
            step = scheduler.schedule(self._repeats)
            if step is not None:
                self._peak_pages = max(self._peak_pages, scheduler.allocator.num_used)
                self._start(step)
            elif self._in_flight:
                self._take_in_oldest()
            else:
                assert self._dialogues is not None, "nothing to wait for"
                self._dialogues.take_in(wait=True)
                self._tell_ended()
        # What is still in flight is of sequences that have ended, or are cut off here.
        return self._stats()

    def _start(self, step: Step) -> None:
        self._runner.copy_pages(step)
        self._decode.forget(step)
        sequences = self._scheduler.sequences
        launch = self._decode.launch if step.decodes else self._launch_prompts
        self._in_flight.append(launch(step, sequences))
        if len(self._in_flight) > self._ahead:
            self._take_in_oldest()

    def _launch_prompts(self, step: Step, sequences: Sequence[RunningSequence]) -> LaunchedStep:
        device = self._runner.device
        began, called = mark(device), time.perf_counter()
        logits = self._runner.forward(step, sequences)
        drawn = draw_tokens(logits, step, sequences, self._params)
        tokens, logprobs = (to_host(x[None]) for x in drawn)
        if began is None:
            self._prefill_s += time.perf_counter() - called
        return LaunchedStep(step, tokens, logprobs, began, mark(device))

    def _take_in_oldest(self) -> None:
        launched = self._in_flight.popleft()
        drawn = launched.drawn()
        if launched.began is not None and launched.ready is not None:
            after = self._last_ready or launched.began
            self._idle_s += max(0.0, after.elapsed_time(launched.began)) / 1e3
            if not launched.step.decodes:
                self._prefill_s += launched.began.elapsed_time(launched.ready) / 1e3
            self._last_ready = launched.ready
        self._take_in(launched.step, drawn)

    def _take_in(self, step: Step, drawn: list[tuple[list[int], list[float]]]) -> None:
        taken = self._scheduler.complete(step, drawn)
        if self._dialogues is not None:
            self._dialogues.ask(step)
            self._dialogues.take_in(wait=False)
        self._forwards += step.repeats
        self._drawn += taken
        self._prefilled += step.num_prefill_tokens
        self._decoded += taken if step.decodes else 0
        self._tell_ended()
        if self._progress is not None:
            self._progress(self._progress_now())

    def _tell_ended(self) -> None:
        for index in self._scheduler.take_ended():
            self._ended(index)

    def _progress_now(self) -> Progress:
        scheduler, tokens = self._scheduler, self._drawn
        seconds = time.perf_counter() - self._started
        total, done = len(scheduler.sequences), scheduler.num_finished
        rate = tokens / seconds if seconds > 0 else 0.0
        # Those that have finished are the short ones. If each token were the last one with the same
        # probability, done / tokens, a sequence had tokens / done more, however long it is by now.
        room = (total - done) * self._params.max_tokens - (tokens - scheduler.finished_tokens)
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
        )
