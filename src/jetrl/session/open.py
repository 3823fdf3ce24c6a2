"""Open a run: all checks come before the run directory is created."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from jetrl.distributed.world import world
from jetrl.errors import UserError
from jetrl.memory.device import free_bytes
from jetrl.memory.fitting import Fitted, check_fits
from jetrl.memory.out_of_memory import explained
from jetrl.memory.plan import OtherModels, PlannedRun, Workload
from jetrl.models.draft_head import DraftHead
from jetrl.models.families import ModelConfig, num_parameters
from jetrl.models.model import Model, check_device
from jetrl.models.norm_noise import NormNoise
from jetrl.models.policy import Policy
from jetrl.models.source import model_config
from jetrl.precision import PrecisionPlan
from jetrl.precision.backend import HOPPER, REFERENCE, backend_elsewhere, backend_for
from jetrl.precision.formats import number_format
from jetrl.randomness import derive_seed
from jetrl.rollout.engine import RolloutEngine, check_gpu_sizes
from jetrl.rollout.kv_cache import PagedCache
from jetrl.rollout.kv_pool import check_room, too_small
from jetrl.runs.directory import check_start
from jetrl.runs.trackers import check_trackers
from jetrl.session.building import (
    Reward,
    build_policy,
    build_reward,
    build_scalar_model,
    build_teacher,
    check_image_tokens,
    check_kept,
    device_of,
    dpo_reference,
    end_token_notes,
    image_bound,
    largest_image,
    read_reference,
    teacher_prompts,
    value_model,
)
from jetrl.session.episodes import Play, ServedPolicy
from jetrl.session.examples import (
    TextOrder,
    demonstration,
    eval_pieces,
    preference_examples,
    preference_pair,
    trained_examples,
)
from jetrl.session.parity import require_exact
from jetrl.session.partial_rollouts import PartialRollouts
from jetrl.session.prompt_order import PromptOrder, with_steps
from jetrl.session.ranks import problem_of
from jetrl.session.recorded import RecordedRollouts
from jetrl.session.sampling import EncodedPrompt, encode_prompts, turns_of
from jetrl.settings.algorithms import AlgorithmSettings
from jetrl.settings.loading import Settings
from jetrl.settings.model_sections import verified_drafts
from jetrl.settings.sections import TrainSettings
from jetrl.tasks import Scorer, Task, build_task
from jetrl.tasks.endpoint import Endpoint
from jetrl.tasks.registry import trained_on
from jetrl.tasks.rows import import_package
from jetrl.tasks.text import RawText
from jetrl.training.checkpoint import CheckpointFolder
from jetrl.training.objectives import Objective
from jetrl.types import Example, PromptInputs

WARNING = "warning: "  # prefix of notes that are warnings
_ADVICE = "`jetrl train --dry-run` prints the memory plan of a run"
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
        device = device_of(settings)
        # The memory plan of a GPU counts its kernels' tensors, not those of the references.
        planned = device == "cpu" or settings.run.backend != REFERENCE.name
        return Machine(device, free_bytes(device) if planned else None)

    def is_hopper(self, plan: PrecisionPlan) -> bool:
        """Return whether a GPU runs Hopper's kernels. Raises UserError if none are for it."""
        elsewhere, device = self.elsewhere, torch.device(self.device)
        return (backend_elsewhere(plan.defined) if elsewhere else backend_for(device)) is HOPPER


@dataclass(kw_only=True)
class TrainingContext:
    """Settings, model and data of any kind of training.

    The checks build the model without weights; loading replaces it and describes how long it took
    in `loading`. Prompts are in the order of their split.
    """

    settings: Settings
    machine: Machine
    model: Model
    task: Task
    prompts: list[EncodedPrompt]
    eval_prompts: list[EncodedPrompt]
    memory: Fitted
    notes: list[str]
    loading: str = ""

    def prompt_order(self, use: str = "prompts") -> PromptOrder:
        """Return a new order of the training prompts; each `use` has its own random order."""
        return PromptOrder(self.settings, self.prompts, self.task.weights, use)


