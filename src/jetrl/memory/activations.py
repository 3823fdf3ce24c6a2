"""Bytes of activations: what a forward with gradients keeps, and what comes on top while it runs.

Counted from the sizes of models/layer_hopper and kernels/logprob_hopper, whose names are used
here; tests/gpu/test_memory.py compares. The CPU's references keep a little more.

Shapes: T tokens, D hidden size, H query heads, G key-value heads, d head size, F intermediate size,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from jetrl.kernels.attention.layout import (
    BACKWARD_KEYS,
    BACKWARD_QUERIES,
    DS_TILE_BYTES,
    STORED_DS_BYTES,
)
from jetrl.kernels.logit_chunks import rows_at_once
from jetrl.models.attention import kv_bytes_per_token, staged_bytes_per_token
from jetrl.models.families import ModelConfig
from jetrl.precision.plan import FP8_BLOCK, Format, PrecisionPlan


@dataclass(frozen=True)
class MicroBatch:
    """tokens: of it. longest: of its sequences. several: an update has more than one."""

    tokens: int
    longest: int
    several: bool


def kept_bytes(
    config: ModelConfig, plan: PrecisionPlan, tokens: int, recomputed: bool = False
) -> int:
    """What a forward of `tokens` keeps for backward, lm_head included. recomputed: layers keep
    their two inputs alone, and all of one layer is there while it is made again."""
    wide = _wide(plan)
    layers = [
        _layer_bytes(config, plan, plan.linear_format("train", i, config.num_layers), tokens)
        for i in range(config.num_layers)
    ]
    inputs = (2 * config.num_layers - 1) * wide * config.hidden_size * tokens  # the first has one
    kept = inputs + max(layers) if recomputed else sum(layers)
    last_norm = (wide * config.hidden_size + 4) * tokens
    return kept + last_norm + wide * config.hidden_size * tokens  # and the rows that lm_head reads


def on_top_bytes(
    config: ModelConfig, plan: PrecisionPlan, batch: MicroBatch, recomputed: bool = False
) -> int:
    """On top, at most, at the end of the forward and in backward: in lm_head or in a layer."""
    return max(head_bytes(config, batch, recomputed), layer_bytes(config, plan, batch))


def head_bytes(config: ModelConfig, batch: MicroBatch, recomputed: bool) -> int:
    """On top, in lm_head: the gradient of the logits, in bfloat16, of all rows or of the chunk
    where they are made again; with it a chunk of float32 logits, or in backward the gradient of the
    hidden states, and these scaled. The weight's is added to the one that is there."""
    if config.head == "score":
        return 0
    logits, hidden = chunk_bytes(config, batch.tokens), 10 * batch.tokens * config.hidden_size
    if recomputed:
        return logits + logits // 2 + hidden
    return 2 * batch.tokens * config.vocab_size + max(logits, hidden)


def chunk_bytes(config: ModelConfig, tokens: int) -> int:
    """Of the float32 logits that are there at once."""
    return 4 * min(tokens, rows_at_once(config.vocab_size)) * config.vocab_size


def layer_bytes(config: ModelConfig, plan: PrecisionPlan, batch: MicroBatch) -> int:
    """On top, at most, in one layer's backward: the gradients of the MLP's activations and of a
    weight, or those of the heads and dS."""
    tokens, hidden, inner = batch.tokens, config.hidden_size, config.intermediate_size
    gradient = 0 if batch.several else 4 * 2 * inner * hidden  # of gate_up, or added where it is
    if plan.train_linear == "fp8":
        # Where dY of gate_up is made: beside it dY of down as codes, that of SwiGLU, and y's codes.
        swiglu = (2 * hidden + 3 * inner) * tokens
        # Where dW of gate_up is: dX, X's codes, and the product in bfloat16.
        wgrad = 3 * hidden * tokens + 2 * 2 * inner * hidden + gradient
        mlp = 2 * hidden * tokens + 2 * _codes(2 * inner, tokens) + max(swiglu, wgrad)
    else:
        mlp = (6 * hidden + 6 * inner) * tokens + gradient
    heads = 2 * (3 * config.num_heads + 4 * config.num_kv_heads) * config.head_dim * tokens
    sequences = -(-tokens // batch.longest)
    across = -(-batch.longest // BACKWARD_QUERIES) * -(-batch.longest // BACKWARD_KEYS)
    ds = config.num_heads * sequences * (across // 2 + 1) * DS_TILE_BYTES
    return max(mlp, heads + min(ds, STORED_DS_BYTES))


def last_bytes(config: ModelConfig, plan: PrecisionPlan, batch: MicroBatch) -> int:
    """On top, at the end of backward: what is added to the embedding's gradient, and sorted by
    token for it; and the gradient of an FP8 lm_head that is tied to it, until they are added."""
    tied = config.tie_word_embeddings and plan.lm_head == "fp8"
    head = 4 * config.vocab_size * config.hidden_size if tied else 0
    return 14 * batch.tokens * config.hidden_size + head


def forward_bytes(config: ModelConfig, plan: PrecisionPlan, tokens: int, contexts: int = 0) -> int:
    """Of a forward without gradients over `tokens`, without its logits: what is there in the MLP,
    or in attention, with the staged keys and values and the state of finished splits. contexts:
    tokens whose keys it reads, its own included; default: none but its own."""
    wide = _wide(plan)
    hidden, heads, groups = config.hidden_size, config.num_heads, config.num_kv_heads
    mlp = wide * (7 * hidden + 3 * config.intermediate_size)
    attention = wide * (3 * hidden + (3 * heads + 6 * groups) * config.head_dim)
    attention += 4 * heads * config.head_dim
    others = max(0, contexts - tokens) * staged_bytes_per_token(config, plan)
    return max(tokens * mlp, tokens * attention + others)


def _layer_bytes(config: ModelConfig, plan: PrecisionPlan, linear: Format, tokens: int) -> int:
    wide, hidden = _wide(plan), config.hidden_size
    heads, groups = config.num_heads, config.num_kv_heads

    def linear_input(columns: int) -> int:
        """X of a linear: FP8 makes its codes again from what is kept for other operations."""
        return 0 if linear == "fp8" else wide * columns * tokens

    entered = (wide * hidden + 4) * tokens + linear_input(hidden)  # residual, inverse rms, normed
    qkv = wide * (heads + 2 * groups) * config.head_dim
    attended = 2 * wide * heads * config.head_dim + 4 * heads  # queries, output, log-sum-exp
    stored = kv_bytes_per_token(config, plan) // config.num_layers
    gates = 2 * wide * config.intermediate_size * tokens
    attention = (qkv + attended + stored) * tokens
    return 2 * entered + attention + gates + linear_input(config.intermediate_size)


def _codes(columns: int, tokens: int) -> int:
    """FP8 codes in 128 x 1 groups with their scales; whole groups of tokens."""
    padded = -(-tokens // FP8_BLOCK) * FP8_BLOCK
    return columns * (padded + 4 * padded // FP8_BLOCK)


def _wide(plan: PrecisionPlan) -> int:
    return 4 if plan.rest == "fp32" else 2
