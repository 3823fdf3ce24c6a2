"""The results file of a study: the outcomes of its runs, small enough to commit.

It is one JSON object with one run per line: the study's definition, the machine, and for each run
its end, the digest of its final weights, its evaluations, its seconds by phase and its curves at
reduced resolution. The report needs only this file, and a run in it is not made again, even if the
run's other files are gone.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from benchmarks.commit import commit
from benchmarks.study.definition import Definition
from benchmarks.study.plan import PlannedRun
from pydantic import Field, TypeAdapter, model_validator

from jetrl.errors import UserError
from jetrl.files import Count, Finite, Seed, Step, Stored, read_stored
from jetrl.runs.attempts import versions
from jetrl.runs.directory import RunDirectory
from jetrl.runs.history import values_of
from jetrl.runs.metrics import is_eval_mean
from jetrl.runs.schemas import Name, Phase
from jetrl.runs.storage import Record, storing, write_atomically
from jetrl.settings.presets import PRESETS, BF16Rounding

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
        values: The values by metric; null where there is none, or one that is not finite.
    """

    steps: list[Step] = Field(default_factory=list)
    values: dict[Name, list[Kept | None]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def share_steps(self) -> Self:
        """Check that each metric has a value, or null, at each step."""
        for name, values in self.values.items():
            if len(values) != len(self.steps):
                raise ValueError(
                    f"{name} has {len(values)} values, and steps has {len(self.steps)}"
                )
        return self


class FinalEvaluation(Stored):
    """The evaluation of a run's final weights.

    Attributes:
        solved: The share of prompts with a solved one among their completions.
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
        point: The names of its grid point's values, by axis.
        digest: The digest of its settings (`PlannedRun`).
        said: The digest of the settings in the study file and recipe; "" in older files.
        reason: The message with which it ended before its last step.
        seconds: The sum of each `timing/` metric over its steps, by phase, and the seconds of the
            final evaluation as FINAL_EVALUATION, which older files lack.
        weights_sha256: The SHA-256 of its final FP32 master weights; "" if it left none.
        start_sha256: The SHA-256 of its initial weights; "" for random weights, and for a model
            that was not a local folder.
        compared_tokens: Tokens whose log-probs in sampler and trainer were compared.
        different_tokens: Compared tokens whose log-probs differ in any bit.
        common: The evaluation in the study's precision; None without weights.
        own: The evaluation in the run's own precision, if any.
        exported: The evaluation of its exported BF16 files in the study's precision, if any.
        curves: The metrics of its steps, averaged over windows of steps.
        held_out: The evaluations during the run: mean, response_length.
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
    exported: FinalEvaluation | None = None
    curves: Curves = Curves()
    held_out: Curves = Curves()


class ResultsFile(Stored):
    """The contents of a results file.

    Attributes:
        commits: The commits at which runs were added, as `commit()` names them.
        versions: The package versions at the last change.
        failed: The messages of failed runs, by name.
    """

    format: Literal[1]
    date: str
    command: str
    devices: list[str] = Field(default_factory=list)
    commits: list[str] = Field(default_factory=list)
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
        failed: The messages of failed runs, by name; the next command retries them.
    """

    path: Path
    source: str
    definition: dict[str, Any]
    devices: list[str] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)
    date: str = ""
    runs: dict[str, RunResult] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, result: RunResult, device: str) -> None:
        """Add the result of a run, and write the file."""
        self.runs[result.name] = result
        self.failed.pop(result.name, None)
        for name, names in ((device, self.devices), (commit(), self.commits)):
            if name and name not in names:
                names.append(name)
        self.write()

    def write(self) -> None:
        """Write the file atomically."""
        self.date = datetime.date.today().isoformat()
        head = {
            "format": 1,
            "date": self.date,
            "command": shlex.join(["jetrl", "study", self.source]),
            "devices": self.devices,
            "commits": self.commits,
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
    """Return the results in a file."""
    try:
        stored = read_stored(path, SCHEMA, MOST_BYTES)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UserError as error:
        raise UserError(
            f"{error}; the file is no results of a study as `jetrl study STUDY.toml` writes them"
        ) from None
    runs: dict[str, RunResult] = {}
    places: dict[Any, str] = {}
    for run in stored.runs:
        first = places.setdefault((run.arm, run.seed, *sorted(run.point.items())), run.name)
        if run.name in runs or first != run.name:
            raise UserError(
                f"{path} has two runs of seed {run.seed} of {run.arm} at one point, {first} and "
                f"{run.name}, as a merge may leave them: delete the line that is not to count"
            )
        runs[run.name] = run
    about = stored.model_dump(include={"source", "definition", "devices", "commits", "date"})
    return Results(path, **about, runs=runs, failed=dict(stored.failed))


def rounded(value: float) -> float | None:
    """Return a number with `DIGITS` significant digits; None for one that is not finite or huge."""
    return float(f"{value:.{DIGITS}g}") if abs(value) < MOST else None


class Request(Stored):
    """A request to evaluate a run.

    Attributes:
        preset: The precision preset of the evaluation, the same for all runs of the study.
        bf16_rounding: The rounding of its weights.
        own: Whether to evaluate the run in its own precision too.
        exported: Whether to evaluate its exported BF16 files too.
        prompts: The number of held-out prompts; 0: all.
        reason: The message with which it ended; "" after its last step.
        start_sha256: The SHA-256 of its initial weights, as in `FirstWeights`.
    """

    run: str
    preset: str
    bf16_rounding: BF16Rounding = "nearest"
    own: bool
    exported: bool = False
    prompts: Count
    samples: Annotated[int, Field(ge=1)]
    temperature: Finite
    top_p: Finite
    seed: Seed
    end: End = "finished"
    reason: str = ""
    start_sha256: str = ""


class Outcome(Stored):
    """The evaluations of a run, with their request.

    Attributes:
        weights_sha256: The SHA-256 of the run's final FP32 master weights; "" if only an exported
            model is left, or nothing.
        device: The device of the evaluation; "" without one.
        common: The evaluation in the study's precision; None if the run left no weights.
        own: The evaluation in the run's own precision, if requested.
        exported: The evaluation of its exported files, if requested.
        seconds: The seconds of all evaluations, loading included.
    """

    request: Request
    weights_sha256: str = ""
    device: str = ""
    common: FinalEvaluation | None = None
    own: FinalEvaluation | None = None
    exported: FinalEvaluation | None = None
    seconds: Finite = 0.0


REQUEST, OUTCOME = TypeAdapter(Request), TypeAdapter(Outcome)


def request_file(definition: Definition, name: str) -> Path:
    """Return the file of a run's evaluation request."""
    return definition.out / "evaluations" / f"{name}.json"


def outcome_file(request: Path) -> Path:
    """Return the file of a request's outcome."""
    return request.with_suffix(".outcome.json")


def request_of(
    definition: Definition, run: PlannedRun, end: End, reason: str, start_sha256: str
) -> Request:
    """Return the request to evaluate a run whose training has ended.

    Args:
        reason: The message with which it ended; "" after its last step.
    """
    section = definition.eval
    return Request(
        run=str(run.path),
        preset=section.preset,
        bf16_rounding=section.bf16_rounding or PRESETS[section.preset].bf16_rounding,
        own=section.own,
        exported=section.exported,
        prompts=section.prompts,
        samples=section.samples,
        temperature=section.temperature,
        top_p=section.top_p,
        seed=section.seed,
        end=end,
        reason=reason,
        start_sha256=start_sha256,
    )


def write_stored(file: Path, stored: Stored) -> None:
    """Write a request or an outcome atomically."""
    with storing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(stored.model_dump(mode="json")) + "\n")