@dataclass(kw_only=True)
class PairContext(TrainingContext):
    """Model and data of training on pairs: a reward model, or a policy by DPO."""

    eval_pairs: list[Any]


@dataclass(kw_only=True)
class TextContext(TrainingContext):
    """Model and data of training on raw text; it has no prompts."""

    model: Policy
    order: TextOrder
    eval_examples: list[Example]


@dataclass(kw_only=True)
class RunContext(TrainingContext):
    """Models and data of an RL run.

    `settings` have loop.steps in place of loop.epochs. Only `open_context` sets the engine and the
    models next to the policy.
    """

    model: Policy
    objective: Objective
    max_turns: int
    scorer: Scorer = field(init=False)
    engine: RolloutEngine = field(init=False)
    recorded: RecordedRollouts | None = field(init=False)
    teacher_prompts: Mapping[bytes, PromptInputs] = field(default_factory=dict)
    reward: Reward | None = field(init=False)
    noise: NormNoise = field(init=False)
    draft_head: DraftHead | None = field(init=False)
    served: ServedPolicy | None = field(init=False)

    @property
    def policy(self) -> Policy:
        return self.model

    @property
    def plays(self) -> bool:
        """Return whether a harness plays episodes, in place of sampling and scoring."""
        return isinstance(self.task, Endpoint)

    def play(self, version: int) -> Play | None:
        """Return the function that plays episodes with the weights after `version` steps."""
        return self.served.player(version) if self.served is not None and self.plays else None

    def free_kv_pages(self) -> None:
        """Free the KV pages, which take all free GPU memory, for other models."""
        if self.policy.device.type == "cuda":
            self.engine.free_cache()


def check_run(
    settings: Settings,
    stack: contextlib.ExitStack,
    resume: bool | None = None,
    machine: Machine | None = None,
) -> RunContext:
    """Run all checks of a run that need no weights; raise UserError for a problem.

    Shared by a start, `--preflight` and `--dry-run`, so that they report the same. If `resume` is
    None, the run has no directory; the default machine is this one.
    """
    machine = machine or Machine.here(settings)
    plan = PrecisionPlan.from_settings(settings.precision)
    # Cheap checks first: directory, trackers, user files.
    _check_place(settings, plan, resume, machine.cards)
    check_trackers(settings.trackers.names)
    # Import the user's file; the record of its algorithm is known from here on.
    objective = Objective.from_settings(settings.algorithm, settings.rollout.max_tokens)
    unfit = list(settings.algorithm_problems(objective.algorithm))
    if unfit and settings.algorithm.from_file and settings.loop.steps:
        raise UserError("; ".join(unfit))
    notes = _check_correction(settings.algorithm, plan)
    _check_defined(settings, plan)
    config = model_config(settings)
    others = OtherModels.of(settings)
    # Plan memory with the shortest prompts: a lower bound that fails early.
    _planned(settings, config, others, Workload.of(settings, config, 1), machine)
    # Kernels support only some widths and plans.
    check_device(
        config,
        plan,
        torch.device(machine.device),
        elsewhere=machine.elsewhere,
        adapted=settings.adapter.kind is not None,
    )
    if machine.device.startswith("cuda"):
        check_gpu_sizes(settings.rollout.max_batch_size, settings.rollout.page_size)

    # The data, and the memory plan with the longest prompt.
    task = build_task(settings.task)
    max_turns = turns_of(task, settings.task.max_turns)
    policy = build_policy(settings, plan, task.alphabet, "meta")
    prompts = _training_prompts(settings, policy, task)
    settings, epoch = with_steps(settings, prompts, task.weights)
    if settings.sft.steps:
        # Use a separate task object: a task may be stateful.
        for _ in trained_examples(demonstration, build_task(settings.task), policy, prompts):
            pass  # a prompt without a demonstration is an error
    evaluates = settings.eval.every or settings.sft.until is not None
    eval_prompts = _eval_prompts(settings, policy, task) if evaluates else []
    # Only the policy reads eval prompts; other models read the training prompts.
    _check_contexts(settings, config, others, _longest(prompts))
    read = [*prompts, *eval_prompts]
    largest = largest_image(policy, [prompt.inputs for prompt in read])
    load = Workload.of(settings, config, _longest(read), max_turns=max_turns, largest_image=largest)
    run = RunContext(
        settings=settings,
        machine=machine,
        model=policy,
        task=task,
        prompts=prompts,
        eval_prompts=eval_prompts,
        memory=_planned(settings, config, others, load, machine),
        notes=[*notes, epoch, *image_bound(policy, largest)],
        objective=objective,
        max_turns=max_turns,
    )
    for check in _RUN_CHECKS:
        run.notes += check(run)
    _build_other_models(run)
    # Start scoring processes last; the stack closes them.
    run.scorer = Scorer.from_settings(settings.task, settings.rollout.samples_per_prompt)
    stack.enter_context(run.scorer)
    return run


