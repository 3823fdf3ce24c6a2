"""Bytes of activations: what a forward keeps for backward, and what is held on top meanwhile.

The bytes are counted from the tensors of models/layer_hopper and kernels/logprob_hopper, whose
names are used here; tests/gpu/test_memory.py compares them with a card. The CPU's references keep a
little more.

Shapes: T tokens, D hidden size, H query heads, G key-value heads, d head size, F intermediate size,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from jetrl.kernels.attention.backward_lists import (
    BACKWARD_KEYS,
    BACKWARD_QUERIES,
    DS_TILE_BYTES,
    STORED_DS_BYTES,
)
from jetrl.kernels.logit_chunks import rows_at_once
from jetrl.memory.nvfp4 import nvfp4_product_bytes
from jetrl.memory.products import ProductBytes
from jetrl.models.adapter import LoRA
from jetrl.models.attention import kv_bytes_per_token, staged_bytes_per_token
from jetrl.models.families import ModelConfig
from jetrl.precision.plan import FP8_BLOCK, LinearFormat, PrecisionPlan

_NONE = ProductBytes()


@dataclass(frozen=True)
class PlannedMicroBatch:
    """The largest micro-batch of an update.

    Attributes:
        shared: Whether sequences may share their first tokens, which count once.
    """

    tokens: int
    longest: int
    several: bool
    shared: bool = False


def kept_bytes(
    config: ModelConfig,
    plan: PrecisionPlan,
    tokens: int,
    recomputed: bool = False,
    lora: LoRA | None = None,
) -> int:
    """Return the bytes that a forward keeps for backward, lm_head's input included.

    Args:
        recomputed: Whether layers keep only their two inputs, so that all activations of one layer
            are held while that layer is computed again in backward.
        lora: The adapter that is trained. Of every linear with one the product with A is kept.
    """
    wide = _wide(plan)
    layers = [
        _layer_bytes(config, plan, plan.linear_format("train", i, config.num_layers), tokens, lora)
        for i in range(config.num_layers)
    ]
    if lora is not None:
        for layer, shape in lora.shapes(config).items():
            layers[int(layer.split(".")[1])] += wide * len(shape.parts) * shape.padded_rank * tokens
    # Each layer has two inputs, the residual stream and what is added to it; the first has one.
    inputs = (2 * config.num_layers - 1) * wide * config.hidden_size * tokens
    kept = inputs + max(layers) if recomputed else sum(layers)
    last_norm = (wide * config.hidden_size + 4) * tokens
    head_input = wide * config.hidden_size * tokens
    return kept + last_norm + head_input


def on_top_bytes(
    config: ModelConfig,
    plan: PrecisionPlan,
    batch: PlannedMicroBatch,
    recomputed: bool = False,
    products: ProductBytes = _NONE,
    lora: LoRA | None = None,
) -> int:
    """Return the most bytes held on top of the kept activations: in lm_head or in a layer.

    Args:
        products: The products that are held beside the sums of gradients.
        lora: The adapter that is trained; None: all parameters are.
    """
    in_head = _head_bytes(config, batch, recomputed, products.in_head)
    in_layer = _layer_backward_bytes(config, plan, batch, lora is not None)
    return max(in_head, in_layer + products.in_layer)


def _head_bytes(
    config: ModelConfig, batch: PlannedMicroBatch, recomputed: bool, product: int
) -> int:
    """Return the most bytes that lm_head holds on top."""
    if config.head == "score":
        return 0
    logits, hidden = logits_bytes(config, batch.tokens), 10 * batch.tokens * config.hidden_size
    if recomputed:
        return logits + logits // 2 + hidden + product
    return 2 * batch.tokens * config.vocab_size + max(logits, hidden + product)


def logits_bytes(config: ModelConfig, tokens: int) -> int:
    """Return the bytes of the float32 logits held at once: one chunk of rows."""
    return 4 * min(tokens, rows_at_once(config.vocab_size)) * config.vocab_size


def _layer_backward_bytes(
    config: ModelConfig, plan: PrecisionPlan, batch: PlannedMicroBatch, adapted: bool = False
) -> int:
    """Return the most bytes that one layer's backward holds on top."""
    tokens, hidden, inner = batch.tokens, config.hidden_size, config.intermediate_size
    # The first micro-batch allocates the gradient of gate_up; later ones add to it in place.
    gradient = 0 if batch.several else 4 * 2 * inner * hidden
    if adapted:
        weight = 2 * inner * hidden if plan.train_linear == "fp8" else 0
        weight = nvfp4_product_bytes(config, plan, tokens, backward=True) or weight
        mlp = (6 * hidden + 6 * inner) * tokens + weight
        if plan.train_linear == "fp8":  # SwiGLU's dY, then Y in its place, and dX twice
            mlp = max(mlp, (4 * hidden + 8 * inner) * tokens)
    elif plan.train_linear == "fp8":
        # While dY of gate_up is made: dY of down as codes, dY of SwiGLU, the codes of its output.
        swiglu = (2 * hidden + 3 * inner) * tokens
        # While dW of gate_up is made: dX, the codes of X, and the product in bfloat16.
        wgrad = 3 * hidden * tokens + 2 * 2 * inner * hidden + gradient
        mlp = 2 * hidden * tokens + 2 * _codes(2 * inner, tokens) + max(swiglu, wgrad)
    else:
        mlp = (6 * hidden + 6 * inner) * tokens + gradient
    heads = 2 * (3 * config.num_heads + 4 * config.num_kv_heads) * config.head_dim * tokens
    sequences = -(-tokens // batch.longest)
    across = -(-batch.longest // BACKWARD_QUERIES) * -(-batch.longest // BACKWARD_KEYS)
    # The queries of a branch see all keys of their stem, whose sums may be of several parts.
    met = across if batch.shared else across // 2 + 1
    ds = config.num_heads * sequences * met * DS_TILE_BYTES
    if batch.shared:
        ds += config.num_kv_heads * 2 * 4 * config.head_dim * (tokens + batch.longest)
    return max(mlp, heads + min(ds, STORED_DS_BYTES))


def last_bytes(
    config: ModelConfig, plan: PrecisionPlan, batch: PlannedMicroBatch, lora: LoRA | None = None
) -> int:
    """Return the bytes held on top at the end of backward.

    The embedding's gradient needs the incoming gradients sorted by token; an FP8 lm_head that is
    tied to the embedding has a gradient of its own until the two are added.

    Args:
        lora: The adapter that is trained; None: all parameters are.
    """
    if lora is not None and not lora.train_embeddings:
        return 4 * batch.tokens * config.hidden_size
    tied = config.tie_word_embeddings and plan.lm_head == "fp8"
    head = 4 * config.vocab_size * config.hidden_size if tied else 0
    return 14 * batch.tokens * config.hidden_size + head


def forward_bytes(
    config: ModelConfig, plan: PrecisionPlan, tokens: int, contexts: int = 0, adapted: bool = False
) -> int:
    """Return the most bytes of a forward without gradients, its logits left out.

    The MLP and attention are compared; attention stages keys and values in 16 bits and keeps the
    state of finished splits.

    Args:
        contexts: Tokens whose keys the forward reads, its own included; 0 for its own alone.
        adapted: Whether linear layers have adapters, which read BF16 values beside codes.
    """
    wide = _wide(plan)
    hidden, heads, groups = config.hidden_size, config.num_heads, config.num_kv_heads
    mlp = wide * (7 * hidden + 3 * config.intermediate_size)
    if adapted:
        mlp += wide * config.intermediate_size // 2
    attention = wide * (3 * hidden + (3 * heads + 6 * groups) * config.head_dim)
    attention += 4 * heads * config.head_dim
    earlier = max(0, contexts - tokens) * staged_bytes_per_token(config, plan)
    product = nvfp4_product_bytes(config, plan, tokens)
    return max(tokens * mlp, tokens * attention + earlier) + product


def _layer_bytes(
    config: ModelConfig,
    plan: PrecisionPlan,
    linear: LinearFormat,
    tokens: int,
    lora: LoRA | None = None,
) -> int:
    """Return the bytes that one layer keeps for backward."""
    wide, hidden = _wide(plan), config.hidden_size
    heads, groups = config.num_heads, config.num_kv_heads

    def linear_input(columns: int) -> int:
        """Return the bytes kept of a linear layer's input: none under FP8, or with an adapter."""
        return 0 if linear == "fp8" or lora is not None else wide * columns * tokens

    # The residual stream, the norm's inverse rms, and the normalized values.
    entered = (wide * hidden + 4) * tokens + linear_input(hidden)
    qkv = wide * (heads + 2 * groups) * config.head_dim
    # Queries, attention's output, and the log-sum-exp.
    attended = 2 * wide * heads * config.head_dim + 4 * heads
    stored = kv_bytes_per_token(config, plan) // config.num_layers
    gates = 2 * wide * config.intermediate_size * tokens
    attention = (qkv + attended + stored) * tokens
    return 2 * entered + attention + gates + linear_input(config.intermediate_size)


def _codes(columns: int, tokens: int) -> int:
    """Return the bytes of FP8 codes and scales in 128 x 1 groups, in whole groups of tokens."""
    padded = -(-tokens // FP8_BLOCK) * FP8_BLOCK
    return columns * (padded + 4 * padded // FP8_BLOCK)


def _wide(plan: PrecisionPlan) -> int:
    """Return the bytes of one activation."""
    return 4 if plan.rest == "fp32" else 2
