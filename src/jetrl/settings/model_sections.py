"""Sections of the models: precision, reference, teacher, critic, reward, adapter, draft_head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from jetrl.settings import presets
from jetrl.settings.algorithms import AlgorithmSettings
from jetrl.settings.section import (
    LayerCount,
    Mass,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Quantile,
    Section,
)

MOST_TOKENS = 7  # Maximum draft length: a forward verifies 8 tokens per sequence.
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]


class PrecisionSettings(Section):
    """The section `[precision]`: a preset and its overrides."""

    preset: presets.Preset = presets.DEFAULT_PRESET
    """which tensors are FP8 or INT8, on which side (docs/plans.md). Default with base = nvfp4:
    unified"""
    grad_output: presets.GradFormat | None = None
    """format of output gradients in DGrad and WGrad. Default: from the preset"""
    scales: Literal["fp32", "pow2"] | None = None
    """FP8 scale format; pow2: powers of two. Default: from the preset (fp32)"""
    first_layers_bf16: LayerCount | None = None
    """number of leading decoder layers in BF16. Default: 1 for preset nvfp4, else 0"""
    last_layers_bf16: LayerCount | None = None
    """number of trailing decoder layers in BF16. Default: 1 for preset nvfp4, else 0"""
    kv: presets.KVSetting | None = None
    """KV-cache dtype; `int8+fp8` sets keys and values separately. Default: from the preset"""
    key_smoothing: bool | None = None
    """smooth INT8 keys with fixed per-channel factors and a Hadamard rotation (docs/precision.md).
    Default: true for presets int8, integer and unified"""
    lm_head: Literal["bf16", "fp8"] | None = None
    """format of the output projection. Default: from the preset (bf16)"""
    base: presets.BaseFormat | None = None
    """format of the frozen base's linear layers under an adapter; nvfp4 takes 4.5 bits per weight,
    with BF16 activations (docs/precision.md). Default: fp8"""
    wgrad_input: Literal["128x128", "1x128"] | None = None
    """scale-block shape of X in WGrad; 1x128 runs along tokens. Default: 128x128"""
    pinned_sums: bool | None = None
    """fixed reduction order (batch-invariant kernels), so that bf16 is bitwise consistent too.
    Default: only if both sides are FP8 or both are INT8"""
    bf16_rounding: presets.BF16Rounding | None = None
    """rounding of master weights to BF16; dithered: stochastic rounding, so that small updates
    are not rounded away (docs/precision.md). Default: dithered for presets bf16 and mixed, else
    nearest"""
    weight_block: presets.WeightBlock | None = None
    """values of a trained NVFP4 weight that share a scale; with 1x16 DGrad rounds the weight again,
    along its own sum (docs/precision.md). Default: 16x16"""
    wgrad_hadamard: bool | None = None
    """Hadamard rotation of 16 tokens before WGrad's operands are rounded to NVFP4. Default: true
    for preset nvfp4"""
    stochastic_rounding: bool | None = None
    """stochastic rounding of output gradients to NVFP4, by draws of (seed, update, micro-batch,
    weight, element). Default: true for preset nvfp4"""
    gradient_estimator: bool | None = None
    """multiply gradients of FP4 weights by the derivative of a smooth quantizer
    (docs/precision.md). Default: true for preset fp4"""
    outlier_quantile: Quantile | None = None
    """quantile at which the activations of a token are clamped, at both ends, before they are
    rounded to FP4; 1: never. Default: 0.99 for preset fp4, else 1"""
    outlier_compensation: bool | None = None
    """multiply what clamping took away from activations by the weight too, in BF16. Default: true
    for preset fp4"""
    saved: presets.SavedFormat | None = None
    """format of activations saved for backward; int8: dense layers save gate and up, queries and
    inputs of QK norms as INT8 codes, which takes less memory and changes gradients slightly
    (docs/precision.md). Default: off"""
    weights_through_bf16: bool | None = None
    """round master weights to BF16 before the sampler quantizes them to FP8, as if BF16 weights
    were sent to an FP8 sampler (docs/precision.md). Default: true for preset alike, else false"""

    @model_validator(mode="after")
    def _fp8_beside_nvfp4(self) -> Self:
        if self.base == "nvfp4" and "preset" not in self.model_fields_set:
            object.__setattr__(self, "preset", "unified")
        return self


class ReferenceSettings(Section):
    """The frozen reference policy of the KL term; only its quantized weights are stored."""

    path: str | None = None
    """Hugging Face model directory or name; if algorithm.kl = 0, the KL is only logged. Default if
    algorithm.kl > 0: the policy at the start of RL, or the base model under an adapter"""
    offload: bool = False
    """keep the reference in CPU memory between uses"""


class TeacherSettings(Section):
    """The frozen teacher of algorithm.name = opd; only its quantized weights are stored."""

    path: str | None = None
    """Hugging Face model directory or name, with the policy's vocabulary. Default: no teacher"""
    kl: Literal["vocabulary", "token"] = "vocabulary"
    """reverse KL per token over the whole vocabulary, or of the drawn token"""
    weight: PositiveFloat = 1.0
    """weight of the KL in the loss"""
    reward: NonNegativeFloat = 0.0
    """weight of the algorithm's loss by the rewards, in addition; 0: only the teacher counts"""
    prompt: str | None = None
    """the teacher's prompt, of {prompt} (the text, or the last message) and {answer}, such as
    "{prompt} (The answer is {answer}.)". Default: the policy's"""