def check_pairs(
    settings: Settings,
    resume: bool | None = None,
    machine: Machine | None = None,
    dpo: bool = False,
) -> PairContext:
    """Run all checks of training on pairs that need no weights: a reward model, or `dpo`."""
    machine = machine or Machine.here(settings)
    plan = PrecisionPlan.from_settings(settings.precision)
    _check_place(settings, plan, resume, machine.cards)
    _refuse_undefined("training on pairs", plan)
    _refuse_unread_by_pairs(settings.train)
    config = model_config(settings)
    config = config if dpo else config.with_scalar_head()
    others = OtherModels.of(settings) if dpo else OtherModels()
    # Lower bound: without pairs.
    _planned(settings, config, others, Workload.of_pairs(settings, 1, dpo), machine)
    check_device(config, plan, torch.device(machine.device), elsewhere=machine.elsewhere)
    # Read every pair now, so that problems are reported before weights are loaded.
    task = build_task(settings.task)
    # DPO needs prompts apart from completions; a reward model scores whole sequences.
    build = build_policy if dpo else build_scalar_model
    model = build(settings, plan, task.alphabet, "meta")
    prompts = _training_prompts(settings, model, task)
    eval_prompts = _eval_prompts(settings, model, task)
    pair_of: Callable[..., Any] = preference_examples if dpo else preference_pair
    eval_pairs = [pair_of(task, model, encoded) for encoded in eval_prompts]
    pairs = [*trained_examples(pair_of, build_task(settings.task), model, prompts)]
    longest = max(len(sequence) for pair in (*pairs, *eval_pairs) for sequence in pair)
    if isinstance(model, Policy):
        dpo_reference(settings, model, task.alphabet)
    load = Workload.of_pairs(settings, longest, dpo)
    run = PairContext(
        settings=settings,
        machine=machine,
        model=model,
        task=task,
        prompts=prompts,
        eval_prompts=eval_prompts,
        memory=_planned(settings, config, others, load, machine),
        notes=[],
        eval_pairs=eval_pairs,
    )
    run.notes += _short_warm_up("sft", settings.sft.warmup_steps, settings.sft.steps)
    run.notes += _overlap(run)
    equal = sum(better == worse for better, worse in pairs)
    if equal:
        run.notes.append(
            f"{equal} of {len(pairs)} pairs are the same completion twice and have no effect"
        )
    return run


