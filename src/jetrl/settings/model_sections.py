"""The sections of the models beside the policy: `[reference]`, `[critic]` and `[reward]`."""

from __future__ import annotations

from pydantic import Field, model_validator

from jetrl.settings.section import NonNegativeFloat, PositiveFloat, Section


class ReferenceSettings(Section):
    """The frozen policy of the KL, which keeps its quantized weights alone."""

    path: str | None = Field(
        None,
        description="a Hugging Face model directory or name; unset: the policy as RL begins, if "
        "algorithm.kl > 0, or with an adapter the model without it (with a path and kl = 0 the KL "
        "is measured alone)",
    )
    offload: bool = Field(False, description="kept in CPU memory between its uses")


class CriticSettings(Section):
    """The value model of ppo: a decoder with a scalar head, under the policy's precision plan."""

    path: str | None = Field(
        None,
        description="a Hugging Face model directory or name, or policy for a copy of the policy's "
        "decoder as RL begins; unset: no critic",
    )
    lr: PositiveFloat = Field(
        1e-5, description="peak learning rate of its AdamW; the rest is as in [train]"
    )
    clip: NonNegativeFloat = Field(
        0.2, description="values move by at most this from those before the step; 0: unlimited"
    )


class RewardSettings(Section):
    """The weights of a completion's reward.

    The reward is rule x the task's score + model x the score of a reward model.
    """

    rule: NonNegativeFloat = Field(1.0, description="weight of the task's own score")
    model: NonNegativeFloat = Field(0.0, description="weight of the reward model's score; 0: none")
    model_path: str | None = Field(
        None,
        description="a Hugging Face directory or name, ...ForSequenceClassification with one label",
    )
    offload: bool = Field(False, description="reward model kept in CPU memory between its uses")

    @property
    def is_weighed(self) -> bool:
        """Return whether a reward is anything but the task's score."""
        return self.model_path is not None or self.rule != 1

    @model_validator(mode="after")
    def has_a_source(self) -> RewardSettings:
        """Check that a reward has a source with a weight."""
        if not self.rule and not self.model:
            raise ValueError("reward.rule and reward.model are both 0: every reward would be 0")
        if self.model and self.model_path is None:
            raise ValueError(
                f"reward.model = {self.model} needs reward.model_path, a reward model's directory "
                "(`jetrl sft --task reward` trains one)"
            )
        if self.model_path is not None and not self.model:
            raise ValueError("reward.model_path is set, but reward.model = 0: give it a weight")
        if self.offload and self.model_path is None:
            raise ValueError("reward.offload is set, but there is no reward model")
        return self