class CriticSettings(Section):
    """The value model of PPO: a decoder with a scalar head, at the policy's precision."""

    path: str | None = None
    """Hugging Face model directory or name, or `policy` for a copy of the policy's decoder at the
    start of RL. Default: no critic"""
    lr: PositiveFloat = 1e-5
    """peak AdamW learning rate of the critic; other optimizer settings come from [train]"""
    clip: NonNegativeFloat = 0.2
    """clip range of value updates per step; 0: unlimited"""


class RewardSettings(Section):
    """Weights of the reward: rule x task score + model x reward-model score."""

    rule: NonNegativeFloat = 1.0
    """weight of the task's score"""
    model: NonNegativeFloat = 0.0
    """weight of the reward model's score; 0: none"""
    model_path: str | None = None
    """Hugging Face directory or name of a ...ForSequenceClassification model with one label"""
    offload: bool = False
    """keep the reward model in CPU memory between uses"""

    @property
    def is_weighed(self) -> bool:
        """Return True if rewards differ from the task's scores."""
        return self.model_path is not None or self.rule != 1

    @model_validator(mode="after")
    def has_a_source(self) -> RewardSettings:
        if not self.rule and not self.model:
            raise ValueError("reward.rule and reward.model are both 0: every reward would be 0")
        if self.model and self.model_path is None:
            raise ValueError(
                f"reward.model = {self.model} needs reward.model_path, a directory that `jetrl "
                "sft --task reward` writes"
            )
        if self.model_path is not None and not self.model:
            raise ValueError("reward.model_path is set, but reward.model = 0: give it a weight")
        if self.offload and self.model_path is None:
            raise ValueError("reward.offload is set, but there is no reward model")
        return self


MOST_RANK = 512
Rank = Annotated[int, Field(ge=1, le=MOST_RANK)]