def check_text(
    settings: Settings, resume: bool | None = None, machine: Machine | None = None
) -> TextContext:
    """Run all checks of training on raw text that need no weights; reads the whole text once."""
    machine = machine or Machine.here(settings)
    plan, sft = PrecisionPlan.from_settings(settings.precision), settings.sft
    _check_place(settings, plan, resume, machine.cards)
    check_trackers(settings.trackers.names)
    _check_defined(settings, plan)
    config, longest = model_config(settings), max(sft.lengths)
    if longest > config.max_position_embeddings:
        context = config.max_position_embeddings
        raise UserError(f"sft.lengths = {longest}: the model's context is {context}; lower it")
    check_device(config, plan, torch.device(machine.device), elsewhere=machine.elsewhere)
    memory = _planned(settings, config, OtherModels(), Workload.of_text(settings), machine)
    task = build_task(settings.task)
    assert isinstance(task, RawText)
    policy = build_policy(settings, plan, None, "meta")
    split = task.split(settings.task.split)
    world().same("the text", split.digest)
    notes = [f"{split.documents:,} documents to train on, with {split.characters:,} characters"]
    eval_examples: list[Example] = []
    if settings.eval.every:
        eval_examples = eval_pieces(settings, policy, task)
        notes.append(f"{sum(map(len, eval_examples)):,} tokens to evaluate on")
    notes += _short_warm_up("sft", sft.warmup_steps, sft.steps)
    return TextContext(
        settings=settings,
        machine=machine,
        model=policy,
        task=task,
        prompts=[],
        eval_prompts=[],
        memory=memory,
        notes=notes,
        order=TextOrder(settings, policy, split),
        eval_examples=eval_examples,
    )


def _planned(
    settings: Settings, config: ModelConfig, others: OtherModels, load: Workload, machine: Machine
) -> Fitted:
    """Return the memory plan of a workload; raise if it does not fit on the machine."""
    run = PlannedRun(
        settings=settings,
        config=config,
        others=others,
        load=load,
        cards=world().size if machine.cards is None else machine.cards,
        device=machine.device,
        hopper=machine.is_hopper(PrecisionPlan.from_settings(settings.precision)),
    )
    return check_fits(run, machine.free)


def _training_prompts(settings: Settings, model: Model, task: Task) -> list[EncodedPrompt]:
    section = settings.task
    return encode_prompts(model, task, section.split, system_prompt=section.system_prompt)


def _eval_prompts(settings: Settings, model: Model, task: Task) -> list[EncodedPrompt]:
    section, limit = settings.task, settings.eval.prompts
    return encode_prompts(model, task, section.eval_split, limit, section.system_prompt)


def _longest(prompts: list[EncodedPrompt]) -> int:
    return max(len(prompt.inputs) for prompt in prompts)


# Checks of the settings


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
        check_start(settings, plan.to_dict(), resume)
        run = Path(settings.run.dir) / str(settings.run.name)
        if resume and CheckpointFolder(run / "checkpoints").steps():
            check_kept(settings, run / "reference")

    # Rank 0 checks; all ranks raise its error.
    world().from_first("the run's directory", check)


def _check_correction(algorithm: AlgorithmSettings, plan: PrecisionPlan) -> list[str]:
    """Reject a mismatch correction under an exact plan, which has no mismatch.

    Return a warning if sampler and trainer differ by more than rounding without a correction.
    """
    correction = algorithm.correction
    if correction == "none":
        if plan.rollout_linear == plan.train_linear and not plan.sampler_only:
            return []
        return [
            f"plan {plan.name} has a train-inference mismatch: consider precision.preset=int8, "
            "which has none (docs/study.md), or algorithm.correction=tis"
        ]
    if not plan.exact or algorithm.correction_under_exact_plan:
        return []
    raise UserError(
        f"algorithm.correction = {correction} has no effect under the exact plan {plan.name!r}: "
        "every weight is 1. Leave it out, or set algorithm.correction_under_exact_plan=true"
    )


