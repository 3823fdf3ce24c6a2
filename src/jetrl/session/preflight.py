"""A look at a run before it begins: a few prompts with the model's answers, and warnings."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from jetrl.runs.anomalies import problems
from jetrl.session.open import open_context
from jetrl.session.prompt_order import PromptOrder
from jetrl.session.sampling import Scoring, sample_prompts
from jetrl.session.step import rollout_params, sample_metrics
from jetrl.settings.loading import Settings
from jetrl.types import Sample

PROMPTS = 4
SAMPLES = 4  # of each prompt, or fewer if the recipe has fewer


def preflight(settings: Settings) -> tuple[list[Sample], list[str]]:
    """Sample and score the first prompts of a run that has no directory; also return warnings."""
    rollout = settings.rollout
    with contextlib.ExitStack() as stack:
        context = open_context(settings, stack)
        order = PromptOrder(settings, context.prompts, context.task.weights)
        prompts = order.draw(1, min(PROMPTS, rollout.prompts_per_step))
        params = rollout_params(settings, step=1)
        params = replace(params, n=min(SAMPLES, rollout.samples_per_prompt))
        scoring = Scoring(context.scorer, prompts, params.n)
        drawn = sample_prompts(context.engine, scoring, params, context.max_turns)
        samples = scoring.samples(drawn)
    if context.reward is not None:
        context.engine.free_cache()
        samples = context.reward(samples)
    # The same checks as after the first steps of a run.
    metrics = sample_metrics(samples, context.objective.algorithm.compares_group)
    warnings = problems([metrics], f"{len(samples)} completions", "look at them above")
    failures = [sample.failure for sample in samples if sample.failure]
    if failures:
        count = f"{len(failures)} of {len(samples)}"
        warnings["failures"] = f"{count} completions could not be judged: {failures[0]}"
    return samples, list(warnings.values())
