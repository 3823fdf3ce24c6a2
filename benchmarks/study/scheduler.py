"""Schedule the runs of a study: choose the next command, and record how each one ended.

A run takes two commands in child processes: `jetrl train`, then the evaluation of its final
weights. Its supervised start, if any, is trained first. Finished runs are skipped, interrupted runs
resume with the same bits, and a command that fails is retried once and then reported, while other
runs continue. A run that ends on non-finite numbers has collapsed, which is a result.

Runs start in the order of the queue. A trained run is evaluated before another run starts, since
its result exists only after the evaluation. With a time limit, a run that would not end in time
gives way to a shorter one.
"""

from __future__ import annotations

import math
import shutil
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from benchmarks.study.analysis import NOTHING_LEARNED, learned_nothing
from benchmarks.study.definition import Definition
from benchmarks.study.final_evaluation import has_weights
from benchmarks.study.plan import PlannedRun, PlannedStart, chosen, planned_runs, recipe_of
from benchmarks.study.processes import POLL_S, Child, Job, Pool, last_line
from benchmarks.study.progress import Progress, Standing
from benchmarks.study.results import (
    FINAL_EVALUATION,
    OUTCOME,
    End,
    FirstWeights,
    Outcome,
    Request,
    Results,
    outcome_file,
    request_file,
    request_of,
    result_of,
    write_stored,
)
from benchmarks.study.tables import shown_mean
from pydantic import Field, ValidationError

from jetrl.errors import NonFiniteError, UserError
from jetrl.files import read_stored, read_text
from jetrl.runs.attempts import is_locked, read_attempts, read_status, run_state
from jetrl.runs.directory import settings_that_differ
from jetrl.runs.format import clip, duration
from jetrl.runs.storage import storing, write_atomically
from jetrl.settings.loading import Settings, load_config
from jetrl.settings.section import Section


class _StudyTable(Section):
    """A table `[[study]]` of a queue file: the study file, and runs as `--only` names them."""

    file: str
    only: list[str] = Field(default_factory=list)


class _QueueFile(Section):
    study: Annotated[list[_StudyTable], Field(min_length=1)]


def read_queue(file: Path, only: Sequence[str]) -> tuple[Path, list[Sequence[str]]]:
    """Return the study file or results file, and the parts of the study in the order to run.

    Args:
        file: A study file, a results file, or a queue file whose tables all name one study.
        only: The words of `--only`, which a queue file has itself.
    """
    tables = _queue_tables(file)
    if tables is None:
        return file, [only]
    if only:
        raise UserError(f"{file} is a queue file, which says itself what is run: no --only")
    first = tables[0].file
    other = next((table.file for table in tables if table.file != first), None)
    if other is not None:
        raise UserError(f"{file} names {first} and {other}: give each study a queue of its own")
    return Path(first), [table.only for table in tables]


def _queue_tables(file: Path) -> list[_StudyTable] | None:
    """Return the tables of a queue file; None for another file."""
    if file.suffix == ".json":
        return None
    try:
        tree = tomllib.loads(read_text(file))
    except (OSError, UserError, ValueError, RecursionError):
        return None  # the reader of study files says what is wrong
    if not isinstance(tree.get("study"), list):
        return None
    try:
        return _QueueFile.model_validate(tree, strict=True).study
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"{file}: {key}: {first['msg']}; a [[study]] has file and only") from None


def runs_in_order(definition: Definition, parts: Sequence[Sequence[str]]) -> list[PlannedRun]:
    """Return the runs of a study that the parts of a queue name, each run once."""
    planned = planned_runs(definition)
    runs = {run.name: run for only in parts for run in chosen(planned, only)}
    return list(runs.values())


Stage = Literal["train", "evaluate", "done", "failed"]


