"""Bytes of activations, and of gradients in flight, during an update.

The formulas count the tensors of models/layer_fused and kernels/logprob_triton;
tests/gpu/test_memory.py compares them with measurements.

WGrad products of a micro-batch take memory in addition to gradient sums: on one GPU only that of
lm_head. On several GPUs every rank computes a whole product and sends its rows to their owners
(`precision.gradients`), so a product in flight is counted twice, sent and received. Large products
are sent in slices; that of lm_head is still allocated during the backward of the last MLP.

A product of many rows with an NVFP4 weight, and every DGrad, first widens the weight to BF16
(`precision.hopper.nvfp4`). It also needs float32 sums if K is split into parts (`nvfp4.parts_of`),
or if the weight stacks matrices with separate scales.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jetrl.models.adapter import LoRA
from jetrl.models.attention import staged_bytes_per_token
from jetrl.models.block import LayerHalf, SavedCodes
from jetrl.models.families import ModelConfig, parameter_shapes, stored_tensors
from jetrl.models.nvfp4_files import is_nvfp4
from jetrl.precision.backend import TRITON, rows_at_once
from jetrl.precision.block_formats import ROUNDING_BYTES
from jetrl.precision.formats import Emulated, key_and_value_formats, number_format
from jetrl.precision.int8_planes import rows_per_chunk
from jetrl.precision.nvfp4 import FEW_ROWS, ROWS_AT_ONCE, SCALED_ROWS_AT_ONCE, parts_of
from jetrl.precision.plan import PrecisionPlan
from jetrl.precision.quantize import FP8_BLOCK, SLAB_BYTES, VALUES_AT_ONCE

# As in precision.gradients: bytes that are exchanged at once, and the number of such exchanges in
# flight, including one that was just started.
_AT_ONCE, _TOGETHER = 2**29, 4


@dataclass(frozen=True)
class PlannedMicroBatch:
    """The largest micro-batch of an update, with sequences of up to `longest` tokens.

    `several`: whether an update has several micro-batches. `shared`: whether sequences may share
    prefixes, which count once.
    """

    tokens: int
    longest: int
    several: bool
    shared: bool = False


@dataclass(frozen=True)
class WGradBytes:
    """The bytes of WGrad products at three moments of a backward.

    These are lm_head; the last MLP, whose first product counts with the layer; and the end, when
    embedding rows are added, on several GPUs in addition to the products of the first layer.
    """

    in_head: int
    in_layer: int
    at_end: int


def wgrad_bytes(
    config: ModelConfig,
    plan: PrecisionPlan,
    batch: PlannedMicroBatch,
    cards: int,
    lora: LoRA | None,
) -> WGradBytes:
    tied = config.tie_word_embeddings
    trained = lora is None or (lora.train_embeddings if tied else lora.train_head)
    head = _head_bytes(config) if trained and config.head == "lm" else 0
    if cards == 1:  # the product of the first micro-batch becomes the sum
        head = head if batch.several else 0
        return WGradBytes(in_head=head, in_layer=head, at_end=0 if tied else head)
    # Embedding rows in BF16: own ones, and those gathered from all GPUs.
    rows = 2 * (cards + 1) * batch.tokens * config.hidden_size
    if lora is not None:
        rows = rows if lora.train_embeddings else 0
        shapes = lora.shapes(config).values()
        whole = 4 * sum(math.prod(s.a_shape) + math.prod(s.b_shape) for s in shapes)
        at_end = (cards + 1) * whole + rows + 2 * head
        return WGradBytes(in_head=head, in_layer=2 * head, at_end=at_end)
    in_bf16 = number_format(plan.train_linear).coded and plan.gradient.coded
    width = 2 if in_bf16 else 4

    def products(half: LayerHalf) -> list[int]:
        shapes = half.parameter_shapes(config.hidden_size)
        return [width * math.prod(shapes[f"{linear}.weight"]) for linear in half.linears]

    # During the MLP: slices of lm_head in flight, then the last ones with MLP products.
    *earlier, last = products(config.layers[-1].block)
    mlp = 2 * last + (1 if in_bf16 else 2) * sum(earlier)
    if tied:  # the product is received whole, and kept until embedding rows are added
        received = max(head, mlp)
    else:
        slice_bytes = min(head, _AT_ONCE)
        received = max(_TOGETHER * slice_bytes, (_TOGETHER - 2) * slice_bytes + mlp)
    first = config.layers[0]
    in_first = sum(products(first.block)[:-1]) + sum(products(first.mixer))
    return WGradBytes(
        in_head=head,
        in_layer=head + min(received, head + mlp),
        at_end=rows + (head if tied else 0) + 2 * in_first,
    )


def kept_bytes(
    config: ModelConfig,
    plan: PrecisionPlan,
    tokens: int,
    recomputed: bool = False,
    lora: LoRA | None = None,
) -> int:
    """Return the bytes of saved activations, including the input of lm_head.

    With `recomputed` (activation checkpointing), layers save only their two inputs, and backward
    allocates the activations of one layer. Each linear of an adapter saves its product with A.
    """
    wide, hidden = activation_bytes(plan), config.hidden_size
    kv = key_and_value_formats(plan.kv)
    layers = []
    for number, layer in enumerate(config.layers):
        format = plan.linear_format("train", number, config.num_layers)
        inputs = not format.coded and lora is None  # otherwise they are recomputed
        # Per norm: the residual stream, the inverse rms, and the normalized values.
        entered = wide * hidden * (2 if inputs else 1) + 4
        block = wide * layer.block.kept_values(hidden, inputs)
        mixer = layer.mixer.kept_bytes(wide, kv, number_format(plan.queries))
        layers.append(2 * entered + mixer + block)
        for codes in (_saved_codes(half, plan) for half in (layer.mixer, layer.block)):
            layers[-1] += codes.code_bytes - wide * codes.replaced
    if lora is not None:
        for name, shape in lora.shapes(config).items():
            number, linear = int(name.split(".")[1]), name.split(".")[2]
            values = config.layers[number].block.adapter_values
            layers[number] += wide * values(linear, len(shape.parts), shape.padded_rank)
    # A layer has two inputs, the residual stream and a delta; the first has only one.
    inputs_only = (2 * config.num_layers - 1) * wide * hidden
    kept = inputs_only + max(layers) if recomputed else sum(layers)
    return (kept + _head_input_bytes(config, plan)) * tokens


def _head_input_bytes(config: ModelConfig, plan: PrecisionPlan) -> int:
    """Return the bytes per token that the last norm saves, and lm_head's input."""
    return 2 * activation_bytes(plan) * config.hidden_size + 4


