"""Working off the runs of studies: what comes next, and what is recorded at the end.

Each run is a command in a child process, `jetrl train`, followed by one that evaluates its final
weights; its supervised start, if it has one, comes before. What is done is skipped, what was cut is
resumed with the same bits, and what fails is tried once more and then reported, while the others
continue. A run that ends on non-finite numbers has collapsed: that is a result.

A free place goes to the first part of the queue that has a command to start, so places that the
last runs of one study leave free go to the next study. A trained run is evaluated before anything
else begins, since nothing is kept of it until then. With a time limit, a run that would not end in
time leaves its place to a shorter one.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
import tomllib
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from benchmarks.study.analysis import NOTHING_LEARNED, learned_nothing
from benchmarks.study.definition import Definition
from benchmarks.study.final_evaluation import has_weights
from benchmarks.study.plan import PlannedRun, PlannedStart, chosen, planned_runs, recipe_of
from benchmarks.study.processes import POLL_S, Child, Job, Pool, last_line
from benchmarks.study.results import (
    FINAL_EVALUATION,
    OUTCOME,
    End,
    FirstWeights,
    Outcome,
    Request,
    Results,
    kept_outcome,
    outcome_file,
    request_file,
    request_of,
    result_of,
    write_stored,
)
from pydantic import Field, ValidationError

from jetrl.errors import NonFiniteError, UserError
from jetrl.files import read_stored, read_text
from jetrl.runs.attempts import is_locked, read_attempts, read_status, run_state
from jetrl.runs.directory import settings_that_differ
from jetrl.runs.format import clip, duration, visible
from jetrl.runs.storage import storing, write_atomically
from jetrl.settings.loading import Settings, load_config
from jetrl.settings.section import Section


@dataclass(frozen=True)
class Entry:
    """An entry of a queue: a study file, and the runs of that study.

    Attributes:
        file: The study file, or the results file of a study.
        only: Names of arms, AXIS=VALUE and seed=NUMBER, as of `--only`; none: all runs.
        place: The queue file that it stands in, for messages; "": the command line.
    """

    file: Path
    only: Sequence[str]
    place: str = ""


class _StudyTable(Section):
    """A table `[[study]]` of a queue file."""

    file: str
    only: list[str] = Field(default_factory=list)


class _QueueFile(Section):
    """The tables of a queue file."""

    study: Annotated[list[_StudyTable], Field(min_length=1)]


def entries_of(files: Sequence[Path], only: Sequence[str]) -> list[Entry]:
    """Return the entries of study files and queue files, in their order."""
    entries: list[Entry] = []
    for file in files:
        tables = _tables_of(file)
        if tables is None:
            entries.append(Entry(file, only))
        elif only:
            raise UserError(f"{file} is a queue file, which says itself what is run: no --only")
        else:
            entries += [Entry(Path(table.file), table.only, str(file)) for table in tables]
    return entries


def _tables_of(file: Path) -> list[_StudyTable] | None:
    """Return the tables of a queue file; None for another file."""
    if file.suffix == ".json":
        return None
    try:
        tree = tomllib.loads(read_text(file))
    except (OSError, UserError, ValueError, RecursionError):
        return None
    if not isinstance(tree.get("study"), list):
        return None
    try:
        return _QueueFile.model_validate(tree, strict=True).study
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"{file}: {key}: {first['msg']}; a [[study]] has file and only") from None


Stage = Literal["train", "evaluate", "collect", "done", "failed"]


@dataclass
class Item:
    """A piece of work: a run of the study, or a start that runs wait for.

    Attributes:
        stage: What is to be done next, or how it ended.
        reason: The message that the run ended or failed with.
        outcome: The outcome that an earlier sitting left, where it has only to be collected.
    """

    work: PlannedRun | PlannedStart
    stage: Stage = "train"
    running: bool = False
    failures: int = 0
    end: End = "finished"
    reason: str = ""
    outcome: Outcome | None = None

    @property
    def is_over(self) -> bool:
        """True if nothing is left to do."""
        return self.stage in ("done", "failed")


def look(item: Item, definition: Definition, results: Results) -> None:
    """Set the stage of a piece of work to what its files say."""
    work = item.work
    result = results.runs.get(work.name)
    if result is not None:
        assert isinstance(work, PlannedRun)  # a start has no result
        item.stage = "done"
    elif is_locked(work.path):
        item.stage, item.reason = "failed", f"another process is writing {work.path}"
    elif has_begun(work, definition):
        if isinstance(work, PlannedRun):
            _look_at_ended(item, work, definition, results)
        elif run_state(work.path) == "finished":
            item.stage = "done"
    elif isinstance(work, PlannedStart) and (work.path / "model" / "config.json").is_file():
        item.stage = "done"  # its model was put there from a copy; its name has the digest


def _look_at_ended(item: Item, run: PlannedRun, definition: Definition, results: Results) -> None:
    """Set the stage of a run that has a directory and no result, if its training ended."""
    outcome = kept_outcome(definition, run)
    if isinstance(outcome, Outcome):
        item.stage, item.outcome = "collect", outcome
    elif run_state(run.path) == "finished":
        item.stage = "evaluate"
        if not has_weights(run.path):
            item.stage = "failed"
            item.reason = (
                f"its training is finished, but {run.path} has no weights left to evaluate "
                "(study.keep_weights = false removes them once a run is in the results), "
                f"{results.path} has no result of it, and {outcome}. Put the results file or the "
                "outcome back from a copy, or remove that run directory: the run is then trained "
                "again"
            )


def has_begun(work: PlannedRun | PlannedStart, definition: Definition) -> bool:
    """Return whether a run directory holds steps that were made with the present settings.

    A setting that only its default gives a value keeps the one that the run began with: what counts
    is that the study says of the run what it said when the run began.
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
    """Return the file of a run's recipe, with which its command is started."""
    return definition.out / "recipes" / f"{work.name}.toml"