@dataclass
class Item:
    """The state of a run, or of a start that runs wait for.

    Attributes:
        stage: The next command, or how the work ended.
        reason: The message with which the run ended or failed.
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


def look(item: Item, definition: Definition, results: Results) -> None:
    """Set the stage of a run or start by its files."""
    work = item.work
    if work.name in results.runs:
        item.stage = "done"
    elif is_locked(work.path):
        item.stage, item.reason = "failed", f"another process is writing {work.path}"
    elif has_begun(work, definition):
        if run_state(work.path) != "finished":
            return
        if isinstance(work, PlannedStart):
            item.stage = "done"
        elif has_weights(work.path):
            item.stage = "evaluate"
        else:
            item.stage = "failed"
            item.reason = (
                f"its training is finished, but {work.path} has no weights left to evaluate, and "
                f"{results.path} has no result of it. Put the results file back from a copy, or "
                "remove that run directory: the run is then trained again"
            )
    elif isinstance(work, PlannedStart) and (work.path / "model" / "config.json").is_file():
        item.stage = "done"  # a copy of its model; the name has the digest of the settings


def has_begun(work: PlannedRun | PlannedStart, definition: Definition) -> bool:
    """Return whether a run directory holds steps with the current settings.

    A default that changed since is no difference: the study file must set the same values as when
    the run began.
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
    recipe = recipe_file(work, definition)
    if recipe.is_file() and recipe.read_text(encoding="utf-8") == recipe_of(work.settings):
        said = work.settings.model_dump(mode="json", exclude_unset=True)
        if not any(f"{section}.{key}" in differing for section in said for key in said[section]):
            return True
    changes = ", ".join(f"{key}: {old} -> {new}" for key, (old, new) in differing.items())
    raise UserError(
        f"{work.path}: begun with other settings than {definition.source} now gives it "
        f"({clip(changes, 300)}); remove that folder, or call the study or the arm otherwise"
    )


def recipe_file(work: PlannedRun | PlannedStart, definition: Definition) -> Path:
    """Return the recipe file of a run's command."""
    return definition.out / "recipes" / f"{work.name}.toml"


def steps_done(path: Path) -> int:
    """Return the number of finished steps of a run, from its status file."""
    status = read_status(path) if path.is_dir() else None
    if status is None:
        return 0
    return max(status.step - 1, 0) if status.phase else status.step


def _dumped(settings: Settings) -> dict[str, dict[str, object]]:
    return settings.model_dump(mode="json")


MOST_FAILURES = 2


