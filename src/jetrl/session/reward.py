"""The reward of a completion: the task's score and a reward model's, weighted and added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jetrl.errors import UserError
from jetrl.models.model import Model
from jetrl.models.scalar_model import ScalarModel, check_same_tokenizer
from jetrl.precision.plan import PrecisionPlan
from jetrl.settings.model_sections import RewardSettings
from jetrl.types import Sample, Score


class Reward:
    """The reward that `[reward]` makes of a task's score and a reward model's.

    Args:
        plan: The policy's plan: under an FP8 plan the reward model scores in FP8.
        tokens_at_once: Tokens of one packed forward of the reward model.

    Raises:
        UserError: The reward model is missing, or has another head, another tokenizer or too short
            a context.
    """

    def __init__(
        self,
        settings: RewardSettings,
        policy: Model,
        plan: PrecisionPlan,
        max_tokens: int,
        tokens_at_once: int,
    ) -> None:
        self._settings, self._tokens_at_once = settings, tokens_at_once
        self._model: ScalarModel | None = None
        if settings.model_path is None:
            return
        where = f"reward.model_path = {settings.model_path}"
        model = ScalarModel.from_pretrained(settings.model_path, plan, policy.device, frozen=True)
        check_same_tokenizer(policy.tokenizer, model.tokenizer, where)
        if model.config.max_position_embeddings <= max_tokens:
            raise UserError(
                f"{where}: its context of {model.config.max_position_embeddings} tokens has no "
                f"room for a prompt and rollout.max_tokens = {max_tokens}"
            )
        if settings.offload:
            model.offload()
        self._model = model

    @property
    def has_model(self) -> bool:
        """True where a reward model runs; otherwise only the task's score is weighted."""
        return self._model is not None

    def __call__(self, samples: Sequence[Sample]) -> list[Sample]:
        rule, weight = self._settings.rule, self._settings.model
        if self._model is None:
            scores = [0.0] * len(samples)
        else:
            sequences = [[*s.prompt_token_ids, *s.completion.token_ids] for s in samples]
            with self._model.used():
                scores = self._model.scores(sequences, self._tokens_at_once).tolist()
        rewarded = []
        for sample, score in zip(samples, scores, strict=True):
            parts = {**sample.score.parts, "rule": sample.score.reward}
            if self._model is not None:
                parts["model"] = score
            reward = rule * sample.score.reward + weight * score
            rewarded.append(replace(sample, score=Score(reward, parts)))
        return rewarded