def _check_defined(settings: Settings, plan: PrecisionPlan) -> None:
    """Refuse what has no definition yet under a plan that has the same bits on every machine."""
    undefined = {
        "adapter.kind = lora": settings.adapter.kind == "lora",
        "critic.path": settings.critic.path is not None,
        "teacher.path": settings.teacher.path is not None,
        "algorithm.calibrate_clip_every": settings.algorithm.calibrate_clip_every > 0,
        f"rollout.speculation = {settings.rollout.speculation}": settings.rollout.asks_head,
        "reward.model_path": settings.reward.model_path is not None,
        "data.order = pass_rate": settings.data.order == "pass_rate",
        "data.batch = shuffle_r1": settings.data.batch == "shuffle_r1",
    }
    for setting, asked in undefined.items():
        if asked:
            _refuse_undefined(setting, plan)


def _refuse_undefined(what: str, plan: PrecisionPlan) -> None:
    if plan.defined:
        raise UserError(
            f"{what}: its operations are not defined for every machine yet, as preset {plan.name} "
            "needs them (docs/bits.md); use precision.preset = int8 with it"
        )


def _refuse_unread_by_pairs(train: TrainSettings) -> None:
    """Raise a UserError for settings that training on pairs would ignore."""
    asked = {
        "train.graphs = on": train.graphs == "on",
        f"train.router_aux_loss = {train.router_aux_loss}": train.router_aux_loss > 0,
    }
    for setting in (name for name, given in asked.items() if given):
        raise UserError(f"{setting} has no effect in training on pairs: leave it out")


def _check_contexts(
    settings: Settings, config: ModelConfig, others: OtherModels, longest_prompt: int
) -> None:
    """Check that every model can read full sequences."""
    max_tokens = settings.rollout.max_tokens
    needed = min(config.max_position_embeddings, longest_prompt + max_tokens)
    for key, path, other in (
        ("reference.path", settings.reference.path, others.reference),
        ("critic.path", settings.critic.path, others.critic),
        ("teacher.path", settings.teacher.path, others.teacher),
        ("reward.model_path", settings.reward.model_path, others.reward),
    ):
        room = needed if other is None else other.max_position_embeddings
        if room < needed and settings.loop.steps:
            raise UserError(
                f"{key} = {path}: its context of {room} tokens is too short for the longest "
                f"prompt ({longest_prompt}) and rollout.max_tokens = {max_tokens}; lower the latter"
            )


# Checks of an RL run: each yields notes for the user, or raises UserError


def _short_warm_ups(run: RunContext) -> Iterator[str]:
    settings = run.settings
    updates = settings.loop.steps * settings.train.updates_per_step
    yield from _short_warm_up("sft", settings.sft.warmup_steps, settings.sft.steps)
    yield from _short_warm_up("train", settings.train.warmup_steps, updates)


def _short_warm_up(section: str, warmup_steps: int, updates: int) -> Iterator[str]:
    """Note a learning-rate warm-up that is longer than the training."""
    if 0 < updates < warmup_steps:
        yield (
            f"{section}.warmup_steps is above its {updates} updates: the rate never reaches "
            f"{section}.lr"
        )


def _overlap(run: TrainingContext) -> Iterator[str]:
    """Warn if eval prompts are also training prompts."""
    trained = [encoded.prompt for encoded in run.prompts]
    evaluated = [encoded.prompt for encoded in run.eval_prompts]
    problem = trained_on(run.task, trained, evaluated)
    if problem:
        yield WARNING + problem


def _slower_than_bf16(run: RunContext) -> Iterator[str]:
    plan = run.policy.plan
    coded = run.machine.device != "cpu" and number_format(plan.train_linear).coded
    # Plans with defined bits were not measured: they have other kernels.
    if coded and not plan.defined and num_parameters(run.policy.config) <= _SLOWER_TO:
        yield (
            "precision.preset=bf16 trains a model this small faster: with 135M parameters on one "
            f"H100, int8 took {_TIMES_BF16} times as long as bf16 with round-to-nearest"
        )