def steps_done(path: Path) -> int:
    """Return how many steps a run has made, by its status file."""
    status = read_status(path) if path.is_dir() else None
    if status is None:
        return 0
    return max(status.step - 1, 0) if status.phase else status.step


def _dumped(settings: Settings) -> dict[str, dict[str, object]]:
    return settings.model_dump(mode="json")


MOST_FAILURES = 2


class Sitting:
    """A sitting at a study."""

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
        self._killed: set[int] = set()  # ids of processes that were killed for kill_after
        self._earlier = set(results.runs)  # names of runs that were done before this sitting
        for item in self._items.values():
            look(item, definition, results)
        for item in self._starts.values():
            look(item, definition, results)
        for item in self._items.values():
            if item.outcome is not None:
                self._finish(item, item.outcome, "put back into the results")
        for item in (*self._items.values(), *self._starts.values()):
            if item.stage == "failed":
                self._fail(item, item.reason)
        for folder, reason in self._first_weights.wrong_folders().items():
            self._fail_beginning(folder, reason)

    @property
    def left(self) -> list[str]:
        """The names of the runs that are neither done nor failed."""
        return [name for name, item in self._items.items() if not item.is_over]

    # What is to be done

    def next_evaluation(self, names: Container[str]) -> Job | None:
        """Return the evaluation of a trained run, which counts as running then, or None."""
        for name, item in self._items.items():
            if name in names and item.stage == "evaluate" and not item.running:
                return self._evaluation(item)
        return None

    def next_training(
        self, names: Container[str], has_room_for: Callable[[float], bool]
    ) -> Job | None:
        """Return the next training of a run or its start, which counts as running then, or None."""
        for name, item in self._items.items():
            if name not in names or item.stage != "train" or item.running:
                continue
            run = item.work
            assert isinstance(run, PlannedRun)
            expected_s = self._expected_s(run)
            if expected_s is not None and not has_room_for(expected_s):
                continue
            if run.start is None:
                return self._training(item)
            prior = self._starts[run.start.name]
            if prior.stage == "done":
                return self._training(item)
            if not prior.running:
                return self._training(prior)
        return None

    def _expected_s(self, run: PlannedRun) -> float | None:
        """Return the most seconds of a finished run at the same grid point, or None."""
        finished = {
            name: done
            for name, done in self.results.runs.items()
            if done.point == run.point and done.end == "finished"
        }
        if not finished:
            return None
        here = [done for name, done in finished.items() if name not in self._earlier]
        left = 1 - steps_done(run.path) / run.settings.loop.steps
        return max(
            left * done.wall_s + done.seconds.get(FINAL_EVALUATION, 0.0)
            for done in here or finished.values()
        )

    def _training(self, item: Item) -> Job:
        """Return the command that trains a run from its beginning or its last checkpoint."""
        work = item.work
        recipe = recipe_file(work, self.definition)
        with storing(recipe):
            recipe.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(recipe, recipe_of(work.settings))
        command = ["sft"]
        if isinstance(work, PlannedRun):
            command = [*work.deviation.words(), "train"]
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
        """Return the order to evaluate a run that has ended."""
        run = item.work
        assert isinstance(run, PlannedRun)
        sha256 = self._first_weights.sha256(run.settings.model.path)
        return request_of(self.definition, run, item.end, item.reason, sha256)

    def _job(self, name: str, words: Sequence[str]) -> Job:
        log = self.definition.out / "logs" / f"{name}.txt"
        return Job(name, words, log, str(self.definition.source))

    # What has ended

    def _item_of(self, child: Child) -> Item:
        return self._items.get(child.job.name) or self._starts[child.job.name]

    def take_in(self, child: Child) -> None:
        """Go on with a piece of work whose command has ended."""
        item, code = self._item_of(child), child.process.returncode
        item.running = False
        if code == 0:
            self._advance(item)
        elif code == NonFiniteError.exit_code and isinstance(item.work, PlannedRun):
            item.end, item.reason = "nonfinite", read_attempts(item.work.path)[-1].reason
            item.stage = "evaluate"
            if not has_weights(item.work.path):
                outcome = Outcome(request=self._request(item))
                write_stored(self._outcome_file(item), outcome)
                self._finish(item, outcome)
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
        """Go on with a piece of work whose child process came to its end."""
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
            self._finish(item, read_stored(self._outcome_file(item), OUTCOME))

    def _outcome_file(self, item: Item) -> Path:
        return outcome_file(request_file(self.definition, item.work.name))

    def _finish(self, item: Item, outcome: Outcome, *remarks: str) -> None:
        """Take down the result of a run."""
        run = item.work
        assert isinstance(run, PlannedRun)
        result = result_of(self.definition, run, outcome)
        self.results.add(result, outcome.device)
        item.stage = "done"
        if not self.definition.study.keep_weights:
            for folder in ("checkpoints", "model"):
                shutil.rmtree(run.path / folder, ignore_errors=True)
        words = [*remarks, f"{result.steps} steps in {duration(result.wall_s)}"]
        if result.common is not None:
            words.append(f"held out {100 * result.common.mean:.1f}%")
        if learned_nothing(result):
            words.append(f"{NOTHING_LEARNED}: see {self.definition.out / 'logs'}/{run.name}.txt")
        if result.end == "nonfinite":
            words.append(f"collapsed: {clip(result.reason, 120)}")
        self._tell(f"{run.name}: {', '.join(words)}")

    def _fail(self, item: Item, reason: str) -> None:
        """Take down that a piece of work has failed; the others go on."""
        item.stage, item.reason = "failed", reason
        self._tell(f"{item.work.name}: failed: {clip(reason, 300)}")
        if isinstance(item.work, PlannedRun):
            self.results.failed[item.work.name] = reason
            self.results.write()
        else:
            self._fail_beginning(str(item.work.path / "model"), reason)

    def _fail_beginning(self, folder: str, reason: str) -> None:
        """Take down that the runs that would begin from a model have failed, in one line."""
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

    # Kills, and the standing

    def kill_if_due(self, child: Child) -> None:
        """Kill a run that has reached a step of `kill_after`."""
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
        """Return the standing of the study."""
        work = work_done = 0.0
        running = []
        for item in self._items.values():
            assert isinstance(item.work, PlannedRun)
            settings = item.work.settings
            steps = settings.loop.steps
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
class Part:
    """A part of the queue: runs of one study."""

    sitting: Sitting
    names: frozenset[str]