def on_top_bytes(
    config: ModelConfig,
    plan: PrecisionPlan,
    batch: PlannedMicroBatch,
    recomputed: bool,
    wgrad: WGradBytes,
    lora: LoRA | None,
) -> int:
    """Return the maximum bytes in addition to saved activations."""
    in_layer = wgrad.in_layer + layer_backward_bytes(config, plan, batch, lora is not None)
    if config.head == "score":
        return in_layer
    if number_format(plan.lm_head).two_planes:
        in_head = _planes_head_bytes(config, batch.tokens, wgrad.in_head, keeps=not recomputed)
        if recomputed:  # the layer that is made again is not there yet
            kept = kept_bytes(config, plan, batch.tokens)
            kept -= batch.tokens * _head_input_bytes(config, plan)
            in_head -= kept // config.num_layers
        return max(in_layer, in_head)
    logits = logits_bytes(config, plan, batch.tokens)
    hidden = 10 * batch.tokens * config.hidden_size + wgrad.in_head
    if recomputed:
        return max(in_layer, logits + logits // 2 + hidden)
    return max(in_layer, 2 * batch.tokens * config.vocab_size + max(logits, hidden))


def logits_bytes(config: ModelConfig, plan: PrecisionPlan, tokens: int) -> int:
    """Return the bytes of one chunk of float32 logits."""
    rows = rows_at_once(config.vocab_size)
    if number_format(plan.lm_head).two_planes:
        rows = max(1, TRITON.logits_at_once // config.vocab_size)
    return 4 * min(tokens, rows) * config.vocab_size


def _planes_head_bytes(config: ModelConfig, tokens: int, wgrad: int, keeps: bool) -> int:
    """Return the maximum bytes of the head's backward in INT8 planes (models/planes_head.py).

    Args:
        keeps: True if forward keeps the logits of all tokens.
    """
    hidden, vocabulary = config.hidden_size, config.vocab_size
    rows = min(tokens, rows_per_chunk(vocabulary))
    dlogits = 4 * rows * vocabulary
    # Planes of hidden rows, and their gradient: that of the chunk is also in float32.
    held = 2 * hidden * (tokens + rows) + wgrad
    # DGrad and WGrad hold three operands of at most a slab each, and those of WGrad are padded.
    slabs = 3 * SLAB_BYTES + 6 * hidden * rows
    if keeps:
        return held + 4 * tokens * vocabulary + dlogits + slabs
    return held + dlogits + max(dlogits, slabs)


def layer_backward_bytes(
    config: ModelConfig, plan: PrecisionPlan, batch: PlannedMicroBatch, adapted: bool = False
) -> int:
    tokens, hidden, format = batch.tokens, config.hidden_size, plan.backward_format
    widened = _nvfp4_product_bytes(config, plan, tokens, backward=True) if adapted else 0
    most, emulated = 0, _emulated_bytes(config, plan, tokens, backward=True)
    for layer in set(config.layers):
        if adapted:
            block = layer.block.adapted_backward_bytes(hidden, tokens, format, widened)
        else:
            block = layer.block.backward_bytes(hidden, tokens, format, not batch.several, FP8_BLOCK)
        queries = number_format(plan.queries)
        mixer = layer.mixer.backward_bytes(tokens, batch.longest, batch.shared, queries)
        block += 2 * tokens * _saved_codes(layer.block, plan).restored
        mixer += 2 * tokens * _saved_codes(layer.mixer, plan).restored
        most = max(most, block, mixer)
    return most + emulated


def last_bytes(
    config: ModelConfig, plan: PrecisionPlan, batch: PlannedMicroBatch, lora: LoRA | None
) -> int:
    """Return the bytes at the end of backward, in addition to gradient sums.

    Gradients of embedding rows are sorted by token. A tied FP8 lm_head has a separate gradient
    until then.
    """
    if lora is not None and not lora.train_embeddings:
        return 4 * batch.tokens * config.hidden_size
    separate = config.tie_word_embeddings and number_format(plan.lm_head).coded
    head = _head_bytes(config) if separate else 0
    return 14 * batch.tokens * config.hidden_size + head


def forward_bytes(
    config: ModelConfig,
    plan: PrecisionPlan,
    tokens: int,
    contexts: int = 0,
    adapted: bool = False,
    splits: int = 1,
) -> int:
    """Return the maximum bytes of a forward without gradients or logits.

    `contexts` is the number of tokens whose keys and values attention stages; 0 for only those of
    the forward. Adapters read BF16 values in addition to codes. Decode has up to `splits` parts of
    a context.
    """
    wide, hidden = activation_bytes(plan), config.hidden_size
    layers = set(config.layers)
    # With defined bits, SwiGLU has BF16 values before codes, as with adapters.
    values = adapted or plan.defined
    block = max(wide * layer.block.forward_values(hidden, values) for layer in layers)
    mixer = max(layer.mixer.forward_bytes(hidden, wide, splits) for layer in layers)
    earlier = max(0, contexts - tokens) * staged_bytes_per_token(config, plan)
    product = _nvfp4_product_bytes(config, plan, tokens) + _emulated_bytes(config, plan, tokens)
    return max(tokens * block, tokens * mixer + earlier) + product


def image_bytes(config: ModelConfig, plan: PrecisionPlan, tokens: int) -> int:
    """Return the bytes of `models.packed.ImageRows` for tokens of images, and of their angles."""
    vision = config.vision
    if vision is None:
        return 0
    features = activation_bytes(plan) * config.hidden_size * (1 + vision.deep_layers)
    # Positions of pairs, in 64 bits; angles of images, of all tokens, and the two together.
    turns = (4 + 3 * 4) * config.rotary_dim if vision.axes else 0
    return tokens * (features + turns)


def tower_bytes(config: ModelConfig, plan: PrecisionPlan, tokens: int) -> int:
    """Return the bytes of activations of the image tower for an image of this many tokens."""
    if config.vision is None or not tokens:
        return 0
    return config.vision.forward_bytes(tokens, config.hidden_size, activation_bytes(plan))


def _saved_codes(half: LayerHalf, plan: PrecisionPlan) -> SavedCodes:
    """Return what half a layer saves as codes under a plan."""
    codes = None if plan.saved == "off" else half.saved_codes
    return codes or SavedCodes(widths=(), replaced=0, restored=0)


def activation_bytes(plan: PrecisionPlan) -> int:
    """Return the bytes of one value of the residual stream."""
    return number_format(plan.rest).dtype.itemsize


def _head_bytes(config: ModelConfig) -> int:
    """Return the bytes of lm_head's gradient in FP32."""
    return 4 * config.vocab_size * config.hidden_size


def _emulated_bytes(
    config: ModelConfig, plan: PrecisionPlan, tokens: int, backward: bool = False
) -> int:
    """Return the maximum bytes of rounded operands in BF16, and of float32 copies of a part."""
    format = number_format(plan.train_linear)
    if not isinstance(format, Emulated):
        return 0
    shapes, linears = parameter_shapes(config), stored_tensors(config).items()
    sizes = [shapes[name] for name, parts in linears if parts[0].linear_weight]
    most = max(format.operand_bytes(size, tokens, backward) for size in sizes)
    widest = max(max(size) for size in sizes)
    return most + ROUNDING_BYTES * min(VALUES_AT_ONCE, tokens * widest)


def _nvfp4_product_bytes(
    config: ModelConfig, plan: PrecisionPlan, tokens: int, backward: bool = False
) -> int:
    """Return the maximum bytes of an NVFP4 product: the widened weight and float32 sums.

    FProp of few tokens needs neither.
    """
    if not plan.frozen_base or (tokens <= FEW_ROWS and not backward):
        return 0
    shapes, coded = parameter_shapes(config), is_nvfp4(config)
    most, rows = 0, min(tokens, ROWS_AT_ONCE)
    for name, parts in stored_tensors(config).items():
        if not parts[0].linear_weight:
            continue
        num_rows, num_columns = shapes[name]
        own_scales = coded and len(parts) > 1
        fprop = 0
        if tokens > FEW_ROWS:
            # In addition to the sums: the product of the next part, or the sums of the rows before.
            in_parts = parts_of(num_rows, num_columns)[0] > 1
            scaled = 4 * min(tokens, 2 * SCALED_ROWS_AT_ONCE) * num_rows if own_scales else 0
            fprop = 8 * rows * num_rows if in_parts else scaled
        # DGrad needs the sums, and the product of one matrix.
        sums = max(fprop, 8 * rows * num_columns if own_scales else 0)
        most = max(most, 2 * num_rows * num_columns + sums)
    return most
