"""Opening a run: everything it is built from, before anything is written.

A mistake in settings, data or models is found here, while no run directory exists yet.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from jetrl.distributed.world import world
from jetrl.errors import UserError
from jetrl.memory.device import free_bytes
from jetrl.memory.fitting import Fitted, check_fits
from jetrl.memory.out_of_memory import explained
from jetrl.memory.plan import OtherModels, Workload
from jetrl.models.draft_head import DraftHead
from jetrl.models.families import ModelConfig
from jetrl.models.model import Model, check_device
from jetrl.models.norm_noise import NormNoise
from jetrl.models.policy import Policy
from jetrl.models.scalar_model import ScalarModel
from jetrl.precision import PrecisionPlan
from jetrl.randomness import derive_seed
from jetrl.rollout.engine import RolloutEngine, check_gpu_sizes
from jetrl.rollout.kv_cache import PagedCache
from jetrl.rollout.kv_pool import check_room, too_small
from jetrl.runs import RunDirectory, check_trackers
from jetrl.session.building import (
    build_policy,
    build_reward,
    build_scalar_model,
    check_kept,
    choose_device,
    model_config,
    read_reference,
    value_model,
)
from jetrl.session.examples import PairFacts, preference_pair, trained_examples, worked_answer
from jetrl.session.parity import check_correction, require_exact
from jetrl.session.partial_rollouts import PartialRollouts
from jetrl.session.prompt_order import PromptOrder
from jetrl.session.ranks import problem_of
from jetrl.session.reward import Reward
from jetrl.session.sampling import EncodedPrompt, encode_prompts, turns_of
from jetrl.settings.loading import Settings
from jetrl.settings.sections import verified_drafts
from jetrl.tasks import Scorer, Task, build_task
from jetrl.training import Checkpoints
from jetrl.training.advantages import StepRewards
from jetrl.training.objectives import Objective, UsersEstimator
from jetrl.training.sft import Pair

_ADVICE = "`jetrl train --dry-run` prints what a run holds"


@dataclass(frozen=True)
class Machine:
    """The device that a run is checked for.

    Attributes:
        free: Free bytes before anything is loaded; None if unknown.
        cards: GPUs of the run; None: one per process.
        elsewhere: Whether Hopper GPUs of another machine are meant.
    """

    device: str
    free: int | None
    cards: int | None = None
    elsewhere: bool = False

    @staticmethod
    def here(settings: Settings) -> Machine:
        """Return the device of run.device on this machine."""
        device = choose_device(settings.run.device)
        return Machine(device, free_bytes(device))


@dataclass(frozen=True)
class TrainingContext:
    """The model and data of a training of any kind.

    Attributes:
        model: Without weights until they are loaded.
        prompts: In the order of their split.
        loading: How long loading and the exactness proof took, in words.
    """

    model: Model
    task: Task
    prompts: list[EncodedPrompt]
    memory: Fitted
    notes: list[str]
    loading: str


@dataclass(frozen=True)
class RewardContext(TrainingContext):
    """The model and data of a reward model's training."""

    model: ScalarModel
    held_out: list[Pair]
    facts: PairFacts


@dataclass(frozen=True)
class CheckedRun(TrainingContext):
    """A run of reinforcement learning that only its weights can still refuse."""

    model: Policy
    objective: Objective
    max_turns: int
    longest: int
    eval_prompts: list[EncodedPrompt]
    scorer: Scorer


@dataclass(frozen=True)
class RunContext(CheckedRun):
    """The models and data of a run of reinforcement learning.

    Attributes:
        reward: None if the reward is the task's own score.
        draft_head: None without one.
    """

    engine: RolloutEngine
    reward: Reward | None
    noise: NormNoise
    draft_head: DraftHead | None

    @property
    def policy(self) -> Policy:
        return self.model

    def free_kv_pages(self) -> None:
        """Give back the KV pages, which took all free memory of a GPU: other models need it now."""
        if self.policy.device.type == "cuda":
            self.engine.free_cache()