KEPT_METRICS = (
    "reward/mean",
    "response_length/mean",
    "policy/entropy",
    "policy/grad_norm",
    "mismatch/mean_abs_logprob_diff",
    "mismatch/k3_kl",
    "mismatch/token_mult_prob_error",
)
"""The metrics per step in the curves of every run."""
SPEED, MEMORY = "throughput/train_tokens_per_s", "memory/peak_gib"


def result_of(definition: Definition, run: PlannedRun, outcome: Outcome) -> RunResult:
    """Return the result of a run that has ended."""
    request = outcome.request
    directory = RunDirectory.open(run.path)
    phase: Phase = "sft" if run.settings.task.is_text else "rl"
    records, history = directory.metrics(phase), directory.history()
    steps = [record for record in records if record["step"] > 0]
    names = dict.fromkeys([*KEPT_METRICS, definition.collapse.metric, *definition.study.metrics])
    if phase == "sft":
        names |= dict.fromkeys((SPEED, MEMORY))
    window = max(1, math.ceil(run.steps / definition.study.points))
    return RunResult(
        name=run.name,
        point=dict(run.point),
        arm=run.arm,
        seed=run.seed,
        digest=run.digest,
        said=run.said,
        end=request.end,
        reason=request.reason,
        steps=steps[-1]["step"] if steps else 0,
        wall_s=rounded(history.elapsed_s) or 0.0,
        attempts=len(directory.attempts()),
        seconds=_seconds(steps) | _seconds_of_evaluation(outcome),
        weights_sha256=outcome.weights_sha256,
        start_sha256=request.start_sha256,
        compared_tokens=history.num_tokens or 0,
        different_tokens=history.num_different or 0,
        common=outcome.common,
        own=outcome.own,
        exported=outcome.exported,
        curves=_thinned(steps, list(names), window),
        held_out=_held_out(records),
    )