class AdapterSettings(Section):
    """The adapter trained in place of the model's own weights (docs/adapters.md)."""

    kind: Literal["lora"] | None = None
    """lora: freeze the model and train low-rank adapters. Default: train all parameters"""
    path: str | None = None
    """PEFT adapter directory to start from. Default: a new adapter"""
    rank: Rank | None = None
    """LoRA rank. Default: from adapter.path, or 32"""
    alpha: PositiveFloat | None = None
    """LoRA alpha; updates are scaled by alpha / rank. Default: from adapter.path, or 32"""
    rslora: bool | None = None
    """scale by alpha / sqrt(rank) instead. Default: from adapter.path, or false"""
    targets: tuple[str, ...] | str | None = None
    """target linear layers, by PEFT names or one regular expression. Default: from adapter.path, or
    all-linear (every linear layer of the decoder but those of experts)"""
    train_embeddings: bool = False
    """also train the full embedding"""
    train_norms: bool = False
    """also train the norm weights"""
    train_head: bool = False
    """also train the full output head"""
    noise_start: NonNegativeFloat = 0.0
    """initial std of the Gaussian noise on norm weights, in sampling and training, after a first
    stage without noise (QeRL: 0.01); 0: no noise"""
    noise_end: PositiveFloat = 5e-4
    """std of the noise in the last stage"""
    noise_stages: Positive = 10
    """number of stages with noise; its std decreases from stage to stage"""

    def base_problems(self, precision: PrecisionSettings) -> Iterator[str]:
        """Yield messages about precision settings that conflict with the adapter."""
        if precision.base == "nvfp4" and self.kind is None:
            yield "precision.base = nvfp4 is for a model that is not trained: set adapter.kind=lora"
        if precision.preset == "fp32" and self.noise_start:
            yield "adapter.noise_start needs rounded weights: precision.preset = fp32 has none"

    @property
    def changes_base(self) -> bool:
        """Return True if parameters of the base are trained, too."""
        return self.train_embeddings or self.train_norms or self.train_head

    def problems(self, algorithm: AlgorithmSettings, reference: ReferenceSettings) -> Iterator[str]:
        """Yield messages about RL settings that an adapter does not support."""
        if self.kind is None:
            return
        if algorithm.calibrate_clip_every:
            yield "algorithm.calibrate_clip_every needs master weights: set it to 0 with an adapter"
        if reference.path is None and reference.offload:
            yield "reference.offload: an adapter's reference is the policy's own base; leave it out"
        if reference.path is None and algorithm.kl and self.changes_base:
            yield (
                "algorithm.kl measures against the base, which adapter.train_embeddings, "
                "train_norms and train_head change: set reference.path to the model's directory"
            )

    @model_validator(mode="after")
    def is_switched_on(self) -> AdapterSettings:
        """Check that no other adapter key is set if adapter.kind is unset."""
        if self.kind is not None:
            if 0 < self.noise_start < self.noise_end:
                start, end = f"{self.noise_start:g}", f"{self.noise_end:g}"
                raise ValueError(f"adapter.noise_start = {start} is below noise_end = {end}")
            return self
        for key, field in type(self).model_fields.items():
            if getattr(self, key) != field.default:
                raise ValueError(
                    f"adapter.{key} is set: set adapter.kind=lora too, or leave it out"
                )
        return self


class DraftHeadSettings(Section):
    """The section `[draft_head]`, for rollout.speculation = head or auto (docs/rollout.md)."""

    tokens: Tokens = 3
    """draft length, in tokens"""
    lr: PositiveFloat = 5e-4
    """AdamW learning rate of the draft head"""
    share: Mass = 0.2
    """fraction of the tokens of each step's first update to train the draft head on"""
    most_tokens: Positive = 16384
    """maximum tokens per step to train the draft head on"""
    tokens_per_update: Positive = 1024
    """tokens per draft-head update"""


Speculation = Literal["off", "text", "head", "auto"]


def verified_drafts(
    asked: Speculation | None, exact: bool, device: str, oversample: float
) -> Speculation:
    """Return the speculation mode of a run; by default text drafts if the run is reproducible.

    `auto` sizes forwards by measured time, which changes samples under an inexact plan and, with
    oversampling, which completions are truncated.

    Args:
        asked: rollout.speculation, or None if unset.
        exact: True if sampler and trainer agree bitwise.
        device: "cpu" or a GPU.
    """
    return asked or ("auto" if exact and device != "cpu" and not oversample else "off")