def check_run(
    settings: Settings,
    stack: contextlib.ExitStack,
    resume: bool | None = None,
    machine: Machine | None = None,
) -> CheckedRun:
    """Refuse whatever a run can be refused for without its weights.

    A start, `--preflight` and `--dry-run` all call this function first, so that they say the same.
    Models are made without memory, by the constructors that the run uses.

    Args:
        resume: None: the run has no run directory.
        machine: None: this machine.
    """
    machine = machine or Machine.here(settings)
    device, free, cards = machine.device, machine.free, machine.cards
    plan = PrecisionPlan.from_settings(settings.precision, settings.sampler_deviation)
    _check_place(settings, plan, resume, cards)
    check_trackers(settings.trackers.names)
    objective = _objective(settings)  # a user's file runs
    notes = check_correction(settings.algorithm, plan)
    config, others = model_config(settings), OtherModels.of(settings)
    # Planned with the shortest possible prompts: what does not fit now fits with no prompts.
    check_fits(settings, config, others, Workload.of(settings, config, 1), device, free, cards)
    check_device(config, plan, torch.device(device), machine.elsewhere)
    rollout, task_settings = settings.rollout, settings.task
    if device.startswith("cuda"):
        check_gpu_sizes(rollout.max_batch_size, rollout.page_size)

    # The data, and the memory plan with the longest prompt.
    task = build_task(task_settings)
    max_turns = turns_of(task, task_settings.max_turns)
    policy = build_policy(settings, plan, task.alphabet, "meta")
    system_prompt = task_settings.system_prompt
    prompts = encode_prompts(policy, task, task_settings.split, system_prompt=system_prompt)
    if settings.sft.steps:
        for _ in trained_examples(worked_answer, build_task(task_settings), policy, prompts):
            pass  # a prompt without a worked answer is an error
    eval_prompts = []
    if settings.eval.every or settings.sft.until is not None:
        split, limit = task_settings.eval_split, settings.eval.prompts
        eval_prompts = encode_prompts(policy, task, split, limit, system_prompt)
    _check_contexts(settings, config, others, max(len(prompt.token_ids) for prompt in prompts))
    longest = max(len(prompt.token_ids) for prompt in (*prompts, *eval_prompts))
    load = Workload.of(settings, config, longest, max_turns)
    memory = check_fits(settings, config, others, load, device, free, cards)
    room = config.max_position_embeddings - longest
    if rollout.num_pages is not None:
        if free is not None:
            page_bytes = PagedCache.page_bytes(config, plan, rollout.page_size)
            check_room(rollout.num_pages, rollout.page_size, page_bytes, free)
        most = min(rollout.max_tokens, room)
        problem = too_small(rollout.num_pages, rollout.page_size, longest, most)
        if problem and settings.loop.steps:
            raise UserError(problem)
    if rollout.max_tokens > room:
        notes.append(
            f"rollout.max_tokens = {rollout.max_tokens}: after the longest prompt, of {longest} "
            f"tokens, the model's context has room for {room}, and a completion ends there"
        )

    # What is built from all that later: tried here, before anything slow.
    PromptOrder(settings, prompts, task.weights)
    PartialRollouts(settings, policy, prompts, max_turns, objective.dynamic_sampling, cards)
    read_reference(settings, policy)
    value_model(settings, policy)
    build_reward(settings, policy, memory.tokens)
    scorer = stack.enter_context(Scorer.from_settings(task_settings))
    return CheckedRun(
        model=policy,
        task=task,
        prompts=prompts,
        memory=memory,
        notes=notes,
        loading="",
        objective=objective,
        max_turns=max_turns,
        longest=longest,
        eval_prompts=eval_prompts,
        scorer=scorer,
    )


def check_pairs(
    settings: Settings, resume: bool | None = None, machine: Machine | None = None
) -> RewardContext:
    """Refuse whatever the training of a reward model can be refused for without its weights.

    Raises:
        UserError: Settings, data or a model that cannot be used; a task without pairs.
    """
    machine = machine or Machine.here(settings)
    plan, task_settings = PrecisionPlan.from_settings(settings.precision), settings.task
    _check_place(settings, plan, resume, machine.cards)
    config = model_config(settings).with_scalar_head()

    def planned(longest: int) -> Fitted:
        load, where = Workload.of_pairs(settings, longest), (machine.device, machine.free)
        return check_fits(settings, config, OtherModels(), load, *where, machine.cards)

    planned(1)  # what does not fit now fits with no pairs
    check_device(config, plan, torch.device(machine.device), machine.elsewhere)
    task = build_task(task_settings)
    model = build_scalar_model(settings, plan, task.alphabet, "meta")
    system_prompt = task_settings.system_prompt
    prompts = encode_prompts(model, task, task_settings.split, system_prompt=system_prompt)
    eval_prompts = encode_prompts(
        model, task, task_settings.eval_split, settings.eval.prompts, system_prompt
    )
    held_out = [preference_pair(task, model, encoded) for encoded in eval_prompts]
    another_task = build_task(task_settings)
    facts = PairFacts.of([*trained_examples(preference_pair, another_task, model, prompts)])
    longest = max(facts.longest, *(len(sequence) for pair in held_out for sequence in pair))
    return RewardContext(model, task, prompts, planned(longest), [], "", held_out, facts)


def _check_place(
    settings: Settings, plan: PrecisionPlan, resume: bool | None, cards: int | None
) -> None:
    """Check the run directory, unless there is none, and the number of processes."""
    problem = problem_of(settings, cards or world().size)
    if problem:
        raise UserError(problem)
    if resume is None:
        return

    def check() -> None:
        RunDirectory.check(settings, plan.to_dict(), resume)
        run = Path(settings.run.dir) / str(settings.run.name)
        if resume and Checkpoints(run / "checkpoints").steps():
            check_kept(settings, run / "reference")

    world().from_first("the run's directory", check)


