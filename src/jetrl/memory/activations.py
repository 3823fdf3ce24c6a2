"""Bytes of activations, and of gradients in flight, during an update.

Counted from the tensors of models/layer_fused and kernels/logprob_hopper, and compared with a GPU
by tests/gpu/test_memory.py.

Products of a micro-batch are held next to the sums of gradients. On one GPU only lm_head's is. On
several GPUs every rank makes a linear's product whole and sends its rows to their owners
(`precision.gradients`). A product in flight takes its bytes twice: sent and received.
Large ones travel in slices, and lm_head's is still held while the last layer's MLP makes its own.

A product of many rows with an NVFP4 weight reads it widened to BF16 (`precision.hopper.nvfp4`), as
does DGrad of any number of rows. float32 sums are held next to it if the sum over K is added in
parts (`nvfp4.parts_of`), or if the weight is stacked from matrices with their own scales.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jetrl.kernels.attention import backward_lists
from jetrl.models.adapter import LoRA
from jetrl.models.attention import kv_bytes_per_token, staged_bytes_per_token
from jetrl.models.families import ModelConfig, parameter_shapes, stored_tensors
from jetrl.models.nvfp4_files import is_nvfp4
from jetrl.precision.backend import rows_at_once
from jetrl.precision.formats import number_format
from jetrl.precision.nvfp4 import FEW_ROWS, ROWS_AT_ONCE, SCALED_ROWS_AT_ONCE, parts_of
from jetrl.precision.plan import PrecisionPlan
from jetrl.precision.quantize import FP8_BLOCK

# As of precision.gradients: bytes that travel at one time, and how many times together,
# the one that has just begun among them.
_AT_ONCE, _TOGETHER = 2**29, 4


@dataclass(frozen=True)
class PlannedMicroBatch:
    """The largest micro-batch of an update, with sequences of up to `longest` tokens.

    `several`: the update has several. `shared`: sequences may share first tokens, which count once.
    """

    tokens: int
    longest: int
    several: bool
    shared: bool = False


def product_bytes(
    config: ModelConfig,
    plan: PrecisionPlan,
    batch: PlannedMicroBatch,
    cards: int,
    lora: LoRA | None,
) -> tuple[int, int, int]:
    """Return the bytes of products next to the sums at the highest moments of a backward.

    They are: in lm_head; in the last layer's MLP, whose first product counts with the layer; and
    while the embedding's rows are added, on several GPUs next to the first layer's products.
    """
    tied = config.tie_word_embeddings
    trained = lora is None or (lora.train_embeddings if tied else lora.train_head)
    head = 4 * config.vocab_size * config.hidden_size if trained and config.head == "lm" else 0
    if cards == 1:  # The product of the first micro-batch is the sum.
        head = head if batch.several else 0
        return head, head, 0 if tied else head
    rows = 2 * (cards + 1) * batch.tokens * config.hidden_size  # BF16, of all GPUs and the own ones
    if lora is not None:
        shapes = lora.shapes(config).values()
        whole = 4 * sum(math.prod(s.a_shape) + math.prod(s.b_shape) for s in shapes)
        rows = rows if lora.train_embeddings else 0
        return head, 2 * head, (cards + 1) * whole + rows + 2 * head
    in_bf16 = number_format(plan.train_linear).coded and plan.gradient.coded
    parameters = parameter_shapes(config)
    *block, qkv, o = (
        (2 if in_bf16 else 4) * math.prod(parameters[f"layers.0.{linear}.weight"])
        for linear in (*config.block.linears, "qkv", "o")
    )
    # While the MLP makes its products: all slices of lm_head's, then the latest with the MLP's.
    mlp = 2 * block[-1] + (1 if in_bf16 else 2) * sum(block[:-1])
    slice_bytes = min(head, _AT_ONCE)
    received = max(_TOGETHER * slice_bytes, (_TOGETHER - 2) * slice_bytes + mlp)
    if tied:  # It is received whole, and waits for the embedding's rows.
        received = max(head, mlp)
    at_end = rows + (head if tied else 0) + 2 * (sum(block[:-1]) + o + qkv)
    return head, head + min(received, head + mlp), at_end


def kept_bytes(
    config: ModelConfig,
    plan: PrecisionPlan,
    tokens: int,
    recomputed: bool = False,
    lora: LoRA | None = None,
) -> int:
    """Return the bytes of saved activations, lm_head's input included.

    With `recomputed` layers save only their two inputs, and backward holds all activations of one
    layer. Each linear of a trained adapter saves its product with A.
    """
    wide, hidden = _wide(plan), config.hidden_size
    heads, groups = config.num_heads, config.num_kv_heads
    # Per token of a layer: Q, K and V, the stored keys and values, and queries, attention's output
    # and the log-sum-exp.
    attention = wide * (heads + 2 * groups) * config.head_dim
    attention += kv_bytes_per_token(config, plan) // config.num_layers
    attention += 2 * wide * heads * config.head_dim + 4 * heads
    layers = []
    for layer in range(config.num_layers):
        format = plan.linear_format("train", layer, config.num_layers)
        inputs = not format.coded and lora is None  # others are quantized again
        # Of each norm the residual stream, the inverse rms, and the normalized values.
        entered = wide * hidden * (2 if inputs else 1) + 4
        layers.append(2 * entered + attention + wide * config.block.kept_values(hidden, inputs))
    if lora is not None:
        for name, shape in lora.shapes(config).items():
            layers[int(name.split(".")[1])] += wide * len(shape.parts) * shape.padded_rank
    # Each layer has two inputs, the residual stream and what is added to it; the first has one.
    inputs_only = (2 * config.num_layers - 1) * wide * hidden
    kept = inputs_only + max(layers) if recomputed else sum(layers)
    return (kept + (wide * hidden + 4) + wide * hidden) * tokens  # the last norm, lm_head's input


def on_top_bytes(
    config: ModelConfig,
    plan: PrecisionPlan,
    batch: PlannedMicroBatch,
    recomputed: bool,
    in_head: int,
    in_layer: int,
    lora: LoRA | None,
) -> int:
    """Return the maximum bytes on top of saved activations, with products in_head or in_layer."""
    in_layer += layer_backward_bytes(config, plan, batch, lora is not None)
    if config.head == "score":
        return in_layer
    logits = logits_bytes(config, batch.tokens)
    hidden = 10 * batch.tokens * config.hidden_size + in_head
    if recomputed:
        return max(in_layer, logits + logits // 2 + hidden)
    return max(in_layer, 2 * batch.tokens * config.vocab_size + max(logits, hidden))


def logits_bytes(config: ModelConfig, tokens: int) -> int:
    """Return the bytes of one chunk of float32 logits."""
    return 4 * min(tokens, rows_at_once(config.vocab_size)) * config.vocab_size


def layer_backward_bytes(
    config: ModelConfig, plan: PrecisionPlan, batch: PlannedMicroBatch, adapted: bool = False
) -> int:
    tokens, hidden, format = batch.tokens, config.hidden_size, plan.backward_format
    if adapted:
        wide = _nvfp4_product_bytes(config, plan, tokens, backward=True)
        mlp = config.block.adapted_backward_bytes(hidden, tokens, format, wide)
    else:
        mlp = config.block.backward_bytes(hidden, tokens, format, not batch.several, FP8_BLOCK)
    heads = 2 * (3 * config.num_heads + 4 * config.num_kv_heads) * config.head_dim * tokens
    sequences = -(-tokens // batch.longest)
    across = -(-batch.longest // backward_lists.BACKWARD_QUERIES)
    across *= -(-batch.longest // backward_lists.BACKWARD_KEYS)
    # The queries of a branch see all keys of their stem, whose sums may be of several parts.
    met = across if batch.shared else across // 2 + 1
    ds = config.num_heads * sequences * met * backward_lists.DS_TILE_BYTES
    if batch.shared:
        ds += config.num_kv_heads * 2 * 4 * config.head_dim * (tokens + batch.longest)
    return max(mlp, heads + min(ds, backward_lists.STORED_DS_BYTES))


def last_bytes(
    config: ModelConfig, plan: PrecisionPlan, batch: PlannedMicroBatch, lora: LoRA | None
) -> int:
    """Return the bytes on top at the end of backward.

    The incoming gradients are sorted by token. A tied FP8 lm_head has its own gradient until then.
    """
    if lora is not None and not lora.train_embeddings:
        return 4 * batch.tokens * config.hidden_size
    tied = config.tie_word_embeddings and number_format(plan.lm_head).coded
    head = 4 * config.vocab_size * config.hidden_size if tied else 0
    return 14 * batch.tokens * config.hidden_size + head


def forward_bytes(
    config: ModelConfig, plan: PrecisionPlan, tokens: int, contexts: int = 0, adapted: bool = False
) -> int:
    """Return the maximum bytes of a forward without gradients or logits: of MLP or attention.

    Attention stages keys and values of `contexts` tokens in 16 bits (0: only the forward's own) and
    keeps the state of finished splits. Adapters read BF16 values in addition to codes.
    """
    wide, hidden = _wide(plan), config.hidden_size
    heads, groups = config.num_heads, config.num_kv_heads
    mlp = wide * config.block.forward_values(hidden, adapted)
    attention = wide * (3 * hidden + (3 * heads + 6 * groups) * config.head_dim)
    attention += 4 * heads * config.head_dim
    earlier = max(0, contexts - tokens) * staged_bytes_per_token(config, plan)
    product = _nvfp4_product_bytes(config, plan, tokens)
    return max(tokens * mlp, tokens * attention + earlier) + product


def _wide(plan: PrecisionPlan) -> int:
    return number_format(plan.rest).dtype.itemsize


def _nvfp4_product_bytes(
    config: ModelConfig, plan: PrecisionPlan, tokens: int, backward: bool = False
) -> int:
    """Return the maximum bytes of a layer's NVFP4 product: BF16 weight and float32 sums.

    FProp of few tokens reads the codes directly.
    """
    if not plan.frozen_base or (tokens <= FEW_ROWS and not backward):
        return 0
    shapes, coded = parameter_shapes(config), is_nvfp4(config)
    most, rows = 0, min(tokens, ROWS_AT_ONCE)
    for name, parts in stored_tensors(config).items():
        if not parts[0].linear_weight or not name.startswith("layers.0."):
            continue
        num_rows, num_columns = shapes[name]
        own_scales = coded and len(parts) > 1
        fprop = 0
        if tokens > FEW_ROWS:
            # Next to the sums, the product of the next part, or the sums of the piece of X before.
            in_parts = parts_of(num_rows, num_columns)[0] > 1
            scaled = 4 * min(tokens, 2 * SCALED_ROWS_AT_ONCE) * num_rows if own_scales else 0
            fprop = 8 * rows * num_rows if in_parts else scaled
        # DGrad holds the sums, and the product of one of the matrices.
        sums = max(fprop, 8 * rows * num_columns if own_scales else 0)
        most = max(most, 2 * num_rows * num_columns + sums)
    return most
