"""Opens what a run is made of, so that a mistake is found before anything is written."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from jetrl.errors import StorageError, UserError
from jetrl.memory.device import free_bytes
from jetrl.memory.fitting import Fitted, check_fits
from jetrl.memory.out_of_memory import explained
from jetrl.memory.plan import OtherModels, Workload
from jetrl.models.families import ModelConfig
from jetrl.models.policy import Policy
from jetrl.parity import require_exact
from jetrl.precision import PrecisionPlan
from jetrl.rewards.environment import turns_of
from jetrl.rewards.reward import Reward
from jetrl.rewards.sampling import EncodedPrompt, encode_prompts
from jetrl.rollout.engine import RolloutEngine
from jetrl.runs import (
    Attempt,
    RunDirectory,
    Trackers,
    check_trackers,
    open_trackers,
    summary_of,
    write_report,
)
from jetrl.runs.status import StatusFile
from jetrl.runs.storing import storing
from jetrl.session.building import build_judge, build_policy, choose_device, model_config
from jetrl.session.phases import PhaseObserver
from jetrl.session.watchdog import Watchdog
from jetrl.session.worked_answers import check_worked_answers
from jetrl.settings.loading import Settings
from jetrl.tasks import Scorer, Task, build_task
from jetrl.training.objectives import Objective

logger = logging.getLogger(__name__)

_ADVICE = "`jetrl train --dry-run` prints what a run holds"


@dataclass(frozen=True)
class RunContext:
    """What a run is made of. prompts, eval_prompts: encoded, in the order of their split; no
    eval_prompts where nothing is evaluated. max_turns: of a completion. attempt: this start of the
    program. judge: None where the reward is the task's score. memory: what they will hold.
    opened: how long it took to load the models, and to prove that the flow is exact."""

    settings: Settings
    objective: Objective
    plan: PrecisionPlan
    task: Task
    max_turns: int
    policy: Policy
    prompts: list[EncodedPrompt]
    eval_prompts: list[EncodedPrompt]
    scorer: Scorer
    run: RunDirectory
    attempt: Attempt
    trackers: Trackers
    engine: RolloutEngine
    judge: Reward | None
    memory: Fitted
    opened: str


def open_parts(settings: Settings, resume: bool, stack: contextlib.ExitStack) -> RunContext:
    """Opens everything; the stack closes it, and writes the report last.

    Raises:
        UserError: settings, data or a model that cannot be used.
    """
    RunDirectory.check_name(settings, resume=resume)
    check_trackers(settings.trackers.names)
    plan = PrecisionPlan.from_settings(settings.precision)
    objective = _objective(settings)  # a user's file runs
    config, others = model_config(settings), OtherModels.of(settings)
    device = choose_device(settings.run.device)
    free = free_bytes(device)
    # With the shortest prompts there are: what does not fit now fits with none.
    check_fits(settings, config, others, Workload.of(settings, config, 1), device, free)
    wanted = settings.task
    task = build_task(wanted)
    max_turns = turns_of(task, wanted.max_turns)
    began = time.monotonic()
    with explained("loading the model", _ADVICE):
        policy = build_policy(settings, plan, task)
        load_s = time.monotonic() - began
        proof_s = require_exact(policy)
    prompts = encode_prompts(policy, task, wanted.split, system_prompt=wanted.system_prompt)
    if settings.sft.steps:
        check_worked_answers(build_task(wanted), policy, prompts)
    eval_prompts = (
        encode_prompts(policy, task, wanted.eval_split, settings.eval.prompts, wanted.system_prompt)
        if settings.eval.every or settings.sft.until is not None
        else []
    )
    _check_contexts(settings, config, others, max(len(prompt.token_ids) for prompt in prompts))
    longest = max(len(prompt.token_ids) for prompt in (*prompts, *eval_prompts))
    load = Workload.of(settings, config, longest, max_turns)
    memory = check_fits(settings, config, others, load, device, free)
    began = time.monotonic()
    with explained("loading the reward model", _ADVICE):
        judge = build_judge(settings, policy, memory.tokens)
        load_s += time.monotonic() - began
    opened = f"models loaded in {load_s:.1f} s"
    if proof_s is not None:
        opened += f", exactness proven in {proof_s:.1f} s"
    rollout = settings.rollout
    engine = RolloutEngine(
        policy,
        max_batch_size=rollout.max_batch_size,
        num_pages=rollout.num_pages,
        page_size=rollout.page_size,
        max_prefill_tokens=rollout.max_prefill_tokens,
    )
    scorer = stack.enter_context(Scorer.from_settings(wanted))
    run = RunDirectory.create(settings, plan.to_dict(), resume=resume)
    room = config.max_position_embeddings - longest
    if rollout.max_tokens > room:
        run.notes.append(
            f"rollout.max_tokens = {rollout.max_tokens}: after the longest prompt, of {longest} "
            f"tokens, the model's context has room for {room}, and a completion ends there"
        )
    if settings.report.enabled:
        stack.push(Reporting(run.path))  # last, when the run's end is recorded
    stack.enter_context(run)
    attempt = stack.enter_context(
        run.attempt(sys.argv, {"plan": plan.name, "device": str(policy.device)})
    )
    trackers = open_trackers(
        settings.trackers.names,
        settings.trackers.project,
        run.path,
        settings.model_dump(mode="json"),
    )
    stack.callback(lambda: trackers.close(lambda: summary_of(run.history())))
    return RunContext(
        settings=settings,
        objective=objective,
        plan=plan,
        task=task,
        max_turns=max_turns,
        policy=policy,
        prompts=prompts,
        eval_prompts=eval_prompts,
        scorer=scorer,
        run=run,
        attempt=attempt,
        trackers=trackers,
        engine=engine,
        judge=judge,
        memory=memory,
        opened=opened,
    )


def _objective(settings: Settings) -> Objective:
    """What a run optimizes; the record of a user's algorithm is known from here on."""
    objective = Objective.from_settings(settings.algorithm, settings.rollout.max_tokens)
    if settings.algorithm.from_file and settings.loop.steps > 0:
        problems = list(settings.algorithm_problems(objective.algorithm))
        if problems:
            raise UserError("; ".join(problems))
    return objective