@dataclass(frozen=True)
class TimeLimit:
    """Seconds after which the runs that are left are stopped.

    Attributes:
        end: The time of `time.monotonic` at which they are over.
    """

    seconds: float
    end: float

    @property
    def is_over(self) -> bool:
        """True once the time is up."""
        return time.monotonic() > self.end

    def has_room_for(self, seconds: float) -> bool:
        """Return whether a run should begin now, by the seconds that it is expected to take.

        One that takes longer than the whole limit may: it is stopped, and resumed another time.
        """
        return seconds <= self.end - time.monotonic() or seconds > self.seconds


def work_off(
    parts: Sequence[Part], pool: Pool, progress: Progress, minutes: float | None = None
) -> None:
    """Work off the runs of studies; those that are running at the end are stopped at a checkpoint.

    Args:
        minutes: The minutes after which the runs that are left are stopped at a checkpoint; None:
            no limit.
    """
    sittings = {str(part.sitting.definition.source): part.sitting for part in parts}

    def standing() -> Standing:
        return together([sitting.standing() for sitting in sittings.values()])

    progress.begin(standing())
    seconds = math.inf if minutes is None else 60 * minutes
    limit = TimeLimit(seconds, time.monotonic() + seconds)
    try:
        pool.warm_up(sum(len(sitting.left) for sitting in sittings.values()))
        while True:
            for child in pool.ended():
                sittings[child.job.study].take_in(child)
            for child in pool.children:
                sittings[child.job.study].kill_if_due(child)
            _fill(pool, parts, limit)
            progress.show(standing)
            if not pool.children:
                if any(sitting.left for sitting in sittings.values()):
                    progress.event("no run that is left would end before the time is up")
                return
            if limit.is_over:
                running = len(pool.children)
                progress.event(f"the time is up: {running} runs stop at a checkpoint")
                return
            time.sleep(POLL_S)
    finally:
        pool.stop()
        progress.close()