def open_context(
    settings: Settings, stack: contextlib.ExitStack, resume: bool | None = None
) -> RunContext:
    """Check a run, then load its models; the stack closes the scoring processes.

    Raises:
        UserError: As `check_run`; weights that cannot be used.
    """
    checked = check_run(settings, stack, resume)
    plan, rollout = checked.model.plan, settings.rollout
    began = time.monotonic()
    with explained("loading the model", _ADVICE):
        policy = build_policy(settings, plan, checked.task.alphabet)
        load_s = time.monotonic() - began
        proof_s = require_exact(policy)

    # The reward model, whose forward takes as many tokens as the plan has room for.
    began = time.monotonic()
    with explained("loading the reward model", _ADVICE):
        reward = build_reward(settings, policy, checked.memory.tokens)
        load_s += time.monotonic() - began
    loading = f"models loaded in {load_s:.1f} s"
    if proof_s is not None:
        loading += f", exactness proven in {proof_s:.1f} s"
    draft_head = None
    if rollout.asks_head and settings.loop.steps:
        seed = derive_seed(settings.run.seed, "draft head")
        draft_head = DraftHead(policy, settings.draft_head.tokens, seed)
    device = choose_device(settings.run.device)
    engine = RolloutEngine(
        policy,
        max_batch_size=rollout.max_batch_size,
        num_pages=rollout.num_pages,
        page_size=rollout.page_size,
        max_prefill_tokens=rollout.max_prefill_tokens,
        speculation=verified_drafts(rollout.speculation, plan.exact, device, rollout.oversample),
        draft_head=draft_head,
    )
    return RunContext(
        **vars(checked) | {"model": policy, "loading": loading},
        engine=engine,
        reward=reward,
        noise=NormNoise(policy, settings),
        draft_head=draft_head,
    )


def open_reward_context(settings: Settings, resume: bool | None = None) -> RewardContext:
    """Check the training of a reward model, then load its model.

    Raises:
        UserError: As `check_pairs`; weights that cannot be used.
    """
    checked = check_pairs(settings, resume)
    began = time.monotonic()
    with explained("loading the model", "`jetrl sft --task reward --dry-run` prints what it holds"):
        model = build_scalar_model(settings, checked.model.plan, checked.task.alphabet)
    loading = f"models loaded in {time.monotonic() - began:.1f} s"
    return replace(checked, model=model, loading=loading)


def _objective(settings: Settings) -> Objective:
    """Return what a run optimizes; the record of a user's algorithm is known from here on."""
    objective = Objective.from_settings(settings.algorithm, settings.rollout.max_tokens)
    if settings.algorithm.from_file and settings.loop.steps > 0:
        problems = list(settings.algorithm_problems(objective.algorithm))
        if problems:
            raise UserError("; ".join(problems))
        try_advantages(objective, settings)
    return objective


def _check_contexts(
    settings: Settings, config: ModelConfig, others: OtherModels, longest_prompt: int
) -> None:
    """Check that every model beside the policy can read whole sequences."""
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


_SHORT = 7  # tokens: completions of the trial have 1 to so many, except for the first


def try_advantages(objective: Objective, settings: Settings) -> None:
    """Call a user's advantage function once with rewards such as a first step may have.

    The global random generators are left as they were. The trainer runs the user's file again, so
    nothing that the file keeps comes from here.
    """
    if not isinstance(objective.advantages, UsersEstimator):
        return
    step = made_up_rewards(objective, settings)
    try:
        with _same_random_state():
            objective.advantages(step)
    except UserError as error:
        rollout = settings.rollout
        raise UserError(
            f"{error} (tried before the run on made-up rewards of {rollout.prompts_per_step} x "
            f"{rollout.samples_per_prompt} samples)"
        ) from error


def made_up_rewards(objective: Objective, settings: Settings) -> StepRewards:
    """Return rewards of a whole step, of 0 and 1.

    Every second group has equal rewards, unless the algorithm samples other groups in their place.
    """
    rollout = settings.rollout
    count = rollout.samples_per_prompt
    group_S = np.repeat(np.arange(rollout.prompts_per_step), count)
    which_S = np.tile(np.arange(count), rollout.prompts_per_step)
    reward_S = ((which_S + group_S // 2) % 2).astype(np.float64)
    if not objective.dynamic_sampling:
        reward_S[group_S % 2 == 1] = 0.0
    longest = rollout.max_tokens
    lengths = [longest if i == 0 else min(1 + i % _SHORT, longest) for i in range(len(group_S))]
    penalty = 0.01 if objective.kl_in_reward else 0.0
    has_critic = settings.critic.path is not None
    return StepRewards(
        reward_S,
        group_S,
        [np.full(length, penalty) for length in lengths],
        [np.full(length, 0.5, np.float32) for length in lengths] if has_critic else None,
    )


@contextlib.contextmanager
def _same_random_state() -> Iterator[None]:
    """Put the global random generators of Python, NumPy and torch back at the end of the block."""
    python, numpy = random.getstate(), np.random.get_state()
    cards = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=cards):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
