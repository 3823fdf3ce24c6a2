"""The sections of other models and of the adapter: [reference], [critic], [reward], [adapter]."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator

from jetrl.settings.algorithms import AlgorithmSettings
from jetrl.settings.precision_section import PrecisionSettings
from jetrl.settings.section import NonNegativeFloat, Positive, PositiveFloat, Section


class ReferenceSettings(Section):
    """The frozen policy of the KL, which keeps only its quantized weights."""

    path: str | None = None
    """a Hugging Face model directory or name; unset: the policy as RL begins, if algorithm.kl > 0,
    or with an adapter the model without it (with a path and kl = 0 the KL is only measured)"""
    offload: bool = False
    """kept in CPU memory between its uses"""


class CriticSettings(Section):
    """The value model of ppo: a decoder with a scalar head, under the policy's precision plan."""

    path: str | None = None
    """a Hugging Face model directory or name, or policy for a copy of the policy's decoder as RL
    begins; unset: no critic"""
    lr: PositiveFloat = 1e-5
    """peak learning rate of its AdamW; the rest is as in [train]"""
    clip: NonNegativeFloat = 0.2
    """values move by at most this from those before the step; 0: unlimited"""


class RewardSettings(Section):
    """The weights of a completion's reward: rule x the task's score + model x a reward model's."""

    rule: NonNegativeFloat = 1.0
    """weight of the task's own score"""
    model: NonNegativeFloat = 0.0
    """weight of the reward model's score; 0: none"""
    model_path: str | None = None
    """a Hugging Face directory or name, ...ForSequenceClassification with one label"""
    offload: bool = False
    """reward model kept in CPU memory between its uses"""

    @property
    def is_weighed(self) -> bool:
        """Return whether a reward differs from the task's score."""
        return self.model_path is not None or self.rule != 1

    @model_validator(mode="after")
    def has_a_source(self) -> RewardSettings:
        if not self.rule and not self.model:
            raise ValueError("reward.rule and reward.model are both 0: every reward would be 0")
        if self.model and self.model_path is None:
            need = "reward.model_path, a directory that `jetrl sft --task reward` writes"
            raise ValueError(f"reward.model = {self.model} needs {need}")
        if self.model_path is not None and not self.model:
            raise ValueError("reward.model_path is set, but reward.model = 0: give it a weight")
        if self.offload and self.model_path is None:
            raise ValueError("reward.offload is set, but there is no reward model")
        return self


MOST_RANK = 512
Rank = Annotated[int, Field(ge=1, le=MOST_RANK)]


class AdapterSettings(Section):
    """The adapter that is trained in place of the model's own weights (docs/adapters.md)."""

    kind: Literal["lora"] | None = None
    """lora: the model is frozen, and low-rank adapters are trained; unset: all parameters are
    trained"""
    path: str | None = None
    """a PEFT directory to start from; unset: a new adapter"""
    rank: Rank | None = None
    """rank of A and B; unset: the path's, or 32"""
    alpha: PositiveFloat | None = None
    """the product is scaled by alpha / rank; unset: the path's, or 32"""
    rslora: bool | None = None
    """scale by alpha / sqrt(rank) instead; unset: the path's, or false"""
    targets: tuple[str, ...] | str | None = None
    """linear layers as PEFT names them, or one regular expression; unset: the path's, or
    all-linear: every linear layer of the decoder"""
    train_embeddings: bool = False
    """train the whole embedding too"""
    train_norms: bool = False
    """train the norms' weights too"""
    train_head: bool = False
    """train the whole output head too"""
    noise_start: NonNegativeFloat = 0.0
    """standard deviation of Gaussian noise on the weights of norms, in sampling and training, after
    a first part of the run without any (QeRL: 0.01); 0: no noise"""
    noise_end: PositiveFloat = 5e-4
    """standard deviation of the noise in the last part of the run"""
    noise_stages: Positive = 10
    """number of parts of the run with noise, which falls from one to the next"""

    def base_problems(self, precision: PrecisionSettings) -> Iterator[str]:
        """Yield messages about a precision that conflicts with the section."""
        if precision.base == "nvfp4" and self.kind is None:
            yield "precision.base = nvfp4 is for a model that is not trained: set adapter.kind=lora"
        if precision.preset == "fp32" and self.noise_start:
            yield "adapter.noise_start needs rounded weights: precision.preset = fp32 has none"

    def problems(self, algorithm: AlgorithmSettings, reference: ReferenceSettings) -> Iterator[str]:
        """Yield messages about settings of an RL run that an adapter excludes."""
        if self.kind is None:
            return
        if algorithm.calibrate_clip_every:
            yield "algorithm.calibrate_clip_every needs master weights: set it to 0 with an adapter"
        if reference.path is None and reference.offload:
            yield "reference.offload: an adapter's reference is the policy's own base; leave it out"
        changes_base = self.train_embeddings or self.train_norms or self.train_head
        if reference.path is None and algorithm.kl and changes_base:
            what = "the base, which adapter.train_embeddings, train_norms and train_head change"
            instead = "set reference.path to the model's directory"
            yield f"algorithm.kl measures against {what}: {instead}"

    @model_validator(mode="after")
    def is_switched_on(self) -> AdapterSettings:
        """Check that no other key is set if adapter.kind is unset."""
        if self.kind is not None:
            if 0 < self.noise_start < self.noise_end:
                start, end = f"{self.noise_start:g}", f"{self.noise_end:g}"
                raise ValueError(f"adapter.noise_start = {start} is below noise_end = {end}")
            return self
        for key, field in type(self).model_fields.items():
            if getattr(self, key) != field.default:
                instead = "set adapter.kind=lora too, or leave it out"
                raise ValueError(f"adapter.{key} is set: {instead}")
        return self
