"""The decoder of Qwen3, Qwen2.5, Llama 3 and others (families.py), on a flat list of tokens.

    x = embed(tokens)
    for each layer:
        x = x + mixer(norm(x))
        x = x + block(norm(x))
    logits = lm_head(norm(x))

A layer returns x and a delta that the next norm adds to it, in the same kernel
(`attention.norm_linear`).

Sampling and training run this code. They differ in their `KeyValues` (pages of a cache, or the
packed batch) and in `side`, which selects formats from the plan. Activations are BF16 (FP32 under
the fp32 plan). Every operation is batch-invariant: the bits of a token do not depend on other
tokens.

Legend: T tokens, R needed rows, D hidden size, N output features, V vocabulary.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from jetrl.kernels.rotary import rotary_table
from jetrl.models.attention import Attention, KeyValues, WideNormedAttention, norm_linear
from jetrl.models.block import Block, DenseShape
from jetrl.models.dense import DenseBlock
from jetrl.models.experts import ExpertsBlock
from jetrl.models.experts_shape import Glm4Experts, OlmoeExperts, Qwen2Experts, Qwen3Experts
from jetrl.models.families import ModelConfig
from jetrl.models.layer import RMSNorm, Rotation, Trace, fuses, prefixed, tell
from jetrl.models.layer_fused import add_norm_fused
from jetrl.models.mixer import AttentionShape, Mixer, WideNormAttention
from jetrl.models.packed import ForwardInputs
from jetrl.models.rope import frequencies_of
from jetrl.models.weights import Weights
from jetrl.precision.backend import has_defined_bits
from jetrl.precision.exact import exact_matmul
from jetrl.precision.gradients import Gradients
from jetrl.precision.linear import Linear
from jetrl.precision.plan import Side
from jetrl.precision.quantized_weight import QuantizedWeight

_Module = TypeVar("_Module", bound=nn.Module)
# The module of each kind of mixer and of block.
MIXERS: dict[type[Mixer], Any] = {AttentionShape: Attention, WideNormAttention: WideNormedAttention}
BLOCKS: dict[type[Block], Any] = {
    DenseShape: DenseBlock,
    Qwen3Experts: ExpertsBlock,
    Qwen2Experts: ExpertsBlock,
    OlmoeExperts: ExpertsBlock,
    Glm4Experts: ExpertsBlock,
}


class DecoderLayer(nn.Module):
    """A mixer and a block, each after a norm and added to the residual stream."""

    mixer: Any
    block: Any

    def __init__(self, index: int, config: ModelConfig, weights: Weights) -> None:
        super().__init__()
        self.index = index
        shape, eps = config.layers[index], config.rms_norm_eps
        formats = weights.linear_formats[index]
        self.rotates = shape.rotates
        self.mixer = MIXERS[type(shape.mixer)](index, shape.mixer, eps, weights, formats)
        self.block = BLOCKS[type(shape.block)](index, shape.block, eps, weights, formats)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        rotation: Rotation,
        kv: KeyValues,
        side: Side,
        trace: Trace | None,
        last: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream and the delta to be added to it, both [T, D].

        `delta` is from the previous layer, None for the first. The `last` layer returns only
        `kv.rows`.
        """
        trace = prefixed(trace, f"layers.{self.index}.")
        x, delta = self.mixer(x, delta, rotation, kv, side, trace, last)
        return self.block(x, delta, side, trace)


