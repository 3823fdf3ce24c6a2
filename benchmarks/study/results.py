"""The results file of a study: what its runs came to, small enough to be committed.

It is one JSON object with a run a line: the study's definition, the machine, and of each run how it
ended, the digest of its final weights, its evaluations, its seconds by phase and its curves,
thinned. The report is made from this file alone, and a run that stands in it is not run again,
wherever the rest of its files went.
"""

from __future__ import annotations

import datetime
import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from jetrl.errors import UserError
from jetrl.files import Count, Seed, Step, Stored, read_stored
from jetrl.runs.attempts import versions
from jetrl.runs.schemas import Name
from jetrl.runs.storage import storing, write_atomically

End = Literal["finished", "nonfinite"]
"""How a run ended: with its last step, or on a number that is NaN or infinite."""
MOST = 1e100  # of a kept number: its square is finite
Kept = Annotated[float, Field(ge=-MOST, le=MOST)]
DIGITS = 6  # significant digits of a number that is kept
MOST_BYTES = 2**28
FINAL_EVALUATION = "final_evaluation"


class Curves(Stored):
    """Curves that share their steps: `values` holds a list of the same length for each metric.

    Attributes:
        steps: The steps.
        values: The values by metric; null where there is none, or one that is not finite.
    """

    steps: list[Step] = Field(default_factory=list)
    values: dict[Name, list[Kept | None]] = Field(default_factory=dict)


class FinalEvaluation(Stored):
    """The evaluation of a run's final weights.

    Attributes:
        preset: The precision preset that it was made in.
        mean: The mean reward over all completions.
        solved: The share of prompts with a solved one among their completions.
        prompts: The number of prompts.
        samples: The number of completions a prompt.
        response_length: The mean number of tokens of a completion.
        clip_ratio: The share of completions that were cut off.
    """

    preset: Name
    mean: Kept
    solved: Kept
    prompts: Count
    samples: Count
    response_length: Kept
    clip_ratio: Kept


class RunResult(Stored):
    """The results of one run.

    Attributes:
        name: The name of the run.
        point: The names of its grid point's values, by axis.
        arm: The name of its arm.
        seed: Its seed.
        digest: The digest of its settings (`study.plan`).
        said: The digest of what the study said of them, likewise; "" in older files.
        end: The way it ended.
        reason: The message that it ended with, where it did not come to its last step.
        steps: The steps that it made.
        wall_s: The seconds of all its attempts.
        attempts: How often it was started.
        seconds: The sum of each `timing/` metric over its steps, by phase, and the seconds of the
            final evaluation, as FINAL_EVALUATION; older files have none of the latter.
        weights_sha256: The SHA-256 of its final FP32 master weights; "" where it left none.
        start_sha256: The SHA-256 of the weights that it began from; "" for random weights, and for
            a model that was in no folder of the machine.
        compared_tokens: The tokens whose log-probs of sampler and trainer were compared.
        different_tokens: The compared tokens whose log-probs differ in any bit.
        common: The evaluation in the study's precision; None where there are no weights.
        own: The evaluation in the run's own precision; None where there is none.
        curves: The metrics of its steps, each a mean over the steps around.
        held_out: The held-out evaluations of the run itself: mean, response_length.
    """

    name: Name
    point: dict[Name, Name]
    arm: Name
    seed: Seed
    digest: Name
    said: str = ""
    end: End
    reason: str = ""
    steps: Step
    wall_s: Kept = 0.0
    attempts: Count = 1
    seconds: dict[Name, Kept] = Field(default_factory=dict)
    weights_sha256: str = ""
    start_sha256: str = ""
    compared_tokens: Count = 0
    different_tokens: Count = 0
    common: FinalEvaluation | None = None
    own: FinalEvaluation | None = None
    curves: Curves = Curves()
    held_out: Curves = Curves()


class ResultsFile(Stored):
    """The contents of a results file.

    Attributes:
        format: The number of this format.
        date: The day of the last change.
        command: The command that made the last change.
        devices: The devices that the runs had.
        versions: The versions of the packages that decide results, of the last change.
        source: The study file.
        definition: The tables of the study file.
        runs: The results of the runs.
        failed: The reasons of the runs that failed, by name.
    """

    format: Literal[1]
    date: str
    command: str
    devices: list[str] = Field(default_factory=list)
    versions: dict[Name, str] = Field(default_factory=dict)
    source: str
    definition: dict[str, Any]
    runs: list[RunResult]
    failed: dict[Name, str] = Field(default_factory=dict)


SCHEMA = TypeAdapter(ResultsFile)


@dataclass
class Results:
    """The results of a study so far.

    Attributes:
        path: The results file.
        source: The study file.
        definition: The tables of the study file.
        devices: The devices that the runs had.
        date: The day of the last change, as YYYY-MM-DD.
        runs: The results by the name of the run.
        failed: The reasons of the runs that failed, by name; they are tried again.
    """

    path: Path
    source: str
    definition: dict[str, Any]
    devices: list[str] = field(default_factory=list)
    date: str = ""
    runs: dict[str, RunResult] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, result: RunResult, device: str) -> None:
        """Take in the result of a run, and write the file.

        Args:
            result: The result.
            device: The device that the run had.

        Raises:
            StorageError: The file could not be written; the one before is whole.
        """
        self.runs[result.name] = result
        self.failed.pop(result.name, None)
        if device and device not in self.devices:
            self.devices.append(device)
        self.write()

    def write(self) -> None:
        """Write the file, in one piece: readers see the old one or the new one.

        Raises:
            StorageError: It could not be written.
        """
        self.date = datetime.date.today().isoformat()
        head = {
            "format": 1,
            "date": self.date,
            "command": shlex.join(["jetrl", "study", self.source]),
            "devices": self.devices,
            "versions": versions(),
            "source": self.source,
            "definition": self.definition,
            "failed": self.failed,
        }
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        dumped = (run.model_dump(mode="json") for run in self.runs.values())
        runs = ",\n  ".join(json.dumps(run, separators=(",", ":")) for run in dumped)
        text = "{\n " + ",\n ".join([*lines, f'"runs": [\n  {runs}\n ]']) + "\n}\n"
        with storing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, text)


def read_results(path: Path) -> Results:
    """Return the results in a file.

    Raises:
        UserError: There is no such file, or it is no results file.
    """
    try:
        stored = read_stored(path, SCHEMA, MOST_BYTES)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UserError as error:
        raise UserError(
            f"{error}; the file is no results of a study as `jetrl study STUDY.toml` writes them"
        ) from None
    runs = {run.name: run for run in stored.runs}
    devices = list(stored.devices)
    failed = dict(stored.failed)
    return Results(path, stored.source, stored.definition, devices, stored.date, runs, failed)


def rounded(value: float) -> float | None:
    """Return a number with `DIGITS` significant digits; None for one that is not finite or huge."""
    return float(f"{value:.{DIGITS}g}") if abs(value) < MOST else None
