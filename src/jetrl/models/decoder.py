"""One decoder for Qwen3, Qwen2/2.5 and Llama 3, on a flat list of tokens.

    x = embed(tokens)
    for each layer:
        q, k, v = qkv(norm(x));    x = x + o(attention(rope(norm(q)), rope(norm(k)), v))
        gate, up = gate_up(norm(x));    x = x + down(silu(gate) * up)
    logits = lm_head(norm(x))

Both sides of the flow run this code. They differ in the `KeyValues` they pass (pages of a cache, or
the packed batch itself) and in `side`, which picks formats from the plan. Between operations values
are BF16 (FP32 under the fp32 plan); every operation gives a token the same bits whatever other
tokens are in the list.

Legend: T tokens, D hidden size, H query heads, G key-value heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from jetrl.kernels.norm import rms_norm
from jetrl.kernels.rotary import rotary, rotary_table
from jetrl.kernels.swiglu import swiglu
from jetrl.models.attention import KeyValues
from jetrl.models.families import ModelConfig, inverse_frequencies
from jetrl.precision.linear import Linear
from jetrl.precision.plan import Format, PrecisionPlan, Side

Trace = Callable[[str, Tensor], None]


class RMSNorm(nn.Module):
    """RMSNorm with an FP32 master weight, read in the activations' dtype."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.to(x.dtype), self.eps)


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
            return RMSNorm(masters[f"layers.{index}.{name}.weight"], config.rms_norm_eps)

        self.input_norm, self.post_norm = norm("input_norm"), norm("post_norm")
        self.q_norm = norm("q_norm") if config.qk_norm else None
        self.k_norm = norm("k_norm") if config.qk_norm else None
        self.qkv, self.o = linear("qkv", config.qkv_bias), linear("o")
        self.gate_up, self.down = linear("gate_up"), linear("down")

    def forward(
        self, x: Tensor, positions: Tensor, table: Tensor, kv: KeyValues, side: Side, trace: Trace
    ) -> Tensor:
        """x [T, D] -> [T, D]."""
        c, here = self.config, f"layers.{self.index}"
        normed = self.input_norm(x)
        trace(f"{here}.input_norm", normed)
        qkv = self.qkv(normed, side).unflatten(-1, (-1, c.head_dim))
        trace(f"{here}.qkv", qkv)
        q, k, v = qkv.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotary(q, positions, table), rotary(k, positions, table)
        trace(f"{here}.rotary", torch.cat([q, k], dim=1))
        attended = kv.attend(self.index, q, k, v).flatten(-2, -1)
        trace(f"{here}.attention", attended)
        x = x + self.o(attended, side)
        trace(f"{here}.o", x)
        normed = self.post_norm(x)
        trace(f"{here}.post_norm", normed)
        gate_up = self.gate_up(normed, side)
        trace(f"{here}.gate_up", gate_up)
        gated = swiglu(gate_up)
        trace(f"{here}.swiglu", gated)
        x = x + self.down(gated, side)
        trace(f"{here}.down", x)
        return x


class Decoder(nn.Module):
    """The whole model over FP32 masters, named as in `jetrl.models.hf`.

    trace, when set, is called with (operation name, output) after each operation: how
    `jetrl parity --locate` finds the first one that differs.

    Raises:
        UserError: a linear layer that FP8 cannot take.
    """

    def __init__(
        self, config: ModelConfig, plan: PrecisionPlan, masters: Mapping[str, nn.Parameter]
    ) -> None:
        super().__init__()
        self.config, self.plan = config, plan
        self.trace: Trace | None = None
        self.embed = masters["embed.weight"]
        self.layers = nn.ModuleList(
            DecoderLayer(i, config, plan, masters) for i in range(config.num_layers)
        )
        self.norm = RMSNorm(masters["norm.weight"], config.rms_norm_eps)
        head: dict[Side, Format] = {"rollout": plan.lm_head, "train": plan.lm_head}
        weight = masters["embed.weight" if config.tie_word_embeddings else "lm_head.weight"]
        self.lm_head = Linear("lm_head", weight, None, head, plan, torch.float32)
        table = rotary_table(inverse_frequencies(config), config.max_position_embeddings)
        self.register_buffer("rotary_table", table.to(weight.device), persistent=False)

    def requantize(self) -> None:
        """Make every working copy from its master."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.requantize()

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv: KeyValues,
        side: Side,
        checkpoint_layers: bool = False,
    ) -> Tensor:
        """token_ids, positions int64 [T] -> the final norm's output [T, D]."""
        trace = self.trace or _no_trace
        x = nn.functional.embedding(token_ids, self.embed).to(activation_dtype(self.plan))
        trace("embed", x)
        for layer in self.layers:
            arguments = (x, positions, self.rotary_table, kv, side, trace)
            x = (
                checkpoint(layer, *arguments, use_reentrant=False)
                if checkpoint_layers
                else layer(*arguments)
            )
        x = self.norm(x)
        trace("norm", x)
        return x

    def logits(self, hidden: Tensor, side: Side) -> Tensor:
        """hidden [R, D] -> float32 [R, V]."""
        logits: Tensor = self.lm_head(hidden, side)
        if self.trace is not None:
            self.trace("lm_head", logits)
        return logits


def activation_dtype(plan: PrecisionPlan) -> torch.dtype:
    """What flows between operations: bfloat16, or float32 under the fp32 plan."""
    return torch.float32 if plan.rest == "fp32" else torch.bfloat16


def _no_trace(name: str, value: Tensor) -> None:
    pass
