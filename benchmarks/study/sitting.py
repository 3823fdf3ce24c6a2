"""A sitting at a study: which command comes next, and what is taken down when one has ended.

Each run is a command in a child process, `jetrl train`, followed by one that evaluates its final
weights; its supervised start, if it has one, comes before. What is done is skipped, what was cut is
resumed with the same bits, and what fails is tried once more and then reported, while the others go
on. A run that ends on numbers that are not finite has collapsed: that is a result. `places.py`
starts the commands, of one study or of several.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Container, Sequence
from pathlib import Path

from benchmarks.study.collecting import result_of
from benchmarks.study.definition import Definition
from benchmarks.study.final_evaluation import has_weights
from benchmarks.study.first_weights import FirstWeights
from benchmarks.study.items import Item, has_begun, look, recipe_file, steps_done
from benchmarks.study.outcome import (
    OUTCOME,
    Outcome,
    Request,
    outcome_file,
    request_file,
    request_of,
    write_stored,
)
from benchmarks.study.plan import PlannedRun, PlannedStart, recipe_of
from benchmarks.study.processes import Child, Job, last_line
from benchmarks.study.progress import Standing
from benchmarks.study.results import FINAL_EVALUATION, Results

from jetrl.errors import NonFiniteError, UserError
from jetrl.files import read_stored
from jetrl.runs.attempts import read_attempts, read_status
from jetrl.runs.format import clip, duration
from jetrl.runs.storage import storing, write_atomically

MOST_FAILURES = 2


class Sitting:
    """A sitting at a study.

    Args:
        definition: The definition of the study.
        runs: The runs to work off.
        results: The results so far, which those of the runs are added to.
        tell: Prints a line about a run.

    Raises:
        UserError: The results, or a run directory, are of other settings.
    """

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
        """Return the evaluation of a trained run, which counts as running then, or None.

        Args:
            names: The names of the runs that it may be for.

        Raises:
            StorageError: A file that the command reads could not be written.
        """
        for name, item in self._items.items():
            if name in names and item.stage == "evaluate" and not item.running:
                return self._evaluation(item)
        return None

    def next_training(
        self, names: Container[str], has_room_for: Callable[[float], bool]
    ) -> Job | None:
        """Return the next training of a run or its start, which counts as running then, or None.

        Args:
            names: The names of the runs that it may be for.
            has_room_for: Returns whether there is time for a run of so many seconds.

        Raises:
            StorageError: A file that the command reads could not be written.
        """
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
        """Return the longest time, in seconds, of a finished run at the same grid point, or None.

        Runs of this sitting count alone once there is one, since earlier ones may be those of
        another machine or version. Of a training only the share of the steps counts that the run
        has yet to make.
        """
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
        command = "train" if isinstance(work, PlannedRun) else "sft"
        resume = ["--resume"] if has_begun(work, self.definition) else []
        item.running = True
        return self._job(work.name, [command, str(recipe), *resume])

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
        """Go on with a piece of work whose command has ended.

        Args:
            child: The child process of the command.

        Raises:
            StorageError: A file of the study could not be written.
        """
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
        """Take down the result of a run.

        Args:
            item: The run as a piece of work.
            outcome: Its outcome.
            remarks: What is said of it beside its results.
        """
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
        """Take down that the runs that would begin from a model have failed, in one line.

        Args:
            folder: The folder of the model.
            reason: Why it cannot be begun from.
        """
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
        """Kill a run that has come to a step at which the study file (kill_after) has runs killed.

        Args:
            child: The child process of a command of this study.
        """
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