class Sitting:
    """The runs of a study while a command works at them: stages, results and failures."""

    def __init__(
        self,
        definition: Definition,
        runs: Sequence[PlannedRun],
        results: Results,
        tell: Callable[[str], None],
    ) -> None:
        self.definition, self.results, self._tell = definition, results, tell
        self._items = {run.name: Item(run) for run in runs}
        starts = {run.start.name: run.start for run in runs if run.start is not None}
        self._starts = {name: Item(start) for name, start in starts.items()}
        self._first_weights = FirstWeights(runs, results)
        self._killed: set[int] = set()  # process ids that kill_after ended
        self._earlier = set(results.runs)  # names of runs that were done before this sitting
        for item in self._items.values():
            look(item, definition, results)
        for item in self._starts.values():
            look(item, definition, results)
        for item in (*self._items.values(), *self._starts.values()):
            if item.stage == "failed":
                self._fail(item, item.reason)
        for folder, reason in self._first_weights.wrong_folders().items():
            self._fail_beginning(folder, reason)

    @property
    def left(self) -> list[str]:
        """The names of the runs that are neither done nor failed."""
        return [name for name, item in self._items.items() if not item.is_over]

    # Choosing the next command

    def next_job(self, has_room_for: Callable[[float], bool]) -> Job | None:
        """Return the next command, which counts as running from now on; None if none can start."""
        for item in self._items.values():
            if item.stage == "evaluate" and not item.running:
                return self._evaluation(item)
        for item in self._items.values():
            if item.stage == "train" and not item.running:
                next_item = self._next_to_train(item, has_room_for)
                if next_item is not None:
                    return self._training(next_item)
        return None

    def _next_to_train(self, item: Item, has_room_for: Callable[[float], bool]) -> Item | None:
        """Return the run, or the start that it waits for; None if it cannot begin now."""
        run = item.work
        assert isinstance(run, PlannedRun)
        expected_s = self._expected_s(run)
        if expected_s is not None and not has_room_for(expected_s):
            return None
        if run.start is None:
            return item
        start = self._starts[run.start.name]
        if start.stage == "done":
            return item
        return None if start.running else start

    def _expected_s(self, run: PlannedRun) -> float | None:
        """Return the longest time of a finished run at the same grid point, in seconds, or None."""
        finished = {
            name: done
            for name, done in self.results.runs.items()
            if done.point == run.point and done.end == "finished"
        }
        if not finished:
            return None
        here = [done for name, done in finished.items() if name not in self._earlier]
        left = 1 - steps_done(run.path) / run.steps
        return max(
            left * done.wall_s + done.seconds.get(FINAL_EVALUATION, 0.0)
            for done in here or finished.values()
        )

    def _training(self, item: Item) -> Job:
        """Return the command that trains a run or start, from its last checkpoint if any."""
        work = item.work
        recipe = recipe_file(work, self.definition)
        with storing(recipe):
            recipe.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(recipe, recipe_of(work.settings))
        command = ["sft"]
        if isinstance(work, PlannedRun):
            command = [*work.deviation.words(), "sft" if work.settings.task.is_text else "train"]
        resume = ["--resume"] if has_begun(work, self.definition) else []
        item.running = True
        return self._job(work.name, [*command, str(recipe), *resume])

    def _evaluation(self, item: Item) -> Job:
        """Return the command that evaluates the final weights of a run."""
        file = request_file(self.definition, item.work.name)
        write_stored(file, self._request(item))
        item.running = True
        return self._job(item.work.name, ["study", "--evaluate", str(file)])

    def _request(self, item: Item) -> Request:
        """Return the evaluation request of a run that has ended."""
        run = item.work
        assert isinstance(run, PlannedRun)
        sha256 = self._first_weights.sha256(run.settings.model.path)
        return request_of(self.definition, run, item.end, item.reason, sha256)

    def _job(self, name: str, words: Sequence[str]) -> Job:
        log = self.definition.out / "logs" / f"{name}.txt"
        return Job(name, words, log)

    # Recording how commands ended

    def _item_of(self, child: Child) -> Item:
        return self._items.get(child.job.name) or self._starts[child.job.name]

    def record(self, child: Child) -> None:
        """Record a command that has ended: its run or start moves to the next stage."""
        item, code = self._item_of(child), child.process.returncode
        item.running = False
        if code == 0:
            self._advance(item)
        elif code == NonFiniteError.exit_code and isinstance(item.work, PlannedRun):
            item.end, item.reason = "nonfinite", read_attempts(item.work.path)[-1].reason
            item.stage = "evaluate"
            if not has_weights(item.work.path):
                self._finish(item, Outcome(request=self._request(item)))
        elif child.process.pid in self._killed:
            self._tell(f"{item.work.name}: killed as arms.kill_after says; it is resumed")
        else:
            item.failures += 1
            reason = f"exit code {code}: {last_line(child.job.log)}"
            if item.failures >= MOST_FAILURES:
                self._fail(item, reason)
            else:
                self._tell(f"{item.work.name}: {clip(reason, 200)}; tried once more")

    def _advance(self, item: Item) -> None:
        """Move a run or start whose command succeeded to its next stage."""
        if isinstance(item.work, PlannedStart):
            try:
                self._first_weights.sha256(str(item.work.path / "model"))
            except UserError as error:
                self._fail(item, str(error))
                return
            item.stage = "done"
            self._tell(f"{item.work.name}: supervised start made")
        elif item.stage == "train":
            item.stage = "evaluate"
        else:
            file = outcome_file(request_file(self.definition, item.work.name))
            self._finish(item, read_stored(file, OUTCOME))

    def _finish(self, item: Item, outcome: Outcome) -> None:
        """Add the result of a run to the results file."""
        run = item.work
        assert isinstance(run, PlannedRun)
        result = result_of(self.definition, run, outcome)
        self.results.add(result, outcome.device)
        item.stage = "done"
        if not self.definition.study.keep_weights:
            for folder in ("checkpoints", "model"):
                shutil.rmtree(run.path / folder, ignore_errors=True)
        words = [f"{result.steps} steps in {duration(result.wall_s)}"]
        if result.common is not None and self.definition.reads_text:
            words.append(f"held-out loss {result.common.mean:.4f}")
        elif result.common is not None:
            words.append(f"held out {shown_mean(result.common.mean)}")
        if learned_nothing(result):
            words.append(f"{NOTHING_LEARNED}: see {self.definition.out / 'logs'}/{run.name}.txt")
        if result.end == "nonfinite":
            words.append(f"collapsed: {clip(result.reason, 120)}")
        self._tell(f"{run.name}: {', '.join(words)}")

    def _fail(self, item: Item, reason: str) -> None:
        """Record that a run or start has failed; the others continue."""
        item.stage, item.reason = "failed", reason
        self._tell(f"{item.work.name}: failed: {clip(reason, 300)}")
        if isinstance(item.work, PlannedRun):
            self.results.failed[item.work.name] = reason
            self.results.write()
        else:
            self._fail_beginning(str(item.work.path / "model"), reason)

    def _fail_beginning(self, folder: str, reason: str) -> None:
        """Record the failure of all runs that begin from a model; print one line."""
        refused = [
            item
            for item in self._items.values()
            if item.work.settings.model.path == folder and not item.is_over
        ]
        for item in refused:
            item.stage, item.reason = "failed", reason
            self.results.failed[item.work.name] = reason
        if refused:
            self.results.write()
            self._tell(f"{len(refused)} runs that begin from {folder} failed: {clip(reason, 300)}")

    # Kills and progress

    def kill_if_due(self, child: Child) -> None:
        """Kill a run at its next step of `kill_after`."""
        item = self._item_of(child)
        if not isinstance(item.work, PlannedRun) or item.stage != "train":
            return
        steps, path = self.definition.arms[item.work.arm].kill_after, item.work.path
        status = read_status(path) if steps and path.is_dir() else None
        if status is None or status.pid != child.process.pid:
            return  # this attempt has not begun
        killed = sum(attempt.ended is None for attempt in read_attempts(path)[:-1])
        if killed < len(steps) and steps_done(path) >= steps[killed]:
            self._killed.add(child.process.pid)
            child.process.kill()

    def standing(self) -> Standing:
        """Return the progress of the study."""
        work = work_done = 0.0
        running = []
        for item in self._items.values():
            assert isinstance(item.work, PlannedRun)
            settings = item.work.settings
            steps = item.work.steps
            done = steps
            if item.stage == "train":
                done = min(steps_done(item.work.path), steps)
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


