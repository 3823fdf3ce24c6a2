"""The memory plan: what a run will hold, computed from the settings before anything is loaded."""

from __future__ import annotations

import re
from pathlib import Path

from jetrl.config import Settings
from jetrl.models.attention import kv_bytes_per_token
from jetrl.models.families import ModelConfig, num_parameters, parameter_shapes
from jetrl.precision import PrecisionPlan
from jetrl.precision.plan import FP8_BLOCK


def memory_plan(
    settings: Settings, config: ModelConfig, on_gpu: bool = False
) -> list[tuple[str, int]]:
    """Rows (what, bytes): weights and their copies, optimizer, gradients, the KV pages that a full
    batch of the longest sequences would fill, and the saved activations of one micro-batch. on_gpu:
    FP8 weights have a transpose of their own there, for DGrad."""
    plan = PrecisionPlan.from_settings(settings.precision)
    parameters = num_parameters(config)
    rows = [
        ("master weights, FP32", 4 * parameters),
        ("AdamW moments, FP32", 8 * parameters),
        ("gradients, FP32", 4 * parameters),
        ("working copies for sampling and training", _working_bytes(config, plan, on_gpu)),
        ("KV pages of a full batch", _kv_bytes(settings, config, plan)),
        ("activations kept for backward", _activation_bytes(settings, config, plan)),
    ]
    rows += _beside_the_policy(settings, config, plan, on_gpu)
    return [*rows, ("total", sum(size for _, size in rows))]


def _beside_the_policy(
    settings: Settings, config: ModelConfig, plan: PrecisionPlan, on_gpu: bool
) -> list[tuple[str, int]]:
    """Rows of the reference and the critic where they are copies of the policy; the size of a model
    in another directory is not known here."""
    copies = _working_bytes(config, plan, transposes=False)
    rows = []
    reference = settings.reference
    if settings.algorithm.kl > 0 and reference.path is None and not reference.offload:
        shared = config.tie_word_embeddings and plan.lm_head == "bf16"
        embedding = 0 if shared else 2 * config.vocab_size * config.hidden_size
        rows.append(("reference: working copies alone", copies + embedding))
    if settings.critic.path == "policy":
        own = 16 * num_parameters(config)
        trained = _working_bytes(config, plan, on_gpu)
        rows.append(("critic: masters, moments, gradients, copies", own + trained))
    return rows


def available_bytes() -> int | None:
    """CPU memory that can be had without swapping; None where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return None if found is None else 1024 * int(found[1])


def _working_bytes(config: ModelConfig, plan: PrecisionPlan, transposes: bool) -> int:
    def copy(format: str, rows: int, columns: int) -> int:
        elements = rows * columns
        scales = 4 * -(-rows // FP8_BLOCK) * -(-columns // FP8_BLOCK)
        fp8 = (elements + scales) * (2 if transposes else 1)
        return {"fp8": fp8, "bf16": 2 * elements, "fp32": 0}[format]

    total = 0
    for name, shape in parameter_shapes(config).items():
        parts = name.split(".")
        if len(shape) == 2 and parts[0] == "layers":
            layer = int(parts[1])
            formats = {
                plan.linear_format(s, layer, config.num_layers) for s in ("rollout", "train")
            }
            total += sum(copy(format, *shape) for format in formats)
        elif name == ("embed.weight" if config.tie_word_embeddings else "lm_head.weight"):
            total += copy(plan.lm_head, *shape)
    return total


def _kv_bytes(settings: Settings, config: ModelConfig, plan: PrecisionPlan) -> int:
    rollout = settings.rollout
    per_token = kv_bytes_per_token(config, plan)
    if rollout.num_pages is not None:
        return rollout.num_pages * rollout.page_size * per_token
    running = min(rollout.max_batch_size, rollout.prompts_per_step * rollout.samples_per_prompt)
    longest = min(
        config.max_position_embeddings, 2 * rollout.max_tokens
    )  # prompt as long as answer
    return running * longest * per_token


def _activation_bytes(settings: Settings, config: ModelConfig, plan: PrecisionPlan) -> int:
    """Of one micro-batch: what each layer's operations save, or its input if layers are recomputed
    (and one layer's worth while it is)."""
    tokens, size = settings.train.tokens_per_micro_batch, config.hidden_size
    wide = 4 if plan.rest == "fp32" else 2
    linear = 1 if plan.train_linear == "fp8" else wide
    attention = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    linear_inputs = 2 * size + config.num_heads * config.head_dim + config.intermediate_size
    others = 2 * size + 2 * config.intermediate_size + 2 * attention
    layer = tokens * (linear * linear_inputs + wide * others)
    if settings.train.activation_checkpointing:
        return config.num_layers * tokens * size * wide + layer
    return config.num_layers * layer
