"""A look at a run before it begins: a few prompts with the model's answers, and warnings.

Nothing is written and nothing is trained. The model is as it is before any update.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from jetrl.models.chat import decode
from jetrl.runs import problems
from jetrl.session.examples import PairFacts, preference_pair
from jetrl.session.open import open_context, open_reward_context
from jetrl.session.prompt_order import PromptOrder
from jetrl.session.sampling import Scoring, sample_prompts
from jetrl.session.step import rollout_params
from jetrl.session.step_metrics import sample_metrics
from jetrl.settings.loading import Settings
from jetrl.types import Prompt, Sample

PROMPTS = 4
SAMPLES = 4  # of each prompt, or fewer where the recipe has fewer


@dataclass(frozen=True)
class Preflight:
    """The preflight of reinforcement learning."""

    samples: tuple[Sample, ...]
    warnings: tuple[str, ...]


def preflight(settings: Settings) -> Preflight:
    """Open a run without its directory; sample and score the first prompts of its first step.

    Raises:
        UserError: Settings, data or a model that cannot be used.
    """
    rollout = settings.rollout
    with contextlib.ExitStack() as stack:
        context = open_context(settings, stack)
        order = PromptOrder(settings, context.prompts, context.task.weights)
        prompts = order.draw(1, min(PROMPTS, rollout.prompts_per_step))
        params = rollout_params(settings, step=1)
        params = replace(params, n=min(SAMPLES, rollout.samples_per_prompt))
        scoring = Scoring(context.scorer, prompts, params.n)
        samples = scoring.samples(
            sample_prompts(context.engine, scoring, params, context.max_turns)
        )
    if context.reward is not None:
        context.engine.free_cache()
        samples = context.reward(samples)
    metrics = sample_metrics(samples, context.objective.algorithm.compares_group)
    warnings = problems([metrics], f"{len(samples)} completions", "look at them above")
    failures = [sample.failure for sample in samples if sample.failure]
    if failures:
        warnings["failures"] = (
            f"{len(failures)} of {len(samples)} completions could not be judged: {failures[0]}"
        )
    return Preflight(tuple(samples), tuple(warnings.values()))


@dataclass(frozen=True)
class ScoredCompletion:
    """A completion of a pair with the reward model's score before training."""

    text: str
    tokens: int
    score: float


@dataclass(frozen=True)
class ScoredPair:
    """A prompt and its two completions."""

    prompt: Prompt
    completions: tuple[ScoredCompletion, ...]


@dataclass(frozen=True)
class PairPreflight:
    """The preflight of a reward model's training."""

    pairs: tuple[ScoredPair, ...]
    facts: PairFacts
    warnings: tuple[str, ...]


def preflight_pairs(settings: Settings) -> PairPreflight:
    """Score the first pairs of the first update with a reward model before its training."""
    context = open_reward_context(settings)
    model, facts, tokenizer = context.model, context.facts, context.model.tokenizer
    assert tokenizer is not None, "pairs were encoded"
    order = PromptOrder(settings, context.prompts, context.task.weights, use="sft")
    scored: list[ScoredPair] = []
    for encoded in order.draw(1, min(PROMPTS, settings.sft.examples_per_step)):
        pair = preference_pair(context.task, model, encoded)
        answers = [sequence[len(encoded.token_ids) :] for sequence in pair]
        scores = model.scores(pair, context.memory.tokens).tolist()
        completions = tuple(
            ScoredCompletion(decode(tokenizer, answer), len(answer), score)
            for answer, score in zip(answers, scores, strict=True)
        )
        scored.append(ScoredPair(encoded.prompt, completions))
    warnings = []
    if facts.equal:
        warnings.append(
            f"{facts.equal} of {facts.count} pairs are the same completion twice: nothing is "
            "learnt from them"
        )
    return PairPreflight(tuple(scored), facts, tuple(warnings))
