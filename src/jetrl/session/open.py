"""Opening a run: everything it is made of, before anything is written.

A mistake in settings, data or models is found here, while no run directory exists yet.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from jetrl.errors import UserError
from jetrl.memory.device import free_bytes
from jetrl.memory.fitting import Fitted, check_fits
from jetrl.memory.out_of_memory import explained
from jetrl.memory.plan import OtherModels, Workload
from jetrl.models.draft_head import DraftHead
from jetrl.models.families import ModelConfig
from jetrl.models.model import Model
from jetrl.models.norm_noise import NormNoise
from jetrl.models.policy import Policy
from jetrl.parity import require_exact
from jetrl.precision import PrecisionPlan
from jetrl.randomness import derive_seed
from jetrl.rewards.environment import turns_of
from jetrl.rewards.reward import Reward
from jetrl.rewards.sampling import EncodedPrompt, encode_prompts
from jetrl.rollout.engine import RolloutEngine
from jetrl.runs import check_trackers
from jetrl.session.advantages_trial import try_advantages
from jetrl.session.building import build_policy, build_reward, choose_device, model_config
from jetrl.session.examples import trained_examples, worked_answer
from jetrl.settings.loading import Settings
from jetrl.settings.speculation import verified_drafts
from jetrl.tasks import Scorer, Task, build_task
from jetrl.training.objectives import Objective

_ADVICE = "`jetrl train --dry-run` prints what a run holds"


@dataclass(frozen=True)
class TrainingContext:
    """The model and data of a training of any kind.

    Attributes:
        model: The model that is trained.
        task: The task that the prompts come from.
        prompts: The prompts to train on, in the order of their split.
        memory: The memory plan.
        loading: How long it took to load the models, and to prove that the flow is exact, in words.
        notes: Lines to show to the user at the start.
    """

    model: Model
    task: Task
    prompts: list[EncodedPrompt]
    memory: Fitted
    loading: str
    notes: list[str]


@dataclass(frozen=True)
class RunContext(TrainingContext):
    """The models and data of a run of reinforcement learning, and the processes that score.

    Attributes:
        model: The policy that is trained.
        objective: The algorithm that is trained with.
        max_turns: The most turns of a completion.
        eval_prompts: The held-out prompts, in the order of their split; none where nothing is
            evaluated.
        scorer: The scoring processes.
        engine: The engine that samples from the policy.
        reward: Makes the rewards of [reward]; None where the reward is the task's own score.
        noise: The noise on the policy's norms, which `[adapter]` asks for.
        draft_head: The draft head that the engine asks and the trainer trains, or None.
    """

    model: Policy
    objective: Objective
    max_turns: int
    eval_prompts: list[EncodedPrompt]
    scorer: Scorer
    engine: RolloutEngine
    reward: Reward | None
    noise: NormNoise
    draft_head: DraftHead | None

    @property
    def policy(self) -> Policy:
        """The policy that is trained."""
        return self.model

    def free_kv_pages(self) -> None:
        """Give back the KV pages, which took all free memory of a GPU: other models need it now."""
        if self.policy.device.type == "cuda":
            self.engine.free_cache()


def open_context(settings: Settings, stack: contextlib.ExitStack) -> RunContext:
    """Load the models and data of a run; the stack closes the scoring processes.

    Raises:
        UserError: Settings, data or a model that cannot be used.
    """
    check_trackers(settings.trackers.names)
    plan = PrecisionPlan.from_settings(settings.precision, settings.sampler_deviation)
    objective = _objective(settings)  # a user's file runs
    config, others = model_config(settings), OtherModels.of(settings)
    device = choose_device(settings.run.device)
    free = free_bytes(device)
    # Planned with the shortest possible prompts: what does not fit now fits with no prompts.
    check_fits(settings, config, others, Workload.of(settings, config, 1), device, free)

    # The policy, and its proof where the plan is exact.
    task_settings = settings.task
    task = build_task(task_settings)
    max_turns = turns_of(task, task_settings.max_turns)
    began = time.monotonic()
    with explained("loading the model", _ADVICE):
        policy = build_policy(settings, plan, task.alphabet)
        load_s = time.monotonic() - began
        proof_s = require_exact(policy)

    # The data, and the memory plan with the longest prompt.
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
    memory = check_fits(settings, config, others, load, device, free)

    # The reward model, whose forward takes as many tokens as the plan has room for.
    began = time.monotonic()
    with explained("loading the reward model", _ADVICE):
        reward = build_reward(settings, policy, memory.tokens)
        load_s += time.monotonic() - began
    loading = f"models loaded in {load_s:.1f} s"
    if proof_s is not None:
        loading += f", exactness proven in {proof_s:.1f} s"
    rollout, draft_head = settings.rollout, None
    if rollout.asks_head and settings.loop.steps:
        seed = derive_seed(settings.run.seed, "draft head")
        draft_head = DraftHead(policy, settings.draft_head.tokens, seed)
    engine = RolloutEngine(
        policy,
        max_batch_size=rollout.max_batch_size,
        num_pages=rollout.num_pages,
        page_size=rollout.page_size,
        max_prefill_tokens=rollout.max_prefill_tokens,
        speculation=verified_drafts(rollout.speculation, plan.exact, device, rollout.oversample),
        draft_head=draft_head,
    )
    notes = []
    room = config.max_position_embeddings - longest
    if rollout.max_tokens > room:
        notes.append(
            f"rollout.max_tokens = {rollout.max_tokens}: after the longest prompt, of {longest} "
            f"tokens, the model's context has room for {room}, and a completion ends there"
        )
    return RunContext(
        model=policy,
        task=task,
        prompts=prompts,
        memory=memory,
        loading=loading,
        notes=notes,
        objective=objective,
        max_turns=max_turns,
        eval_prompts=eval_prompts,
        scorer=stack.enter_context(Scorer.from_settings(task_settings)),
        engine=engine,
        reward=reward,
        noise=NormNoise(policy, settings),
        draft_head=draft_head,
    )


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
    """Check that every model beside the policy can read whole sequences.

    Args:
        settings: The settings of the run.
        config: The policy's configuration.
        others: The configurations of the other models.
        longest_prompt: The tokens of the longest prompt that is trained on.
    """
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
