"""Opening a run: problems are found here, before a run directory exists."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from jetrl.distributed.world import world
from jetrl.errors import UserError
from jetrl.memory.device import free_bytes
from jetrl.memory.fitting import Fitted, check_fits
from jetrl.memory.out_of_memory import explained
from jetrl.memory.plan import OtherModels, Workload
from jetrl.models.draft_head import DraftHead
from jetrl.models.families import ModelConfig, num_parameters
from jetrl.models.model import Model, check_device
from jetrl.models.norm_noise import NormNoise
from jetrl.models.policy import Policy
from jetrl.models.scalar_model import ScalarModel
from jetrl.models.source import model_config
from jetrl.precision import PrecisionPlan
from jetrl.precision.formats import number_format
from jetrl.randomness import derive_seed
from jetrl.rollout.engine import RolloutEngine, check_gpu_sizes
from jetrl.rollout.kv_cache import PagedCache
from jetrl.rollout.kv_pool import check_room, too_small
from jetrl.runs.directory import RunDirectory
from jetrl.runs.trackers import check_trackers
from jetrl.session.building import (
    Reward,
    build_policy,
    build_reward,
    build_scalar_model,
    check_kept,
    choose_device,
    read_reference,
    value_model,
)
from jetrl.session.examples import preference_pair, trained_examples, worked_answer
from jetrl.session.parity import check_correction, require_exact
from jetrl.session.partial_rollouts import PartialRollouts
from jetrl.session.prompt_order import PromptOrder, with_steps
from jetrl.session.ranks import problem_of
from jetrl.session.sampling import EncodedPrompt, encode_prompts, turns_of
from jetrl.settings.loading import Settings
from jetrl.settings.sections import verified_drafts
from jetrl.tasks import Scorer, Task, build_task
from jetrl.tasks.registry import trained_on
from jetrl.training.checkpoint import Checkpoints
from jetrl.training.objectives import Objective
from jetrl.training.sft import Pair

WARNING = "warning: "  # prefix of notes that are warnings
_ADVICE = "`jetrl train --dry-run` prints what a run holds"
# SmolLM2-135M on one H100: training_s of benchmarks/results/h100/train_smollm2.json.
_SLOWER_TO = 200_000_000  # parameters
_TIMES_BF16 = 1.58


@dataclass(frozen=True)
class Machine:
    """The device that a run is checked for.

    `elsewhere`: GPUs of another machine. `free`: bytes available before anything is loaded (None:
    unknown). `cards`: number of GPUs (None: one per process).
    """

    device: str
    free: int | None
    cards: int | None = None
    elsewhere: bool = False

    @staticmethod
    def here(settings: Settings) -> Machine:
        """Return this machine's device for run.device."""
        device = choose_device(settings.run.device)
        return Machine(device, free_bytes(device))


@dataclass(frozen=True)
class TrainingContext:
    """Model and data of any kind of training; `loading` describes the loading time.

    The model has no weights until they are loaded. Prompts are in the order of their split.
    """

    model: Model
    task: Task
    prompts: list[EncodedPrompt]
    memory: Fitted
    notes: list[str]
    loading: str


@dataclass(frozen=True)
class RewardContext(TrainingContext):
    """Model and data of reward-model training."""

    model: ScalarModel
    held_out: list[Pair]


@dataclass(frozen=True)
class CheckedRun(TrainingContext):
    """An RL run that passed all checks except loading weights; loop.epochs is now loop.steps."""

    settings: Settings
    model: Policy
    objective: Objective
    max_turns: int
    eval_prompts: list[EncodedPrompt]
    scorer: Scorer


@dataclass(frozen=True)
class RunContext(CheckedRun):
    """Models and data of an RL run."""

    engine: RolloutEngine
    reward: Reward | None
    noise: NormNoise
    draft_head: DraftHead | None

    @property
    def policy(self) -> Policy:
        return self.model

    def free_kv_pages(self) -> None:
        """Free the KV pages, which take all free GPU memory, for other models."""
        if self.policy.device.type == "cuda":
            self.engine.free_cache()