@dataclass(frozen=True)
class TimeLimit:
    """The time limit of a command.

    Attributes:
        end: The end, by `time.monotonic`.
    """

    seconds: float
    end: float

    @property
    def is_over(self) -> bool:
        """True once the time is up."""
        return time.monotonic() > self.end

    def has_room_for(self, seconds: float) -> bool:
        """Return whether a run of this expected length should start now.

        A run longer than the whole limit may start: it is stopped at a checkpoint and resumed by a
        later command.
        """
        return seconds <= self.end - time.monotonic() or seconds > self.seconds


def work_off(
    sitting: Sitting, pool: Pool, progress: Progress, minutes: float | None = None
) -> None:
    """Make the runs of a study; runs that are going on at the end stop at a checkpoint.

    Args:
        minutes: The time limit in minutes; None: no limit.
    """
    progress.begin(sitting.standing())
    seconds = math.inf if minutes is None else 60 * minutes
    limit = TimeLimit(seconds, time.monotonic() + seconds)
    try:
        pool.warm_up(len(sitting.left))
        while True:
            for child in pool.ended():
                sitting.record(child)
            for child in pool.children:
                sitting.kill_if_due(child)
            while pool.has_place and (job := sitting.next_job(limit.has_room_for)):
                pool.start(job)
            progress.show(sitting.standing)
            if not pool.children:
                if sitting.left:
                    progress.event("none of the remaining runs would end within the time limit")
                return
            if limit.is_over:
                running = len(pool.children)
                progress.event(f"the time is up: {running} runs stop at a checkpoint")
                return
            time.sleep(POLL_S)
    finally:
        pool.stop()
        progress.close()