def _fill(pool: Pool, parts: Sequence[Part], limit: TimeLimit) -> None:
    """Start commands at the free places, as long as there are both."""
    while pool.has_place:
        job = _next_job(parts, limit)
        if job is None:
            return
        pool.start(job)


def _next_job(parts: Sequence[Part], limit: TimeLimit) -> Job | None:
    """Return the next command: an evaluation, else a training, of the first part that has one."""
    for part in parts:
        if job := part.sitting.next_evaluation(part.names):
            return job
    for part in parts:
        if job := part.sitting.next_training(part.names, limit.has_room_for):
            return job
    return None


@dataclass(frozen=True)
class Work:
    """The runs of a study that an entry of the queue names."""

    definition: Definition
    results: Results
    runs: Sequence[PlannedRun]


def work_of(entry: Entry, definition: Definition, results: Results) -> Work:
    """Return the runs that an entry of the queue names."""
    runs = planned_runs(definition)
    try:
        return Work(definition, results, chosen(runs, entry.only))
    except UserError as error:
        where = f"{entry.place}: {entry.file}: " if entry.place else ""
        raise UserError(f"{where}{error}") from None


def parts_of(queue: Sequence[Work], progress: Progress) -> list[Part]:
    """Return the parts of a queue, with one sitting for each study."""
    studies: dict[str, list[Work]] = {}
    for work in queue:
        studies.setdefault(str(work.definition.source), []).append(work)
    _check_apart([own[0].definition for own in studies.values()])
    sittings = {}
    for source, own in studies.items():
        definition, results = own[0].definition, own[0].results
        runs = {run.name: run for work in own for run in work.runs}
        tell = progress.event if len(studies) == 1 else _naming(definition.study.name, progress)
        sittings[source] = Sitting(definition, [*runs.values()], results, tell)
    return [
        Part(sittings[str(work.definition.source)], frozenset(run.name for run in work.runs))
        for work in queue
    ]