def check_run(
    settings: Settings,
    stack: contextlib.ExitStack,
    resume: bool | None = None,
    machine: Machine | None = None,
) -> CheckedRun:
    """Run all checks of a run that need no weights; raise UserError for a problem.

    Shared by a start, `--preflight` and `--dry-run`, so that they report the same. If `resume` is
    None, the run has no directory; the default machine is this one.
    """
    machine = machine or Machine.here(settings)
    device, free, cards = machine.device, machine.free, machine.cards
    plan = PrecisionPlan.from_settings(settings.precision)
    # Cheap checks first: directory, trackers, user files.
    _check_place(settings, plan, resume, cards)
    check_trackers(settings.trackers.names)
    # Import the user's file; the record of its algorithm is known from here on.
    objective = Objective.from_settings(settings.algorithm, settings.rollout.max_tokens)
    unfit = list(settings.algorithm_problems(objective.algorithm))
    if unfit and settings.algorithm.from_file and settings.loop.steps:
        raise UserError("; ".join(unfit))
    notes = check_correction(settings.algorithm, plan)
    config, others = model_config(settings), OtherModels.of(settings)
    # Plan memory with the shortest prompts: a lower bound that fails early.
    check_fits(settings, config, others, Workload.of(settings, config, 1), device, free, cards)
    # Kernels support only some widths and plans.
    check_device(config, plan, torch.device(device), machine.elsewhere)
    rollout, task_settings = settings.rollout, settings.task
    if device.startswith("cuda"):
        check_gpu_sizes(rollout.max_batch_size, rollout.page_size)

    # The data, and the memory plan with the longest prompt.
    task, system_prompt = build_task(task_settings), task_settings.system_prompt
    max_turns = turns_of(task, task_settings.max_turns)
    policy = build_policy(settings, plan, task.alphabet, "meta")
    prompts = encode_prompts(policy, task, task_settings.split, system_prompt=system_prompt)
    settings, epoch = with_steps(settings, prompts, task.weights)
    updates = settings.loop.steps * settings.train.updates_per_step
    notes += [epoch, *_short_warm_ups(settings, sft=settings.sft.steps, train=updates)]
    # Use another task object, since a task may answer differently each time.
    if settings.sft.steps:
        for _ in trained_examples(worked_answer, build_task(task_settings), policy, prompts):
            pass  # a prompt without a demonstration is an error
    eval_prompts = []
    if settings.eval.every or settings.sft.until is not None:
        split, limit = task_settings.eval_split, settings.eval.prompts
        eval_prompts = encode_prompts(policy, task, split, limit, system_prompt)
    notes += _overlap(task, prompts, eval_prompts)
    # Only the policy reads eval prompts; other models read the training prompts.
    _check_contexts(settings, config, others, max(len(prompt.inputs) for prompt in prompts))
    longest = max(len(prompt.inputs) for prompt in (*prompts, *eval_prompts))
    load = Workload.of(settings, config, longest, max_turns)
    memory = check_fits(settings, config, others, load, device, free, cards)
    coded = device != "cpu" and number_format(plan.train_linear).coded
    if coded and num_parameters(config) <= _SLOWER_TO:
        notes.append(
            "precision.preset=bf16 updates a model this small faster: with 135M, on one H100, "
            f"int8 took {_TIMES_BF16} times as long as bf16 rounded to nearest"
        )
    room = config.max_position_embeddings - longest
    # A KV cache of a given size must fit, and must hold the longest sequence.
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
            f"tokens, the model's context has room for {room}"
        )

    if len(prompts) < rollout.prompts_per_step and settings.loop.steps:
        notes.append(
            f"task {task.label} has {len(prompts)} prompts to train on, fewer than "
            f"rollout.prompts_per_step = {rollout.prompts_per_step}: a step samples some of them "
            "more than once"
        )

    # Build now what is needed later, before anything slow.
    PromptOrder(settings, prompts, task.weights)
    PartialRollouts(settings, policy, prompts, max_turns, objective.dynamic_sampling, cards)
    read_reference(settings, policy)
    value_model(settings, policy)
    build_reward(settings, policy, memory.tokens)
    # Start scoring processes last; the stack closes them.
    scorer = Scorer.from_settings(task_settings, settings.rollout.samples_per_prompt)
    stack.enter_context(scorer)
    return CheckedRun(
        model=policy,
        task=task,
        prompts=prompts,
        memory=memory,
        notes=notes,
        loading="",
        settings=settings,
        objective=objective,
        max_turns=max_turns,
        eval_prompts=eval_prompts,
        scorer=scorer,
    )


def check_pairs(
    settings: Settings, resume: bool | None = None, machine: Machine | None = None
) -> RewardContext:
    """Run all checks of reward-model training that need no weights."""
    machine = machine or Machine.here(settings)
    plan, task_settings = PrecisionPlan.from_settings(settings.precision), settings.task
    _check_place(settings, plan, resume, machine.cards)
    config = model_config(settings).with_scalar_head()

    def planned(longest: int) -> Fitted:
        return check_fits(
            settings,
            config,
            others=OtherModels(),
            load=Workload.of_pairs(settings, longest),
            device=machine.device,
            free=machine.free,
            cards=machine.cards,
        )

    planned(1)  # lower bound: without pairs
    check_device(config, plan, torch.device(machine.device), machine.elsewhere)
    # Read every pair now, so that problems are reported before weights are loaded.
    task, system_prompt = build_task(task_settings), task_settings.system_prompt
    model = build_scalar_model(settings, plan, task.alphabet, "meta")
    prompts = encode_prompts(model, task, task_settings.split, system_prompt=system_prompt)
    split, limit = task_settings.eval_split, settings.eval.prompts
    eval_prompts = encode_prompts(model, task, split, limit, system_prompt)
    held_out = [preference_pair(task, model, encoded) for encoded in eval_prompts]
    pairs = [*trained_examples(preference_pair, build_task(task_settings), model, prompts)]
    equal = sum(better == worse for better, worse in pairs)
    notes = _short_warm_ups(settings, sft=settings.sft.steps)
    notes += _overlap(task, prompts, eval_prompts)
    if equal:
        notes += [f"{equal} of {len(pairs)} pairs are the same completion twice and teach nothing"]
    memory = planned(max(len(sequence) for pair in (*pairs, *held_out) for sequence in pair))
    return RewardContext(model, task, prompts, memory, notes, "", held_out)


