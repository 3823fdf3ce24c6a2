"""A sitting at a study: its runs are worked off until all are done, or a limit or a signal ends it.

Each run is a child process, `jetrl train`, followed by one that evaluates its final weights; its
supervised start, if it has one, comes before. What is done is skipped, what was cut is resumed with
the same bits, and what fails is tried once more and then reported, while the others go on. A run
that ends on numbers that are not finite has collapsed: that is a result.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jetrl.errors import NonFiniteError, UserError
from jetrl.files import read_stored
from jetrl.runs.attempts import is_locked, read_attempts, run_state
from jetrl.runs.directory import settings_that_differ
from jetrl.runs.format import clip, duration
from jetrl.runs.jsonl import write_atomically
from jetrl.runs.status import read_status
from jetrl.runs.storing import storing
from jetrl.settings.loading import Settings, load_config, to_toml
from jetrl.study.collecting import result_of, sha256_of_model
from jetrl.study.definition import Definition
from jetrl.study.final_evaluation import (
    OUTCOME,
    Outcome,
    Request,
    has_weights,
    outcome_file,
)
from jetrl.study.plan import PlannedRun, PlannedStart
from jetrl.study.processes import POLL_S, Child, Job, Pool, last_line
from jetrl.study.progress import Progress, Standing
from jetrl.study.results import End, Results

MOST_FAILURES = 2
PROGRAM = (sys.executable, "-m", "jetrl")
Stage = Literal["train", "evaluate", "done", "failed"]


@dataclass
class _Item:
    """A piece of work: a run of the study, or a start that runs wait for.

    Attributes:
        work: The run or the start.
        stage: What is to be done next, or how it ended.
        running: Whether a child process is at it.
        failures: How often a child process failed.
        end: How the run ended.
        reason: The message that the run ended or failed with.
    """

    work: PlannedRun | PlannedStart
    stage: Stage = "train"
    running: bool = False
    failures: int = 0
    end: End = "finished"
    reason: str = ""

    @property
    def is_over(self) -> bool:
        """True if nothing is left to do."""
        return self.stage in ("done", "failed")


class Sitting:
    """A sitting at a study.

    Args:
        definition: The definition of the study.
        runs: The runs to work off.
        results: The results so far, which those of the runs are added to.
        pool: The places for child processes.
        minutes: The minutes after which no run is begun and those that run are stopped at a
            checkpoint; None: no limit.

    Raises:
        UserError: The results, or a run directory, are of other settings.
    """

    def __init__(
        self,
        definition: Definition,
        runs: Sequence[PlannedRun],
        results: Results,
        pool: Pool,
        minutes: float | None = None,
    ) -> None:
        self.definition, self.results, self.pool = definition, results, pool
        self._limit_s = None if minutes is None else 60 * minutes
        self._items = {run.name: _Item(run) for run in runs}
        starts = {run.start.name: run.start for run in runs if run.start is not None}
        self._starts = {name: _Item(start) for name, start in starts.items()}
        self._sha256: dict[str, str] = {}
        for item in self._items.values():
            self._look(item)
        for item in self._starts.values():
            self._look(item)
        self.progress = Progress(self._standing())

    @property
    def left(self) -> list[str]:
        """The names of the runs that are neither done nor failed."""
        return [name for name, item in self._items.items() if not item.is_over]

    def work_off(self) -> None:
        """Work off the runs; those that are running at the end are stopped at a checkpoint.

        Raises:
            KeyboardInterrupt, Terminated: A signal; the runs were stopped before.
            StorageError: A file of the study could not be written; likewise.
        """
        began = time.monotonic()
        try:
            while self._goes_on():
                if self._limit_s is not None and time.monotonic() - began > self._limit_s:
                    running = len(self.pool.children)
                    self.progress.event(f"the time is up: {running} runs stop at a checkpoint")
                    return
                time.sleep(POLL_S)
        finally:
            self.pool.stop()
            for child in self.pool.ended():  # those that came to their end meanwhile
                self._item_of(child).running = False
            self.progress.close()

    def _goes_on(self) -> bool:
        """Take in what has ended, start what can be started; return whether anything is running."""
        for child in self.pool.ended():
            self._take_in(child)
        for child in self.pool.children:
            self._kill_if_due(child)
        while self.pool.has_place:
            job = self._next_job()
            if job is None:
                break
            self.pool.start(job)
        self.progress.show(self._standing)
        return bool(self.pool.children)

    # What is to be done

    def _look(self, item: _Item) -> None:
        """Set the stage of a piece of work to what its files say."""
        work = item.work
        result = self.results.runs.get(work.name)
        if result is not None:
            if result.digest != work.digest:
                raise UserError(
                    f"{self.results.path}: the run {work.name} was made with other settings than "
                    f"{self.definition.source} now gives it; delete it there, or call the study "
                    "or the arm otherwise"
                )
            item.stage = "done"
        elif is_locked(work.path):
            item.stage, item.reason = "failed", f"another process is writing {work.path}"
        elif self._has_begun(work):
            state = run_state(work.path)
            if state == "finished":
                item.stage = "evaluate" if isinstance(work, PlannedRun) else "done"

    def _has_begun(self, work: PlannedRun | PlannedStart) -> bool:
        """Return whether a run directory holds steps that were made with the present settings.

        Raises:
            UserError: It holds steps of other settings.
        """
        config = work.path / "config.toml"
        if not config.is_file():
            return False
        before = load_config(config)
        if before == work.settings:
            return True
        metrics = work.path / "metrics.jsonl"
        if not (metrics.is_file() and metrics.stat().st_size):
            return False  # it ended before its first step, and may begin with other settings
        differing = settings_that_differ(_dumped(before), _dumped(work.settings))
        changes = ", ".join(f"{key}: {old} -> {new}" for key, (old, new) in differing.items())
        raise UserError(
            f"{work.path}: begun with other settings than {self.definition.source} now gives it "
            f"({clip(changes, 300)}); remove that folder, or call the study or the arm otherwise"
        )

    def _next_job(self) -> Job | None:
        """Return the next command that can be started; None if there is none."""
        for item in self._items.values():
            if item.is_over or item.running:
                continue
            start = item.work.start if isinstance(item.work, PlannedRun) else None
            if start is not None and item.stage == "train":
                prior = self._starts[start.name]
                if prior.stage == "failed":
                    self._fail(item, f"its start {start.name} failed: {prior.reason}")
                    continue
                if prior.stage != "done":
                    if not prior.running:
                        return self._training(prior)
                    continue
            return self._training(item) if item.stage == "train" else self._evaluation(item)
        return None

    def _training(self, item: _Item) -> Job:
        """Return the command that trains, from the last checkpoint if there is one."""
        work = item.work
        recipe = self.definition.out / "recipes" / f"{work.name}.toml"
        with storing(recipe):
            recipe.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(recipe, to_toml(work.settings))
        command = "train" if isinstance(work, PlannedRun) else "sft"
        resume = ["--resume"] if self._has_begun(work) else []
        item.running = True
        return self._job(work.name, [*PROGRAM, command, str(recipe), *resume])

    def _evaluation(self, item: _Item) -> Job:
        """Return the command that evaluates the final weights of a run."""
        section, file = self.definition.eval, self._request_file(item)
        request = Request(
            run=str(item.work.path),
            preset=section.preset,
            own=section.own,
            prompts=section.prompts,
            samples=section.samples,
            temperature=section.temperature,
            top_p=section.top_p,
            seed=section.seed,
        )
        with storing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps(request.model_dump(mode="json")) + "\n")
        item.running = True
        return self._job(item.work.name, [*PROGRAM, "study", "--evaluate", str(file)])

    def _request_file(self, item: _Item) -> Path:
        return self.definition.out / "evaluations" / f"{item.work.name}.json"

    def _job(self, name: str, words: Sequence[str]) -> Job:
        return Job(name, words, self.definition.out / "logs" / f"{name}.txt")

    # What has ended

    def _item_of(self, child: Child) -> _Item:
        return self._items.get(child.job.name) or self._starts[child.job.name]

    def _take_in(self, child: Child) -> None:
        """Go on with a piece of work whose child process has ended."""
        item, code = self._item_of(child), child.process.returncode
        item.running = False
        if code == 0:
            self._advance(item)
        elif code == NonFiniteError.exit_code and isinstance(item.work, PlannedRun):
            item.end, item.reason = "nonfinite", read_attempts(item.work.path)[-1].reason
            item.stage = "evaluate"
            if not has_weights(item.work.path):
                self._finish(item, None)
        elif self._was_killed_on_purpose(child):
            self.progress.event(f"{item.work.name}: killed as arms.kill_after says; it is resumed")
        else:
            item.failures += 1
            reason = f"exit code {code}: {last_line(child.job.log)}"
            if item.failures >= MOST_FAILURES:
                self._fail(item, reason)
            else:
                self.progress.event(f"{item.work.name}: {clip(reason, 200)}; tried once more")

    def _advance(self, item: _Item) -> None:
        """Go on with a piece of work whose child process came to its end."""
        if isinstance(item.work, PlannedStart):
            item.stage = "done"
            self.progress.event(f"{item.work.name}: supervised start made")
        elif item.stage == "train":
            item.stage = "evaluate"
        else:
            outcome = read_stored(outcome_file(self._request_file(item)), OUTCOME)
            self._finish(item, outcome)

    def _finish(self, item: _Item, outcome: Outcome | None) -> None:
        """Take down the result of a run."""
        run = item.work
        assert isinstance(run, PlannedRun)
        sha256 = "" if run.start is None else self._sha256_of_start(run.start)
        result = result_of(self.definition, run, item.end, item.reason, outcome, sha256)
        self.results.add(result, outcome.device if outcome else "")
        item.stage = "done"
        if not self.definition.study.keep_weights:
            for folder in ("checkpoints", "model"):
                shutil.rmtree(run.path / folder, ignore_errors=True)
        words = [f"{result.steps} steps in {duration(result.wall_s)}"]
        if outcome is not None:
            words.append(f"held out {100 * outcome.common.mean:.1f}%")
        if item.end == "nonfinite":
            words.append(f"collapsed: {clip(item.reason, 120)}")
        self.progress.event(f"{run.name}: {', '.join(words)}")

    def _sha256_of_start(self, start: PlannedStart) -> str:
        """Return the SHA-256 of the weights of a start, from which its runs began.

        Raises:
            UserError: Results that are there already began from other weights.
        """
        if start.name not in self._sha256:
            own = sha256_of_model(start.path / "model")
            for item in self._items.values():
                done = self.results.runs.get(item.work.name)
                same = isinstance(item.work, PlannedRun) and item.work.start == start
                if done is not None and same and done.start_sha256 != own:
                    raise UserError(
                        f"{start.path}: other weights than {done.name} in {self.results.path} "
                        "began from (another machine or version); put that start back from a copy, "
                        "or begin the results anew"
                    )
            self._sha256[start.name] = own
        return self._sha256[start.name]

    def _fail(self, item: _Item, reason: str) -> None:
        """Take down that a piece of work has failed; the others go on."""
        item.stage, item.reason = "failed", reason
        self.progress.event(f"{item.work.name}: failed: {clip(reason, 300)}")
        if isinstance(item.work, PlannedRun):
            self.results.failed[item.work.name] = reason
            self.results.write()

    # Kills, and the standing

    def _kill_if_due(self, child: Child) -> None:
        """Kill a run that has come to a step of its arm's kill_after."""
        item = self._item_of(child)
        if not isinstance(item.work, PlannedRun) or item.stage != "train":
            return
        steps = self.definition.arms[item.work.arm].kill_after
        if not steps:
            return
        killed = sum(attempt.ended is None for attempt in read_attempts(item.work.path)[:-1])
        if killed < len(steps) and _steps_done(item.work.path) >= steps[killed]:
            child.kill()

    def _was_killed_on_purpose(self, child: Child) -> bool:
        item = self._item_of(child)
        if not isinstance(item.work, PlannedRun) or item.stage != "train":
            return False
        steps = self.definition.arms[item.work.arm].kill_after
        killed = sum(attempt.ended is None for attempt in read_attempts(item.work.path))
        return child.process.returncode == -9 and 0 < killed <= len(steps)

    def _standing(self) -> Standing:
        """Return the standing of the study."""
        work = work_done = 0.0
        running = []
        for item in self._items.values():
            assert isinstance(item.work, PlannedRun)
            settings = item.work.settings
            steps = settings.loop.steps
            done = steps
            if item.stage == "train":
                done = min(_steps_done(item.work.path), steps)
            if item.running and item.stage == "train":
                running.append(f"{item.work.name} {done}/{steps}")
            elif item.running:
                running.append(f"{item.work.name} evaluated")
            work += steps * settings.rollout.max_tokens
            work_done += done * settings.rollout.max_tokens
        running += [f"{name} trained" for name, item in self._starts.items() if item.running]
        stages = [item.stage for item in self._items.values()]
        return Standing(
            stages.count("done"), stages.count("failed"), len(stages), work_done, work, running
        )


def _steps_done(path: Path) -> int:
    """Return how many steps a run has made, by its status file."""
    status = read_status(path) if path.is_dir() else None
    if status is None:
        return 0
    return max(status.step - 1, 0) if status.phase else status.step


def _dumped(settings: Settings) -> dict[str, dict[str, object]]:
    return settings.model_dump(mode="json")
