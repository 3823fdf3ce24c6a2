"""A look at a run before it begins: a few prompts, what the model answers, and what that is worth.

Nothing is written and nothing is trained. The model is as it is before the supervised warm-up.
"""

from __future__ import annotations

from dataclasses import dataclass

from jetrl.precision import PrecisionPlan
from jetrl.randomness import derive_seed
from jetrl.rewards.environment import turns_of
from jetrl.rewards.sampling import Scoring, encode_prompts, sample_prompts
from jetrl.rollout.engine import RolloutEngine
from jetrl.runs import problems
from jetrl.session.building import build_judge, build_policy
from jetrl.session.shuffled_prompts import ShuffledPrompts
from jetrl.session.step_metrics import sample_metrics
from jetrl.settings.loading import Settings
from jetrl.tasks import Scorer, build_task
from jetrl.training.objectives import Objective
from jetrl.types import Sample, SamplingParams

PROMPTS = 4
SAMPLES = 4  # of each prompt, or fewer where the recipe has fewer


@dataclass(frozen=True)
class Preflight:
    """samples: grouped by prompt. warnings: what would keep the run from learning, in words."""

    samples: tuple[Sample, ...]
    warnings: tuple[str, ...]


def preflight(settings: Settings) -> Preflight:
    """The first prompts of the first step, sampled and scored as the run would.

    Raises:
        UserError: settings, data or a model that cannot be used.
    """
    wanted, rollout = settings.task, settings.rollout
    objective = Objective.from_settings(settings.algorithm, rollout.max_tokens)
    task = build_task(wanted)
    max_turns = turns_of(task, wanted.max_turns)
    policy = build_policy(settings, PrecisionPlan.from_settings(settings.precision), task)
    judge = build_judge(settings, policy, settings.train.tokens_per_micro_batch)
    prompts = encode_prompts(policy, task, wanted.split, system_prompt=wanted.system_prompt)
    order = ShuffledPrompts(
        [encoded.prompt.task for encoded in prompts],
        [encoded.prompt.id for encoded in prompts],
        task.weights,
        derive_seed(settings.run.seed, "prompts"),
    )
    chosen = [prompts[i] for i in order.draw(1, min(PROMPTS, rollout.prompts_per_step))]
    params = SamplingParams(
        n=min(SAMPLES, rollout.samples_per_prompt),
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=rollout.stop,
        seed=derive_seed(settings.run.seed, "rollout", 1),
    )
    if settings.eval.every:  # only to find what is wrong with it
        encode_prompts(policy, task, wanted.eval_split, settings.eval.prompts, wanted.system_prompt)
    with Scorer.from_settings(wanted) as scorer:
        engine = RolloutEngine(policy, rollout.max_batch_size, page_size=rollout.page_size)
        scoring = Scoring(scorer, chosen, params.n)
        samples = scoring.samples(sample_prompts(engine, scoring, params, max_turns))
    if judge is not None:
        engine.free_cache()
        samples = judge(samples)
    metrics = sample_metrics(samples, objective.algorithm.compares_group)
    found = problems([metrics], f"{len(samples)} completions", "look at them above")
    failures = [sample.failure for sample in samples if sample.failure]
    if failures:
        found["failures"] = (
            f"{len(failures)} of {len(samples)} completions could not be judged: {failures[0]}"
        )
    return Preflight(tuple(samples), tuple(found.values()))