def _sequences(run: RunContext) -> Iterator[str]:
    """Check that the KV cache and the model's context hold the longest sequence."""
    rollout, longest = run.settings.rollout, _longest([*run.prompts, *run.eval_prompts])
    config, plan = run.policy.config, run.policy.plan
    room = config.max_position_embeddings - longest
    # A KV cache of a given size must fit, and must hold the longest sequence.
    if rollout.num_pages is not None:
        if run.machine.free is not None:
            page_bytes = PagedCache.page_bytes(config, plan, rollout.page_size)
            check_room(rollout.num_pages, rollout.page_size, page_bytes, run.machine.free)
        most = min(rollout.max_tokens, room)
        problem = too_small(rollout.num_pages, rollout.page_size, longest, most)
        if problem and run.settings.loop.steps:
            raise UserError(problem)
    if rollout.max_tokens > room:
        yield (
            f"rollout.max_tokens = {rollout.max_tokens}: after the longest prompt, of {longest} "
            f"tokens, the model's context has room for {room}"
        )


def _endpoint(run: RunContext) -> Iterator[str]:
    """Check what a harness, and an endpoint, exclude."""
    settings = run.settings
    asked = "rollout.serve_port" if settings.rollout.serve_port is not None else ""
    if asked := "task endpoint" if run.plays else asked:
        import_package("uvicorn", asked, "serve")
    if not run.plays:
        return
    if run.policy.tokenizer is None:
        raise UserError("task endpoint needs a tokenizer: set model.tokenizer")
    unfit = {
        "task.system_prompt": settings.task.system_prompt is not None,
        "task.max_turns": settings.task.max_turns is not None,
        "rollout.oversample": settings.rollout.oversample > 0,
        "data.rollouts": settings.data.rollouts is not None,
        "data.batch = shuffle_r1": settings.data.batch == "shuffle_r1",
        "reward.model_path": settings.reward.model_path is not None,
        "teacher.prompt": settings.teacher.prompt is not None,
    }
    for setting, is_set in unfit.items():
        if is_set:
            raise UserError(f"{setting} does not work with task endpoint: leave it out")
    yield (
        f"rollout.max_tokens = {settings.rollout.max_tokens} is the context of the harness: "
        "prompts and answers together"
    )


def _few_prompts(run: RunContext) -> Iterator[str]:
    per_step = run.settings.rollout.prompts_per_step
    if len(run.prompts) < per_step and run.settings.loop.steps:
        yield (
            f"task {run.task.label} has {len(run.prompts)} prompts to train on, fewer than "
            f"rollout.prompts_per_step = {per_step}: a step samples some of them more than once"
        )


_RUN_CHECKS: tuple[Callable[[RunContext], Iterator[str]], ...] = (
    _short_warm_ups,
    _overlap,
    _slower_than_bf16,
    _sequences,
    _few_prompts,
    _endpoint,
)


def _refuse_images(run: RunContext, others: Mapping[str, Model | None]) -> None:
    """Raise a UserError if a run with images has a part that reads text only."""
    first = next((each.prompt.id for each in run.prompts if each.inputs.images), None)
    if first is None:
        return
    # These get token ids only, where an image is a row of equal tokens.
    blind = [key for key, model in others.items() if model is not None and model.tower is None]
    blind += ["reward.model_path"] if run.settings.reward.model_path is not None else []
    if blind:
        raise UserError(f"prompt {first!r} has images, and {blind[0]} reads text only: unset it")