def _check_contexts(
    settings: Settings, config: ModelConfig, others: OtherModels, longest_prompt: int
) -> None:
    """Every model beside the policy reads whole sequences. config: the policy's."""
    if not settings.loop.steps:
        return
    max_tokens = settings.rollout.max_tokens
    needed = min(config.max_position_embeddings, longest_prompt + max_tokens)
    paths = {
        "reference.path": (settings.reference.path, others.reference),
        "critic.path": (settings.critic.path, others.critic),
        "reward.model_path": (settings.reward.model_path, others.reward),
    }
    for key, (path, other) in paths.items():
        if other is not None and other.max_position_embeddings < needed:
            raise UserError(
                f"{key} = {path}: its context of {other.max_position_embeddings} tokens is shorter "
                f"than a sequence can be here: the longest prompt has {longest_prompt} tokens and "
                f"rollout.max_tokens = {max_tokens}; lower that, or take another model"
            )


def open_observers(
    settings: Settings,
    run: RunDirectory,
    stack: contextlib.ExitStack,
    state: Callable[[], list[str]] = list,
) -> list[PhaseObserver]:
    """Who is told of the run's phases: its status file and its watchdog. state: more lines for
    hang.txt."""
    status = StatusFile(run.path)
    stack.callback(status.close)
    watchdog = Watchdog(settings.watchdog, run.path / "hang.txt", state, run.end_attempt_for_hang)
    return [status, stack.enter_context(watchdog)]


class Reporting(contextlib.AbstractContextManager[None]):
    """Writes the report at the end, however the run ended."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with storing(self._path / "report.html"):
                write_report(self._path)
        except StorageError as failure:
            if error is None:
                raise
            logger.warning("%s", failure)  # what ended the run is what to say
