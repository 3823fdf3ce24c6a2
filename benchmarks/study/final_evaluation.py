"""The evaluation of a run's final weights, in the study's precision and in its own.

The study runs it as a command (`jetrl study --evaluate REQUEST.json`) after each training. The
outcome is written next to the request.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from pathlib import Path

import torch
from benchmarks.study.results import (
    REQUEST,
    FinalEvaluation,
    Outcome,
    Request,
    outcome_file,
    write_stored,
)

from jetrl.cli.opening import find_model, open_model, open_policy
from jetrl.errors import UserError
from jetrl.files import read_stored
from jetrl.models.peft import is_adapter
from jetrl.models.policy import Policy
from jetrl.precision import PrecisionPlan
from jetrl.randomness import derive_seed
from jetrl.rollout.engine import RolloutEngine
from jetrl.runs.directory import RunDirectory
from jetrl.runs.history import values_of
from jetrl.session.evaluate import evaluate_model
from jetrl.session.examples import eval_pieces
from jetrl.settings.loading import Settings, load_config
from jetrl.tasks import Scorer, build_task
from jetrl.tasks.text import RawText
from jetrl.training.checkpoint import CheckpointFolder
from jetrl.training.checkpoint_files import StoredTensors, masters_of
from jetrl.training.sft import mean_loss
from jetrl.types import SamplingParams

MOST_AT_ONCE = 1024  # completions: a step of a small model takes hardly longer for more of them


def has_weights(run: Path) -> bool:
    """Return whether a run has weights to evaluate."""
    steps = CheckpointFolder(run / "checkpoints").steps()
    return bool(steps) or (run / "model" / "config.json").is_file() or is_adapter(run / "model")


def sha256_of_weights(run: Path) -> str:
    """Return the SHA-256 of a run's newest master weights: names, dtypes, shapes and bytes.

    It does not depend on the number of processes that wrote them. "" if only an exported model is
    left.
    """
    location = find_model(run)
    masters = masters_of(location.path)
    if masters is None:
        return ""
    stored, digest = StoredTensors(masters), hashlib.sha256()
    for name in sorted(stored):
        tensor = stored[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def evaluated(request: Request) -> Outcome:
    """Return the evaluations of a run's newest weights."""
    began = time.perf_counter()
    run = Path(request.run)
    settings = load_config(run / "config.toml")
    device, own, rounding = settings.run.device, None, request.bf16_rounding
    if settings.task.is_text:
        return _of_text(request, run, settings, began)
    if request.own:
        policy = open_policy(run, None, device)
        own = _evaluation(policy, settings, request)
        name = _device_name(policy)
        del policy
    plan = PrecisionPlan.preset(request.preset).replace(bf16_rounding=rounding)
    if own is not None and _stored_plan(run) == plan:
        common = own.model_copy(update={"preset": request.preset})
    else:
        policy = open_policy(run, request.preset, device, bf16_rounding=rounding)
        common = _evaluation(policy, settings, request)
        name = _device_name(policy)
    exported = _exported(run, settings, request) if request.exported else None
    return Outcome(
        request=request,
        weights_sha256=sha256_of_weights(run),
        device=name,
        common=common,
        own=own,
        exported=exported,
        seconds=time.perf_counter() - began,
    )


def _of_text(request: Request, run: Path, settings: Settings, began: float) -> Outcome:
    """Return the held-out losses of a run on raw text: at its end, and of its export."""
    policy = open_policy(run, request.preset, settings.run.device)
    task = build_task(settings.task)
    assert isinstance(task, RawText)
    examples = eval_pieces(settings, policy, task)
    loss = mean_loss(policy, examples, settings.train.tokens_per_micro_batch)
    at_end = values_of(RunDirectory.open(run).metrics("sft"), "text/eval_loss")
    if loss is None or not at_end:
        raise UserError("a study of raw text compares held-out losses: set eval.every above 0")

    def evaluation(preset: str, mean: float) -> FinalEvaluation:
        return FinalEvaluation(
            preset=preset,
            mean=mean,
            solved=0.0,
            prompts=len(examples),
            samples=1,
            response_length=0.0,
            clip_ratio=0.0,
        )

    return Outcome(
        request=request,
        device=_device_name(policy),
        common=evaluation(request.preset, loss),
        own=evaluation(_stored_plan(run).name, at_end[-1]),
        seconds=time.perf_counter() - began,
    )


def _stored_plan(run: Path) -> PrecisionPlan:
    return PrecisionPlan.from_dict(RunDirectory.open(run).plan(), str(run / "plan.json"))


def _exported(run: Path, settings: Settings, request: Request) -> FinalEvaluation:
    """Return the evaluation of a run's export, as `jetrl export` writes it."""
    device, rounding = settings.run.device, request.bf16_rounding
    with tempfile.TemporaryDirectory() as folder:
        open_model(run, None, device).save_pretrained(folder, overwrite=True)
        policy = open_policy(folder, request.preset, device, bf16_rounding=rounding)
    return _evaluation(policy, settings, request)


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
            RolloutEngine(policy, max_batch_size=MOST_AT_ONCE),
            task,
            scorer,
            section=settings.task,
            own=settings.eval.model_copy(update={"prompts": request.prompts}),
            params=params,
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
    """Evaluate the run of a request file, and write the outcome next to it."""
    try:
        request = read_stored(file, REQUEST)
    except FileNotFoundError:
        raise UserError(f"{file}: no such file") from None
    write_stored(outcome_file(file), evaluated(request))
