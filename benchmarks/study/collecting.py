"""The result of a run, taken from its directory: sums, and curves thinned to a few points."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.study.definition import Definition
from benchmarks.study.outcome import Outcome
from benchmarks.study.plan import PlannedRun
from benchmarks.study.results import FINAL_EVALUATION, Curves, RunResult, rounded

from jetrl.runs.directory import RunDirectory
from jetrl.runs.history import values_of
from jetrl.runs.metrics import is_eval_mean
from jetrl.runs.storage import Record

KEPT_METRICS = (
    "reward/mean",
    "response_length/mean",
    "policy/entropy",
    "policy/grad_norm",
    "mismatch/mean_abs_logprob_diff",
    "mismatch/k3_kl",
    "mismatch/token_mult_prob_error",
)
"""The metrics of a step that are kept of every run, beside the held-out accuracy."""


def result_of(definition: Definition, run: PlannedRun, outcome: Outcome) -> RunResult:
    """Return the result of a run that has ended.

    Args:
        definition: The definition of the study.
        run: The run.
        outcome: Its evaluations, with the order that says how it ended and what it began from.

    Raises:
        UserError: A file of the run is damaged.
    """
    request = outcome.request
    assert request is not None
    directory = RunDirectory.open(run.path)
    records, history = directory.metrics("rl"), directory.history()
    steps = [record for record in records if record["step"] > 0]
    names = dict.fromkeys([*KEPT_METRICS, definition.collapse.metric, *definition.study.metrics])
    window = max(1, math.ceil(run.settings.loop.steps / definition.study.points))
    return RunResult(
        name=run.name,
        point=dict(run.point),
        arm=run.arm,
        seed=run.seed,
        digest=run.digest,
        said=run.said,
        end=request.end,
        reason=request.reason,
        steps=history.last_step if steps else 0,
        wall_s=rounded(history.elapsed_s) or 0.0,
        attempts=len(directory.attempts()),
        seconds=_seconds(steps) | _seconds_of_evaluation(outcome),
        weights_sha256=outcome.weights_sha256,
        start_sha256=request.start_sha256,
        compared_tokens=history.num_tokens or 0,
        different_tokens=history.num_different or 0,
        common=outcome.common,
        own=outcome.own,
        curves=_thinned(steps, list(names), window),
        held_out=_held_out(records),
    )


def sha256_of_model(folder: Path) -> str:
    """Return the SHA-256 of the weights of an exported model: the bytes of its safetensors files.

    Raises:
        OSError: A file cannot be read.
    """
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
    """Return the seconds of a run's final evaluation under their own name; {} without one."""
    return {} if outcome.common is None else {FINAL_EVALUATION: rounded(outcome.seconds) or 0.0}


def _thinned(steps: Sequence[Record], names: Sequence[str], window: int) -> Curves:
    """Return metrics as means over windows of steps, each at the last step of its window.

    Args:
        steps: The lines of the steps.
        names: The metrics; one that no step has is left out.
        window: The number of steps in a window.
    """
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
    """Return the run's own evaluations; of several tasks, their means."""
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
    """Return the mean of values; None of no values, or where it is not finite."""
    listed = [float(value) for value in values]
    return rounded(sum(listed) / len(listed)) if listed else None