def sha256_of_model(folder: Path) -> str:
    """Return the SHA-256 of an exported model's safetensors files."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _seconds(steps: Sequence[Record]) -> dict[str, float]:
    """Return the sum of each `timing/` metric by its phase, in seconds."""
    names = sorted({name for record in steps for name in record if name.startswith("timing/")})
    sums = {name: sum(values_of(steps, name)) for name in names}
    return {
        name.removeprefix("timing/").removesuffix("_s"): rounded(total) or 0.0
        for name, total in sums.items()
    }


def _seconds_of_evaluation(outcome: Outcome) -> dict[str, float]:
    """Return the seconds of a run's final evaluation as FINAL_EVALUATION; {} without one."""
    return {} if outcome.common is None else {FINAL_EVALUATION: rounded(outcome.seconds) or 0.0}


def _thinned(steps: Sequence[Record], names: Sequence[str], window: int) -> Curves:
    """Return the means of metrics over windows of steps, each at the last step of its window."""
    groups: dict[int, list[Record]] = {}
    for record in steps:
        groups.setdefault((record["step"] - 1) // window, []).append(record)
    present = [name for name in names if any(name in record for record in steps)]
    return Curves(
        steps=[group[-1]["step"] for group in groups.values()],
        values={
            name: [_mean(values_of(group, name)) for group in groups.values()] for name in present
        },
    )


def _held_out(records: Sequence[Record]) -> Curves:
    """Return the evaluations during the run, averaged over tasks."""
    names = sorted({name for record in records for name in record if is_eval_mean(name)})
    having = [record for record in records if any(name in record for name in names)]
    lengths = [name.removesuffix("mean") + "response_length" for name in names]
    return Curves(
        steps=[record["step"] for record in having],
        values={
            "mean": [_mean(record[n] for n in names if n in record) for record in having],
            "response_length": [
                _mean(record[n] for n in lengths if n in record) for record in having
            ],
        },
    )


def _mean(values: Iterable[float]) -> float | None:
    """Return the mean of values; None without values, or if it is not finite."""
    listed = [float(value) for value in values]
    return rounded(sum(listed) / len(listed)) if listed else None


class FirstWeights:
    """The SHA-256 of each initial model of a study's runs."""

    def __init__(self, runs: Sequence[PlannedRun], results: Results) -> None:
        self._runs, self._results = runs, results
        self._known: dict[str, str] = {}

    def wrong_folders(self) -> dict[str, str]:
        """Return a message per folder whose weights differ from those in the results."""
        wrong = dict[str, str]()
        for folder in filter(None, {run.settings.model.path for run in self._runs}):
            try:
                self.sha256(folder)
            except UserError as error:
                wrong[folder] = str(error)
        return wrong

    def sha256(self, folder: str | None) -> str:
        """Return the SHA-256 of a model's weights; "" if it is not a local folder."""
        if folder is None or not (Path(folder) / "config.json").is_file():
            return ""
        if folder not in self._known:
            own = sha256_of_model(Path(folder))
            beginning = [run for run in self._runs if run.settings.model.path == folder]
            for done in filter(None, (self._results.runs.get(run.name) for run in beginning)):
                # Older files have "" for models that no [start] made.
                if done.start_sha256 not in ("", own):
                    raise UserError(
                        f"{folder}: other weights than {done.name} in {self._results.path} "
                        "began from (another machine or version); put that start back from a "
                        "copy, or begin the results anew"
                    )
            self._known[folder] = own
        return self._known[folder]
