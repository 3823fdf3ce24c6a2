"""One decoder for Qwen3, Qwen2/2.5 and Llama 3, on a flat list of tokens.

    x = embed(tokens)
    for each layer:
        q, k, v = qkv(norm(x));    x = x + o(attention(rope(norm(q)), rope(norm(k)), v))
        gate, up = gate_up(norm(x));    x = x + down(silu(gate) * up)
    logits = lm_head(norm(x))

A layer hands on x and what is to be added to it, so that the addition can be part of the next norm.
On a GPU the parts of a layer are fused (models/layer_hopper), with the same bits.

Both sides of the flow run this code. They differ in the `KeyValues` they pass (pages of a cache, or
the packed batch itself) and in `side`, which picks formats from the plan. Between operations values
are BF16 (FP32 under the fp32 plan); every operation gives a token the same bits whatever other
tokens are in the list.

Legend: T tokens, D hidden size, H query heads, G key-value heads, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from jetrl.kernels.rotary import rotary_table
from jetrl.kernels.swiglu import swiglu
from jetrl.models.attention import KeyValues, Rotary, Trace, values_of
from jetrl.models.families import ModelConfig, inverse_frequencies
from jetrl.models.norm import RMSNorm
from jetrl.precision.exact import exact_matmul
from jetrl.precision.hopper import hopper
from jetrl.precision.linear import Linear
from jetrl.precision.plan import Format, PrecisionPlan, Side
from jetrl.precision.quantize import QTensor


class DecoderLayer(nn.Module):
    """Attention and SwiGLU, each behind a norm and added to the residual stream."""

    def __init__(
        self,
        index: int,
        config: ModelConfig,
        plan: PrecisionPlan,
        masters: Mapping[str, nn.Parameter],
    ) -> None:
        super().__init__()
        self.index, self.config = index, config
        sides: tuple[Side, Side] = ("rollout", "train")
        formats = {side: plan.linear_format(side, index, config.num_layers) for side in sides}
        dtype = activation_dtype(plan)

        def linear(name: str, bias: bool = False) -> Linear:
            full = f"layers.{index}.{name}"
            bias_master = masters[f"{full}.bias"] if bias else None
            return Linear(full, masters[f"{full}.weight"], bias_master, formats, plan, dtype)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(masters[f"layers.{index}.{name}.weight"], config.rms_norm_eps, dtype)

        self.input_norm, self.post_norm = norm("input_norm"), norm("post_norm")
        self.q_norm = norm("q_norm") if config.qk_norm else None
        self.k_norm = norm("k_norm") if config.qk_norm else None
        self.qkv, self.o = linear("qkv", config.qkv_bias), linear("o")
        self.gate_up, self.down = linear("gate_up"), linear("down")

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        positions: Tensor,
        table: Tensor,
        kv: KeyValues,
        side: Side,
        trace: Trace | None,
        last: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """x [T, D] and what the layer before adds to it -> the same for the next layer, or of the
        last one for `kv.rows`."""
        told = None if trace is None else _prefixed(trace, f"layers.{self.index}.")
        enter = hopper("models.layer_hopper").norm_linear if _fuses(x) else norm_linear
        x, qkv = enter(x, delta, self.input_norm, self.qkv, side, told)
        _tell(told, "qkv", qkv)
        attended = kv.attend(self.index, qkv, self._rotary(positions, table, told), last)
        _tell(told, "attention", attended)
        if last and kv.rows is not None:
            x = x[kv.rows]
        del qkv  # like the heads below: the MLP, where a forward holds most, needs neither
        delta = self.o(attended, side)
        _tell(told, "o", delta)
        del attended
        feed_forward = hopper("models.layer_hopper").mlp if _fuses(x) else mlp
        x, delta = feed_forward(x, delta, self.post_norm, self.gate_up, self.down, side, told)
        _tell(told, "down", delta)
        return x, delta

    def _rotary(self, positions: Tensor, table: Tensor, trace: Trace | None) -> Rotary:
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm, self.k_norm)
        c = self.config
        return Rotary(positions, table, norms, c.num_heads, c.num_kv_heads, trace)


def norm_linear(
    x: Tensor,
    delta: Tensor | None,
    norm: RMSNorm,
    linear: Linear,
    side: Side,
    trace: Trace | None,
) -> tuple[Tensor, Tensor]:
    """The reference of entering a layer: (x + delta, linear(norm(x + delta)))."""
    x = x if delta is None else x + delta
    normed = norm(x)
    _tell(trace, "input_norm", normed)
    return x, linear(normed, side)


def mlp(
    x: Tensor,
    delta: Tensor,
    norm: RMSNorm,
    gate_up: Linear,
    down: Linear,
    side: Side,
    trace: Trace | None,
) -> tuple[Tensor, Tensor]:
    """The reference of the second half: (x + delta, down(swiglu(gate_up(norm(x + delta)))))."""
    x = x + delta
    normed = norm(x)
    _tell(trace, "post_norm", normed)
    gates = gate_up(normed, side)
    _tell(trace, "gate_up", gates)
    gated = swiglu(gates)
    _tell(trace, "swiglu", gated)
    return x, down(gated, side)


class Decoder(nn.Module):
    """The whole model over FP32 masters, named as in `jetrl.models.hf`.

    trace, when set, is called with (operation name, output) after each operation: how
    `jetrl parity --locate` finds the first one that differs.

    frozen: no master is kept: a layer's are forgotten before the next layer's are asked for.
    config.head: `logits` are there for "lm", `scores` for "score".

    Raises:
        UserError: a linear layer that FP8 cannot take.
    """

    rotary_table: Tensor

    def __init__(
        self,
        config: ModelConfig,
        plan: PrecisionPlan,
        masters: Mapping[str, nn.Parameter],
        frozen: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.plan = config, plan
        self.trace: Trace | None = None
        dtype = activation_dtype(plan)
        weight = self.embed = masters["embed.weight"]
        if frozen:
            self.embed = nn.Parameter(weight.to(dtype), requires_grad=False)
        self.layers = nn.ModuleList()
        for i in range(config.num_layers):
            self.layers.append(DecoderLayer(i, config, plan, masters))
            if frozen:
                _release_masters(self.layers[-1])
        self.norm = RMSNorm(masters["norm.weight"], config.rms_norm_eps, dtype)
        if config.head == "score":
            self.score = masters["score.weight"]
        else:
            head: dict[Side, Format] = {"rollout": plan.lm_head, "train": plan.lm_head}
            if not config.tie_word_embeddings:
                weight = masters["lm_head.weight"]
            elif frozen and plan.lm_head == "bf16":
                weight = self.embed  # rounded already: one copy for both
            self.lm_head = Linear("lm_head", weight, None, head, plan, torch.float32)
        if frozen:
            _release_masters(self)
        table = rotary_table(inverse_frequencies(config), config.max_position_embeddings)
        self.register_buffer("rotary_table", table.to(weight.device), persistent=False)

    def requantize(self) -> None:
        """Make every working copy from its master, in place on a GPU."""
        for module in self.modules():
            if isinstance(module, Linear | RMSNorm):
                module.requantize()

    def move(self, device: torch.device) -> None:
        """Put a frozen decoder's weights on a device: every storage is copied once, with layout."""
        storages: dict[int, torch.UntypedStorage] = {}

        def moved(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in storages:
                copied = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
                source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                storages[storage.data_ptr()] = copied.copy_(source).untyped_storage()
            empty = torch.empty(0, dtype=tensor.dtype, device=device)
            return empty.set_(
                storages[storage.data_ptr()],
                tensor.storage_offset(),
                tensor.shape,
                tensor.stride(),
            )

        for module in self.modules():
            if isinstance(module, Linear):
                module.move(moved)
            elif isinstance(module, RMSNorm):
                module.copy = moved(module.copy)
        for parameter in self.parameters():
            parameter.data = moved(parameter.data)
        self.rotary_table = moved(self.rotary_table)

    def first_layers(self, count: int) -> Decoder:
        """This decoder cut to its first layers, sharing all weights."""
        part = copy.copy(self)
        part._modules = dict(self._modules)
        part.layers = nn.ModuleList(list(self.layers)[:count])
        return part

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv: KeyValues,
        side: Side,
        checkpoint_layers: bool = False,
    ) -> Tensor:
        """token_ids, positions int64 [T] -> the final norm's output [T, D], or of `kv.rows`."""
        dtype = activation_dtype(self.plan)
        if token_ids.is_cuda and dtype == torch.bfloat16 and self.embed.dtype == torch.float32:
            x = hopper("models.embedding_hopper").embed(token_ids, self.embed)
        else:
            x = nn.functional.embedding(token_ids, self.embed).to(dtype)
        _tell(self.trace, "embed", x)
        delta = None
        for layer in self.layers:
            last = layer is self.layers[-1]
            arguments = (x, delta, positions, self.rotary_table, kv, side, self.trace, last)
            x, delta = (
                checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False)
                if checkpoint_layers
                else layer(*arguments)
            )
        if _fuses(x):
            x = hopper("models.layer_hopper").add_norm(x, delta, self.norm)
        else:
            x = self.norm(x if delta is None else x + delta)
        _tell(self.trace, "norm", x)
        return x

    def logits(self, hidden: Tensor, side: Side) -> Tensor:
        """hidden [R, D] -> float32 [R, V]."""
        logits: Tensor = self.lm_head(hidden, side)
        _tell(self.trace, "lm_head", logits)
        return logits

    def scores(self, hidden: Tensor) -> Tensor:
        """hidden [R, D] -> float32 [R], no rounding but FP32's. A GPU adds in an order that depends
        on the number of rows, so its sum is made exact."""
        if hidden.is_cuda:
            scores = exact_matmul(hidden, self.score.t()).squeeze(-1).float()
        else:
            scores = (hidden.float() * self.score).sum(-1)
        _tell(self.trace, "score", scores)
        return scores


def _release_masters(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, Linear):
            part.release_master()


def activation_dtype(plan: PrecisionPlan) -> torch.dtype:
    """What flows between operations: bfloat16, or float32 under the fp32 plan."""
    return torch.float32 if plan.rest == "fp32" else torch.bfloat16


def _fuses(x: Tensor) -> bool:
    """Whether the fused forms take this: BF16 on a GPU."""
    return x.is_cuda and x.dtype == torch.bfloat16


def _tell(trace: Trace | None, name: str, value: Tensor | QTensor) -> None:
    if trace is not None:
        trace(name, values_of(value))


def _prefixed(trace: Trace, prefix: str) -> Trace:
    return lambda name, value: trace(prefix + name, value)
