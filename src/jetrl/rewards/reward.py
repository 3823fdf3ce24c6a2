"""The reward of a completion: the task's score and a reward model's, weighted and added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jetrl.errors import UserError
from jetrl.models.model import Model
from jetrl.models.scalar_model import ScalarModel, check_same_tokenizer
from jetrl.precision.plan import PrecisionPlan
from jetrl.settings import RewardSettings
from jetrl.types import Sample, Score


class Reward:
    """Scores samples by `[reward]`.

    Args:
        settings: with a reward model, or with a weight of the task's score that is not 1.
        policy: whose token ids the reward model reads. plan: the policy's; the reward model keeps
            working copies in its formats alone, so an FP8 plan scores in FP8.
        max_tokens: rollout.max_tokens. tokens_at_once: of a packed forward.

    Raises:
        UserError: the model cannot be used: missing, another head, another tokenizer, a context too
            short.
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
        """Whether a reward model runs; else the task's score is weighted alone."""
        return self._model is not None

    def __call__(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with their weighted rewards; the parts `rule` and `model` say what each of
        the two gave."""
        rule, weight = self._settings.rule, self._settings.model
        if self._model is None:
            scores = [0.0] * len(samples)
        else:
            sequences = [[*s.prompt_token_ids, *s.completion.token_ids] for s in samples]
            with self._model.used():
                scores = self._model.scores(sequences, self._tokens_at_once).tolist()
        judged = []
        for sample, score in zip(samples, scores, strict=True):
            parts = {**sample.score.parts, "rule": sample.score.reward}
            if self._model is not None:
                parts["model"] = score
            reward = rule * sample.score.reward + weight * score
            judged.append(replace(sample, score=Score(reward, parts)))
        return judged