def _check_apart(definitions: Sequence[Definition]) -> None:
    """Check that no two studies write the same files."""
    sources: dict[Path, Path] = {}
    for definition in definitions:
        for path in (definition.out.absolute(), definition.results_file.absolute()):
            if path in sources:
                raise UserError(
                    f"{sources[path]} and {definition.source} both write {path}; give one of them "
                    "another study.name, study.out or study.results"
                )
            sources[path] = definition.source


def _naming(study: str, progress: Progress) -> Callable[[str], None]:
    """Return a function that prints a line with the name of a study before it."""
    return lambda text: progress.event(f"{study}: {text}")


REFRESH_S, QUIET_S = 0.5, 60.0  # between live lines: on a terminal, and in a log
_FORESEEN = 0.05  # share of the work after which the time that is left can be estimated


@dataclass(frozen=True)
class Standing:
    """The standing of one study, or of several together, at a moment.

    Attributes:
        work_done: The work that is done, in steps times tokens a completion.
    """

    done: int
    failed: int
    total: int
    work_done: float
    work: float
    running: Sequence[str]


def together(standings: Sequence[Standing]) -> Standing:
    """Return the standing of several studies together."""
    return Standing(
        sum(one.done for one in standings),
        sum(one.failed for one in standings),
        sum(one.total for one in standings),
        sum(one.work_done for one in standings),
        sum(one.work for one in standings),
        [words for one in standings for words in one.running],
    )


class Progress:
    """The console of studies."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self.begin(Standing(0, 0, 0, 0.0, 0.0, []))

    def begin(self, standing: Standing) -> None:
        """Begin the estimate of the time that is left."""
        self._began = self._shown_at = time.monotonic()
        self._first = standing

    def event(self, text: str) -> None:
        """Print a line that stays."""
        print(self._cleared(visible(text, newlines=True)), flush=True)

    def show(self, standing_now: Callable[[], Standing]) -> None:
        """Show the standing in the live line, if the last one is old enough."""
        now = time.monotonic()
        if now - self._shown_at < (REFRESH_S if self._terminal else QUIET_S):
            return
        self._shown_at = now
        line = self.line(standing_now(), now - self._began)
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            print(self._cleared(clip(visible(line), width)), end="", flush=True)
        else:
            print(visible(line), flush=True)

    def close(self) -> None:
        """Clear the live line."""
        if self._terminal:
            print(self._cleared(""), end="", flush=True)

    def line(self, standing: Standing, elapsed_s: float) -> str:
        """Return the live line."""
        pieces = [f"{standing.done} of {standing.total} runs done"]
        if standing.failed:
            pieces.append(f"{standing.failed} failed")
        pieces.append(duration(elapsed_s))
        made = standing.work_done - self._first.work_done
        left = standing.work - standing.work_done
        if made and made >= _FORESEEN * (made + left):
            # Once all steps are made, the last runs are still evaluated.
            text = f"about {duration(elapsed_s * left / made)} left" if left else "nearly done"
            pieces.append(text)
        return ", ".join(pieces) + "".join(f" | {words}" for words in standing.running)

    def _cleared(self, text: str) -> str:
        return f"\r\x1b[2K{text}" if self._terminal else text