class Decoder(nn.Module):
    """The whole model over a `Weights`, with parameters named as in `families.parameter_shapes`.

    `exponents` is int8 [layers, H + G, head size / 2], by which heads are multiplied
    (`key_smoothing.head_exponents`); None: keys are stored as they are.

    If `trace` is set, it is called with (operation name, output) after each operation; with it
    `jetrl parity --locate` finds the first operation that differs.
    """

    rotary_table: Tensor
    still_table: Tensor
    exponents: Tensor | None

    def __init__(
        self, config: ModelConfig, weights: Weights, exponents: Tensor | None = None
    ) -> None:
        super().__init__()
        self.config, self.weights = config, weights
        self.trace: Trace | None = None
        self.embedding = weights.embedding()
        self.embed = self.embedding.master
        self.layers = nn.ModuleList(
            DecoderLayer(index, config, weights) for index in range(len(config.layers))
        )
        self.norm = RMSNorm(weights, "norm", config.rms_norm_eps)
        if config.head == "score":
            self.score = weights.master("score.weight")
        else:
            self.lm_head = weights.head(self.embedding, config.tie_word_embeddings)
        weights.check_complete()
        scaling, context = config.rope_scaling, config.max_position_embeddings
        # A layer without rotary positions turns by angles of zero, which changes no bit.
        if not all(layer.rotates for layer in config.layers):
            still = rotary_table(np.zeros(config.rotary_dim // 2), context)
            self.register_buffer("still_table", still.to(weights.device), persistent=False)
        factor = 1.0 if scaling is None else scaling.attention_factor
        frequencies = frequencies_of(config.rotary_dim, config.rope_theta, scaling)
        table = rotary_table(frequencies, context, factor)
        self.register_buffer("rotary_table", table.to(weights.device), persistent=False)
        self.register_buffer("exponents", exponents, persistent=False)

    def move(self, device: torch.device) -> None:
        """Move a frozen decoder's weights to a device, each storage once, with its layout."""
        storages: dict[int, torch.UntypedStorage] = {}

        def moved(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in storages:
                copied = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
                source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                storages[storage.data_ptr()] = copied.copy_(source).untyped_storage()
            place = (tensor.storage_offset(), tensor.shape, tensor.stride())
            empty = torch.empty(0, dtype=tensor.dtype, device=device)
            return empty.set_(storages[storage.data_ptr()], *place)

        self.weights.move(moved)
        for parameter in self.parameters():
            parameter.data = moved(parameter.data)
        for name, buffer in list(self.named_buffers(recurse=False)):
            setattr(self, name, moved(buffer))

    def first_layers(self, count: int) -> Decoder:
        """Return this decoder cut to its first `count` layers, sharing all weights."""
        part = copy.copy(self)
        part._modules = dict(self._modules)
        part.layers = nn.ModuleList(list(self.layers)[:count])
        return part

    def forward(
        self,
        inputs: ForwardInputs,
        kv: KeyValues,
        side: Side,
        activation_checkpointing: bool = False,
    ) -> Tensor:
        """Return the final norm's output [T, D], or that of `kv.rows`, for inputs of T tokens.

        `activation_checkpointing` saves only the inputs of layers and computes layers again in
        backward.
        """
        x = embed(inputs.token_ids, self.embedding, self.weights.gradients)
        x = inputs.embedded(x)
        tell(self.trace, "embed", x)
        delta = None
        for index, rotation in enumerate(self.rotations(inputs)):
            layer = self.layers[index]
            last = layer is self.layers[-1]
            if activation_checkpointing:
                x, delta = checkpoint(
                    layer, x, delta, rotation, kv, side, self.trace, last,
                    use_reentrant=False, preserve_rng_state=False,
                )  # fmt: skip
            else:
                x, delta = layer(x, delta, rotation, kv, side, self.trace, last)
            x = inputs.deepened(x, index)
        assert delta is not None, "a decoder has a layer"
        x = add_norm(x, delta, self.norm)
        tell(self.trace, "norm", x)
        return x

    def rotations(self, inputs: ForwardInputs) -> list[Rotation]:
        """Return the angles and factors of each layer's heads."""
        turned, found = inputs.turned(self.rotary_table), []
        for index in range(len(self.layers)):
            still = not self.layer(index).rotates
            positions, table = (inputs.positions, self.still_table) if still else turned
            exponents = None if self.exponents is None else self.exponents[index]
            found.append(Rotation(positions, table, exponents))
        return found

    def segment(
        self, index: int, total: Tensor | None, entered: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Run the trainer's operations between two attentions, all per token.

        Segment i, of as many as layers and one, is layer i - 1 from the product of `o` on, and then
        layer i up to its product of `qkv`, without bias. `segment_norms` has its norms.

        Args:
            total: The residual stream after the previous segment; None for the first.
            entered: Attention of layer i - 1; for the first segment the embeddings.

        Returns:
            The residual stream, and the product. The last segment returns None, and the final
            norm's output.
        """
        delta = None
        if total is None:
            total = entered
        else:
            before = self.layer(index - 1)
            total, delta = before.block(total, before.mixer.o(entered, "train"), "train", None)
        if index == len(self.layers):
            assert delta is not None, "a decoder has a layer"
            return None, add_norm(total, delta, self.norm)
        mixer = self.layer(index).mixer
        return norm_linear(total, delta, mixer.norm, mixer.qkv, "train", None, bias=False)

    def segment_norms(self, index: int) -> list[RMSNorm]:
        """Return the norms of a segment, in order."""
        norms = [self.layer(index - 1).block.norm] if index else []
        last = index == len(self.layers)
        return [*norms, self.norm if last else self.layer(index).mixer.norm]

    def layer(self, index: int) -> DecoderLayer:
        layer = self.layers[index]
        assert isinstance(layer, DecoderLayer), "layers of a decoder"
        return layer

    def logits(self, hidden: Tensor, side: Side) -> Tensor:
        """Return the logits, float32 [R, V], of the final norm's output [R, D]."""
        logits: Tensor = self.lm_head(hidden, side)
        tell(self.trace, "lm_head", logits)
        return logits

    def scores(self, hidden: Tensor) -> Tensor:
        """Return the scalar head's scores, float32 [R], of the final norm's output [R, D].

        Values are rounded only to FP32, and the sum is exact.
        """
        if has_defined_bits(hidden):
            scores = _Scores.apply(hidden, self.score)
        else:
            scores = exact_matmul(hidden, self.score.t()).squeeze(-1).float()
        tell(self.trace, "score", scores)
        return scores


def without_adapters(module: _Module) -> _Module:
    """Return a copy of a module without adapters, sharing all tensors."""
    part = copy.copy(module)
    part._modules = {
        name: None if child is None else without_adapters(child)
        for name, child in module._modules.items()
    }
    if isinstance(part, Linear):
        part.adapter = None
    return part


def embed(token_ids: Tensor, embedding: QuantizedWeight, gradients: Gradients) -> Tensor:
    """Return the embeddings [T, D] of tokens int64 [T]; backward adds to `gradients`."""
    rounded = embedding.operand("train")
    assert isinstance(rounded, Tensor), "an embedding is never FP8"
    if rounded.dtype == torch.float32:
        return nn.functional.embedding(token_ids, embedding.master)
    return _Embed.apply(token_ids, embedding.master, rounded, gradients)


class _Embed(torch.autograd.Function):
    """Rows of the rounded weight; the master weight is an input only for its gradient."""

    @staticmethod
    def forward(
        ctx: Any, token_ids: Tensor, master: Tensor, rounded: Tensor, gradients: Gradients
    ) -> Tensor:
        ctx.save_for_backward(token_ids)
        ctx.master, ctx.gradients = master, gradients
        return nn.functional.embedding(token_ids, rounded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (token_ids,) = ctx.saved_tensors
        return None, ctx.gradients.add_rows(ctx.master, token_ids, grads[0]), None, None


class _Scores(torch.autograd.Function):
    """Exact sums over D, and in backward over R: float32 [R] of hidden [R, D] and weight [1, D]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return exact_matmul(hidden, weight.mT).squeeze(-1).float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        dhidden = (grads[0][:, None] * weight).to(hidden.dtype)
        return dhidden, exact_matmul(grads[0][None], hidden).float()


def add_norm(x: Tensor, delta: Tensor, norm: RMSNorm) -> Tensor:
    """Return norm(x + delta) [T, D], the end of the decoder."""
    if fuses(x):
        return add_norm_fused(x, delta, norm)
    return norm(x + delta)