def _overlap(
    task: Task, prompts: Sequence[EncodedPrompt], eval_prompts: Sequence[EncodedPrompt]
) -> list[str]:
    """Return a warning if eval prompts are also training prompts."""
    trained, held_out = ([e.prompt for e in some] for some in (prompts, eval_prompts))
    problem = trained_on(task, trained, held_out)
    return [WARNING + problem] if problem else []


def _short_warm_ups(settings: Settings, **updates: int) -> list[str]:
    """Return notes about sections whose warm-up does not end before the last update."""
    return [
        f"{name}.warmup_steps is above its {count} updates: the rate never reaches {name}.lr"
        for name, count in updates.items()
        if 0 < count < getattr(settings, name).warmup_steps
    ]


def _check_place(
    settings: Settings, plan: PrecisionPlan, resume: bool | None, cards: int | None
) -> None:
    """Check the number of processes, and the run directory unless `resume` is None."""
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

    # Rank 0 checks; all ranks raise its error.
    world().from_first("the run's directory", check)


def open_context(
    settings: Settings, stack: contextlib.ExitStack, resume: bool | None = None
) -> RunContext:
    """Check a run, then load its models; the stack closes the scoring processes."""
    checked = check_run(settings, stack, resume)
    settings = checked.settings
    plan, rollout = checked.model.plan, settings.rollout
    began = time.monotonic()
    with explained("loading the model", _ADVICE):
        policy = build_policy(settings, plan, checked.task.alphabet)
        proof_s = require_exact(policy)
        # The reward model's forward takes as many tokens as the plan allows.
        reward = build_reward(settings, policy, checked.memory.tokens)
    loading = f"models loaded in {time.monotonic() - began - (proof_s or 0.0):.1f} s"
    if proof_s is not None:
        loading += f", exactness proven in {proof_s:.1f} s"
    # A draft head shares the embedding and the output head of the policy.
    draft_head, device = None, choose_device(settings.run.device)
    if rollout.asks_head and settings.loop.steps:
        seed = derive_seed(settings.run.seed, "draft head")
        draft_head = DraftHead(policy, settings.draft_head.tokens, seed)
    engine = RolloutEngine(
        policy,
        rollout.max_batch_size,
        num_pages=rollout.num_pages,
        page_size=rollout.page_size,
        max_prefill_tokens=rollout.max_prefill_tokens,
        speculation=verified_drafts(rollout.speculation, plan.exact, device, rollout.oversample),
        draft_head=draft_head,
    )
    facts = vars(checked) | {"model": policy, "loading": loading}
    noise = NormNoise(policy, settings)
    return RunContext(**facts, engine=engine, reward=reward, noise=noise, draft_head=draft_head)


def open_reward_context(settings: Settings, resume: bool | None = None) -> RewardContext:
    """Check reward-model training, then load its model."""
    checked = check_pairs(settings, resume)
    began = time.monotonic()
    with explained("loading the model", "`jetrl sft --task reward --dry-run` prints what it holds"):
        model = build_scalar_model(settings, checked.model.plan, checked.task.alphabet)
    loading = f"models loaded in {time.monotonic() - began:.1f} s"
    return replace(checked, model=model, loading=loading)


def _check_contexts(
    settings: Settings, config: ModelConfig, others: OtherModels, longest_prompt: int
) -> None:
    """Check that every model can read full sequences."""
    max_tokens = settings.rollout.max_tokens
    needed = min(config.max_position_embeddings, longest_prompt + max_tokens)
    for key, path, other in (
        ("reference.path", settings.reference.path, others.reference),
        ("critic.path", settings.critic.path, others.critic),
        ("reward.model_path", settings.reward.model_path, others.reward),
    ):
        room = needed if other is None else other.max_position_embeddings
        if room < needed and settings.loop.steps:
            raise UserError(
                f"{key} = {path}: its context of {room} tokens is shorter than the longest prompt, "
                f"of {longest_prompt}, and rollout.max_tokens = {max_tokens}; lower that"
            )
