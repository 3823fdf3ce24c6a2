"""The evaluation of a run's final weights: all runs by one engine in one precision, and their own.

A study starts a process for it (`jetrl study --evaluate REQUEST.json`) for each run that has ended;
its outcome is written beside the request.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, TypeAdapter

from jetrl.cli.opening import find_model, open_policy
from jetrl.errors import UserError
from jetrl.files import Count, Finite, Seed, Stored, read_stored
from jetrl.models.policy import Policy
from jetrl.precision import PrecisionPlan
from jetrl.randomness import derive_seed
from jetrl.rewards.evaluate import evaluate_model
from jetrl.runs.directory import RunDirectory
from jetrl.runs.jsonl import write_atomically
from jetrl.runs.storing import storing
from jetrl.settings.loading import Settings, load_config
from jetrl.study.results import FinalEvaluation
from jetrl.tasks import Scorer, build_task
from jetrl.training import Checkpoints
from jetrl.training.stored_tensors import StoredTensors
from jetrl.types import SamplingParams

MOST_AT_ONCE = 1024  # completions: a step of a small model takes hardly longer for more of them


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
    """

    run: str
    preset: str
    own: bool
    prompts: Count
    samples: Annotated[int, Field(ge=1)]
    temperature: Finite
    top_p: Finite
    seed: Seed


class Outcome(Stored):
    """The evaluations of a run.

    Attributes:
        weights_sha256: The SHA-256 of its final FP32 master weights; "" where only an exported
            model is left.
        device: The device that evaluated.
        common: The evaluation in the study's precision.
        own: The evaluation in the run's own precision; None where it was not asked for.
        seconds: The seconds that all of it took, the models opened included.
    """

    weights_sha256: str
    device: str
    common: FinalEvaluation
    own: FinalEvaluation | None = None
    seconds: Finite = 0.0


REQUEST, OUTCOME = TypeAdapter(Request), TypeAdapter(Outcome)


def outcome_file(request: Path) -> Path:
    """Return the file that gets the outcome of a request."""
    return request.with_suffix(".outcome.json")


def has_weights(run: Path) -> bool:
    """Return whether a run has left weights that can be evaluated."""
    steps = Checkpoints(run / "checkpoints").steps()
    return bool(steps) or (run / "model" / "config.json").is_file()


def sha256_of_weights(run: Path) -> str:
    """Return the SHA-256 of a run's newest master weights: names, dtypes, shapes and bytes.

    It does not depend on how many processes wrote them. "" where only an exported model is left.
    """
    location = find_model(run)
    masters = Checkpoints.masters(location.path)
    if masters is None:
        return ""
    stored, digest = StoredTensors(masters), hashlib.sha256()
    for name in sorted(stored):
        tensor = stored[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def evaluated(request: Request) -> Outcome:
    """Return the evaluations of a run's newest weights.

    Raises:
        UserError: The run has no weights, or they cannot be used.
    """
    began = time.perf_counter()
    run = Path(request.run)
    settings = load_config(run / "config.toml")
    stored_plan = PrecisionPlan.from_dict(RunDirectory.open(run).plan(), str(run / "plan.json"))
    device, own = settings.run.device, None
    if request.own:
        policy = open_policy(run, None, device)
        own = _evaluation(policy, settings, request)
        name = _device_name(policy)
        del policy
    if own is not None and stored_plan == PrecisionPlan.preset(request.preset):
        common = own.model_copy(update={"preset": request.preset})
    else:
        policy = open_policy(run, request.preset, device)
        common = _evaluation(policy, settings, request)
        name = _device_name(policy)
    sha256, seconds = sha256_of_weights(run), time.perf_counter() - began
    return Outcome(weights_sha256=sha256, device=name, common=common, own=own, seconds=seconds)


def _evaluation(policy: Policy, settings: Settings, request: Request) -> FinalEvaluation:
    """Return the evaluation of a policy on the held-out prompts of the run's task."""
    task = build_task(settings.task)
    policy.plain_text = settings.task.special_tokens_as_text
    params = SamplingParams(
        n=request.samples,
        max_tokens=settings.eval.max_tokens or settings.rollout.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        stop=settings.rollout.stop,
        seed=derive_seed(request.seed, "study"),
    )
    with Scorer.from_settings(settings.task) as scorer:
        result = evaluate_model(
            policy,
            task,
            scorer,
            params,
            split=settings.task.eval_split,
            num_prompts=request.prompts,
            threshold=settings.eval.threshold,
            system_prompt=settings.task.system_prompt,
            max_turns=settings.task.max_turns,
            max_batch_size=MOST_AT_ONCE,
        )
    return FinalEvaluation(
        preset=policy.plan.name,
        mean=result.mean,
        solved=result.pass_at_k[request.samples],
        prompts=len(result.samples) // request.samples,
        samples=request.samples,
        response_length=result.response_length,
        clip_ratio=result.clip_ratio,
    )


def _device_name(policy: Policy) -> str:
    """Return the name of the device that a policy is on."""
    if policy.device.type == "cuda":
        return torch.cuda.get_device_name(policy.device)
    return "CPU"


def answer_request(file: Path) -> None:
    """Evaluate as a request file asks, and write the outcome beside it.

    Raises:
        UserError: There is no such request, or its run cannot be evaluated.
        StorageError: The outcome could not be written.
    """
    try:
        request = read_stored(file, REQUEST)
    except FileNotFoundError:
        raise UserError(f"{file}: no such file") from None
    outcome, target = evaluated(request), outcome_file(file)
    with storing(target):
        write_atomically(target, json.dumps(outcome.model_dump(mode="json")) + "\n")