def _build_other_models(run: RunContext) -> None:
    """Build what the run needs later, so that errors appear before weights are loaded."""
    settings, policy, dynamic = run.settings, run.policy, run.objective.dynamic_sampling
    run.prompt_order()
    run.recorded = None
    if settings.data.rollouts is not None:
        run.recorded = RecordedRollouts(settings, policy, run.prompts)
    if settings.data.replay_steps and not policy.plan.exact:
        raise UserError(
            f"data.replay_steps = {settings.data.replay_steps}: the plan {policy.plan.name!r} is "
            "not exact, so ratios to earlier policies are not; use precision.preset=int8"
        )
    PartialRollouts(settings, policy, run.prompts, run.max_turns, dynamic, run.machine.cards)
    others: dict[str, Model | None] = {"reference.path": read_reference(settings, policy)}
    if settings.teacher.path is not None:
        others["teacher.path"] = teacher = build_teacher(settings, policy)
        run.notes += end_token_notes(policy, teacher)
        prompts = [(encoded.prompt, encoded.inputs) for encoded in run.prompts]
        run.teacher_prompts = teacher_prompts(settings, teacher, prompts)
    others["critic.path"] = value_model(settings, policy)
    build_reward(settings, policy, run.memory.tokens)
    _refuse_images(run, others)
    asked = [each.prompt for each in run.prompts]
    check_image_tokens(policy, "reference.path", others["reference.path"], asked)
    if settings.teacher.prompt is None:  # else the teacher has tokens of its own
        check_image_tokens(policy, "teacher.path", others.get("teacher.path"), asked)


def open_context(
    settings: Settings, stack: contextlib.ExitStack, resume: bool | None = None
) -> RunContext:
    """Check a run, then load its models; the stack closes the scoring processes."""
    run = check_run(settings, stack, resume)
    settings, plan, rollout = run.settings, run.policy.plan, run.settings.rollout
    began = time.monotonic()
    with explained("loading the model", _ADVICE):
        run.model = build_policy(settings, plan, run.task.alphabet)
        proof_s = require_exact(run.policy)
        # The reward model's forward takes as many tokens as the plan allows.
        run.reward = build_reward(settings, run.policy, run.memory.tokens)
    run.loading = f"models loaded in {time.monotonic() - began - (proof_s or 0.0):.1f} s"
    if proof_s is not None:
        run.loading += f", exactness proven in {proof_s:.1f} s"
    # A draft head shares the embedding and the output head of the policy.
    run.draft_head = None
    if rollout.asks_head and settings.loop.steps:
        seed = derive_seed(settings.run.seed, "draft head")
        run.draft_head = DraftHead(run.policy, settings.draft_head.tokens, seed)
    device = device_of(settings)
    context = run.policy.config.max_position_embeddings
    run.engine = RolloutEngine(
        run.policy,
        rollout.max_batch_size,
        num_pages=rollout.num_pages,
        page_size=rollout.page_size,
        max_prefill_tokens=rollout.max_prefill_tokens,
        # The memory plan has room for conversations of so many tokens.
        max_model_len=min(context, settings.longest_answer) if run.plays else None,
        speculation=verified_drafts(rollout.speculation, plan.exact, device, rollout.oversample),
        draft_head=run.draft_head,
    )
    run.noise = NormNoise(run.policy, settings)
    run.served = None
    if run.plays or rollout.serve_port is not None:
        task = run.task if isinstance(run.task, Endpoint) else None
        run.served = ServedPolicy(run.engine, run.policy, task, rollout.serve_port)
        stack.callback(run.served.close)
    return run


def open_pair_context(
    settings: Settings, resume: bool | None = None, dpo: bool = False
) -> PairContext:
    """Check training on pairs, then load its model."""
    run = check_pairs(settings, resume, dpo=dpo)
    began = time.monotonic()
    advice = "`jetrl sft --dry-run` with the same --task prints the memory plan"
    build = build_policy if dpo else build_scalar_model
    with explained("loading the model", advice):
        run.model = build(settings, run.model.plan, run.task.alphabet)
    run.loading = f"models loaded in {time.monotonic() - began:.1f} s"
    return run


def open_text_context(settings: Settings, resume: bool | None = None) -> TextContext:
    """Check training on raw text, then load its model."""
    run = check_text(settings, resume)
    began = time.monotonic()
    with explained("loading the model", "`jetrl sft --dry-run` prints the memory plan"):
        run.model = build_policy(settings, run.model.plan, None)
    run.loading = f"models loaded in {time.monotonic() - began:.1f} s"
    return run
