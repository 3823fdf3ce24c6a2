"""Bytes of a model's weights: master weights, optimizer states and quantized weights."""

from __future__ import annotations

import math
from typing import Literal

from jetrl.distributed.shards import shard_of
from jetrl.kernels.adamw import state_bytes
from jetrl.models.adapter import LoRA, adapter_names
from jetrl.models.draft_head import KNOWN_TOKENS, draft_head_shapes
from jetrl.models.families import ModelConfig, parameter_shapes
from jetrl.models.nvfp4_files import left_in_16_bits
from jetrl.precision.nvfp4 import NVFP4_GROUP
from jetrl.precision.plan import FP8_BLOCK, PrecisionPlan
from jetrl.settings.loading import Settings


def owned_shapes(config: ModelConfig, cards: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of the rows that one rank, the largest owner, has of each master weight.

    Args:
        cards: How many GPUs the rows of matrices are divided among.
    """

    def owned(shape: tuple[int, ...]) -> tuple[int, ...]:
        shard = shard_of(shape[0], 0, cards) if len(shape) > 1 else None
        return shape if shard is None else (max(shard.counts()), *shape[1:])

    return {name: owned(shape) for name, shape in parameter_shapes(config).items()}


def trained_shapes(
    config: ModelConfig, cards: int, lora: LoRA | None = None
) -> dict[str, tuple[int, ...]]:
    """Return the shape of the rows that one rank has of each master weight that is trained.

    Args:
        cards: How many GPUs the rows of matrices are divided among.
        lora: The adapter, whose master weights every rank has whole, beside those of the base that
            it trains too; None: all parameters are trained.
    """
    owned = owned_shapes(config, cards)
    if lora is None:
        return owned
    shapes = {name: shape for name, shape in owned.items() if lora.trains(name)}
    for layer, adapter in lora.shapes(config).items():
        shapes |= dict(zip(adapter_names(layer), (adapter.a_shape, adapter.b_shape), strict=True))
    return shapes


def trained_parameters(config: ModelConfig, cards: int, lora: LoRA | None = None) -> int:
    """Return the number of elements of `trained_shapes`, whose arguments these are.

    Args:
        cards: How many GPUs the rows of matrices are divided among.
        lora: The adapter that is trained; None: all parameters are.
    """
    return sum(map(math.prod, trained_shapes(config, cards, lora).values()))


def adapter_bytes(config: ModelConfig, plan: PrecisionPlan, lora: LoRA | None) -> int:
    """Return the bytes of an adapter as forwards read it; under the fp32 plan none of their own.

    Args:
        lora: The adapter; None: there is none.
    """
    if lora is None or plan.rest == "fp32":
        return 0
    shapes = lora.shapes(config).values()
    rows = sum(len(s.parts) * s.padded_rank * s.num_columns for s in shapes)
    return 2 * (rows + sum(s.num_rows * s.padded_rank for s in shapes))


def optimizer_bytes(
    settings: Settings, config: ModelConfig, cards: int = 1, lora: LoRA | None = None
) -> int:
    """Return the bytes of the optimizer's states, whose format is train.optimizer_states.

    Args:
        lora: The adapter that is trained; None: all parameters are.
    """
    states = settings.train.optimizer_states
    shapes = trained_shapes(config, cards, lora).values()
    return sum(state_bytes(shape, states) for shape in shapes)


def draft_head_bytes(settings: Settings, config: ModelConfig, plan: PrecisionPlan) -> int:
    """Return the bytes of a draft head."""
    width = 4 if plan.rest == "fp32" else 2
    size, shapes = config.hidden_size, draft_head_shapes(config.hidden_size).values()
    weights = sum(map(math.prod, shapes)) * (4 + width)
    weights += sum(state_bytes(shape, settings.train.optimizer_states) for shape in shapes)
    rows = min(KNOWN_TOKENS, config.vocab_size) + settings.draft_head.most_tokens
    return weights + width * size * rows


def frozen_bytes(config: ModelConfig, plan: PrecisionPlan) -> int:
    """Return the bytes of a frozen model: the weights that its forward reads."""
    return quantized_bytes(config, plan, sides=("train",))


def quantized_bytes(
    config: ModelConfig,
    plan: PrecisionPlan,
    sides: tuple[Literal["rollout", "train"], ...] = ("rollout", "train"),
) -> int:
    """Return the bytes of the weights as forwards read them, and of the rotary table.

    The embedding is rounded to the dtype of activations. Files in NVFP4 may leave linear layers in
    16 bits, which stay so. A head that is tied to it is the same
    tensor, where it has the same format.
    """

    def weight_bytes(format: str, rows: int, columns: int) -> int:
        elements = rows * columns
        scales = 4 * -(-rows // FP8_BLOCK) * -(-columns // FP8_BLOCK)
        nvfp4 = elements // 2 + elements // NVFP4_GROUP
        sizes = {"fp8": elements + scales, "nvfp4": nvfp4, "fp32": 0}
        return sizes.get(format, 2 * elements)

    tables = 2 if config.layers_without_rope else 1  # rotary positions, and angles of zero
    total = tables * 4 * config.max_position_embeddings * config.head_dim
    vocabulary = (config.vocab_size, config.hidden_size)
    total += weight_bytes(plan.rest, *vocabulary)
    heads = {plan.rounding(side, plan.on(side).lm_head) for side in sides}
    shared = config.tie_word_embeddings and heads == {plan.rounding("train", plan.rest)}
    if config.head == "lm" and not shared:
        total += sum(weight_bytes(rounding.format, *vocabulary) for rounding in heads)
    wide = 4 if plan.rest == "fp32" else 2
    left = left_in_16_bits(config) if plan.base == "nvfp4" else set()
    for name, shape in parameter_shapes(config).items():
        parts = name.split(".")
        if name in left:
            total += weight_bytes("bf16", *shape)
            continue
        if len(shape) == 2 and parts[0] == "layers":
            layer = int(parts[1])
            formats = {s: plan.linear_format(s, layer, config.num_layers) for s in sides}
            roundings = {plan.rounding(side, format) for side, format in formats.items()}
            total += sum(weight_bytes(rounding.format, *shape) for rounding in roundings)
        elif name.endswith("norm.weight"):
            total += wide * shape[0]
    return total
