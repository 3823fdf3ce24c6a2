"""The outcome of a run: how it ended and what its final weights came to, kept beside the results.

`OUT/evaluations/NAME.json` orders the evaluation of a run's final weights, and
`NAME.outcome.json` has the evaluation together with the order that it answers. So a run whose
weights have been deleted goes into a results file that was lost without being trained or evaluated
again. An outcome counts only for the training that it was made of and for the evaluation that the
study file asks for now.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from benchmarks.study.definition import Definition
from benchmarks.study.plan import PlannedRun
from benchmarks.study.results import End, FinalEvaluation
from pydantic import Field, TypeAdapter

from jetrl.errors import UserError
from jetrl.files import Count, Finite, Seed, Stored, UnixTime, read_stored
from jetrl.runs.attempts import read_attempts
from jetrl.runs.storage import storing, write_atomically


class Request(Stored):
    """The order to evaluate a run.

    Attributes:
        run: The run directory.
        preset: The precision preset that all runs of the study are evaluated in.
        own: Whether the run is evaluated in its own precision too.
        prompts: The number of held-out prompts; 0: all.
        samples: The number of completions a prompt.
        temperature: The temperature of the draws.
        top_p: The mass of the most probable tokens that are drawn from.
        seed: The seed of the draws.
        ended: The time at which the run's training ended: its weights are those of that moment.
            None where its last attempt has no end.
        end: The way it ended.
        reason: The message that it ended with; "" after its last step.
        start_sha256: The SHA-256 of the weights that it began from, as `FirstWeights` has it.
    """

    run: str
    preset: str
    own: bool
    prompts: Count
    samples: Annotated[int, Field(ge=1)]
    temperature: Finite
    top_p: Finite
    seed: Seed
    ended: UnixTime | None = None
    end: End = "finished"
    reason: str = ""
    start_sha256: str = ""


class Outcome(Stored):
    """The evaluations of a run, and the order that they answer.

    Attributes:
        request: The order; None in files of before it was kept, which count for no training.
        weights_sha256: The SHA-256 of the run's final FP32 master weights; "" where only an
            exported model is left, or nothing.
        device: The device that evaluated; "" where nothing was evaluated.
        common: The evaluation in the study's precision; None where the run left no weights.
        own: The evaluation in the run's own precision; None where it was not asked for.
        seconds: The seconds that all of it took, the models opened included.
    """

    request: Request | None = None
    weights_sha256: str = ""
    device: str = ""
    common: FinalEvaluation | None = None
    own: FinalEvaluation | None = None
    seconds: Finite = 0.0


REQUEST, OUTCOME = TypeAdapter(Request), TypeAdapter(Outcome)
_ASKED = ("preset", "own", "prompts", "samples", "temperature", "top_p", "seed")


def request_file(definition: Definition, name: str) -> Path:
    """Return the file with the order to evaluate a run.

    Args:
        definition: The definition of the study.
        name: The name of the run.
    """
    return definition.out / "evaluations" / f"{name}.json"


def outcome_file(request: Path) -> Path:
    """Return the file that gets the outcome of a request.

    Args:
        request: The file of the request.
    """
    return request.with_suffix(".outcome.json")


def request_of(
    definition: Definition, run: PlannedRun, end: End, reason: str, start_sha256: str
) -> Request:
    """Return the order to evaluate a run whose training has ended, as the study asks for it now.

    Args:
        definition: The definition of the study.
        run: The run.
        end: The way it ended.
        reason: The message that it ended with; "" after its last step.
        start_sha256: The SHA-256 of the weights that it began from.

    Raises:
        UserError: The run's attempts are damaged.
    """
    section = definition.eval
    return Request(
        run=str(run.path),
        preset=section.preset,
        own=section.own,
        prompts=section.prompts,
        samples=section.samples,
        temperature=section.temperature,
        top_p=section.top_p,
        seed=section.seed,
        ended=_ended(run),
        end=end,
        reason=reason,
        start_sha256=start_sha256,
    )


def _ended(run: PlannedRun) -> float | None:
    """Return the time at which the last attempt at a run ended; None if it has not."""
    attempts = read_attempts(run.path)
    return attempts[-1].ended if attempts else None


def write_stored(file: Path, stored: Stored) -> None:
    """Write a request or an outcome, in one piece.

    Args:
        file: The file.
        stored: The request or the outcome.

    Raises:
        StorageError: It could not be written.
    """
    with storing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(stored.model_dump(mode="json")) + "\n")


def kept_outcome(definition: Definition, run: PlannedRun) -> Outcome | str:
    """Return the outcome that earlier sittings left of a run, or the reason why none counts.

    Args:
        definition: The definition of the study.
        run: The run, whose directory has the settings that the study gives it now.

    Raises:
        UserError: The run's attempts are damaged.
    """
    file = outcome_file(request_file(definition, run.name))
    try:
        outcome = read_stored(file, OUTCOME)
    except FileNotFoundError:
        return f"there is no {file}"
    except UserError as error:
        return str(error)
    made = outcome.request
    if made is None:
        return f"{file} is of an older jetrl and does not say what was evaluated"
    if made.ended is None or made.ended != _ended(run) or made.run != str(run.path):
        return f"{file} is of another training than the one that {run.path} holds"
    now = request_of(definition, run, made.end, made.reason, made.start_sha256)
    changes = [
        f"eval.{key}: {getattr(made, key)} -> {getattr(now, key)}"
        for key in _ASKED
        if getattr(made, key) != getattr(now, key)
    ]
    if changes:
        return f"{file} is of another evaluation ({', '.join(changes)})"
    return outcome
