"""Attention mixer of a decoder layer: the module of `models.mixer.AttentionShape`.

    q, k, v = qkv(norm(x));    y = o(attention(rope(norm(q)), rope(norm(k)), v))

Sampling and training differ only from qkv to attention. The module passes raw qkv and a `Rotary`,
which turns it into queries and keys, to `KeyValues`, which decides how keys and values are stored
and which kernel reads them: pages of a cache (`rollout.kv_cache`) or, here, the packed batch
itself.

Legend: T tokens, R needed rows, N output features, H query heads, G key-value heads, D hidden size
(head size in shapes with H or G).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from jetrl.kernels.attention.integer import attend_packed_integer
from jetrl.kernels.attention.layout import QueryTiles
from jetrl.kernels.attention.reference import attend_packed, quantize_keys_and_values, stored_values
from jetrl.models.attention_fused import attend_packed_fused
from jetrl.models.families import ModelConfig
from jetrl.models.layer import RMSNorm, Rotary, Rotation, Trace, fuses, tell
from jetrl.models.layer_fused import norm_linear_fused
from jetrl.models.mixer import AttentionShape
from jetrl.models.packed import Stems
from jetrl.models.weights import Weights
from jetrl.precision.backend import has_kernels
from jetrl.precision.formats import Format, key_and_value_formats, number_format
from jetrl.precision.linear import Linear
from jetrl.precision.plan import PrecisionPlan, Side
from jetrl.precision.quantize import QTensor
from jetrl.precision.saved import gradient_at_codes, saves_codes


def kv_bytes_per_token(config: ModelConfig, plan: PrecisionPlan) -> int:
    """Return the bytes of keys and values of one token in all layers, scales included."""
    kv = key_and_value_formats(plan.kv)
    return sum(layer.mixer.cached_bytes(kv) for layer in config.layers)


def staged_bytes_per_token(config: ModelConfig, plan: PrecisionPlan) -> int:
    """Return the maximum bytes per token that a layer stages on a GPU to read the cache."""
    kv = key_and_value_formats(plan.kv)
    queries = number_format(plan.queries)
    return max(layer.mixer.staged_bytes(kv, queries) for layer in config.layers)


class KeyValues(Protocol):
    """A source of keys and values for one forward over a flat list of T tokens."""

    @property
    def rows(self) -> Tensor | None:
        """The tokens whose output is needed, int64 [R]; None: all T.

        For other tokens the last layer only stores keys and values.
        """
        ...

    def attend(self, layer: int, qkv: Tensor, rope: Rotary, last: bool) -> Tensor | QTensor:
        """Return causal attention [T, H * D] of qkv [T, (H + 2G) * D] over each sequence so far.

        `qkv` is not yet rotated. The last layer returns only `rows`. The result may already be the
        1 x 128 groups that the next linear layer would quantize.
        """
        ...


class PackedKeyValues:
    """The keys and values of training: whole sequences end to end, held by the batch itself.

    `cu_seqlens` is int64 [S + 1], on the CPU (no host sync) or on the batch's `device`, by default
    its own. `stems` holds the rows to compute if sequences share their first tokens; None: all.
    """

    def __init__(
        self,
        cu_seqlens: Tensor,
        plan: PrecisionPlan,
        device: torch.device | None = None,
        stems: Stems | None = None,
    ) -> None:
        device = cu_seqlens.device if device is None else device
        on_gpu = has_kernels(device) and not plan.keys_in_fp32
        self._plan = plan
        self._cu_seqlens = cu_seqlens if on_gpu else cu_seqlens.to(device)
        self._tiles: QueryTiles | None = None
        self._row_of = None if stems is None else stems.row_of.to(device)
        if on_gpu and stems is None:
            self._tiles = QueryTiles.packed(cu_seqlens.tolist(), device)
        elif on_gpu and stems is not None:
            self._tiles = QueryTiles.packed(stems.run_starts, device, stems.stem_of)
        lengths = set() if stems is not None else set(cu_seqlens.diff().tolist())
        self._length = lengths.pop() if len(lengths) == 1 else None
        self.rows = None

    def attend(self, layer: int, qkv: Tensor, rope: Rotary, last: bool) -> Tensor:
        """Return attention as in `KeyValues.attend`, differentiable."""
        plan = self._plan
        if self._tiles is not None:
            return attend_packed_fused(qkv, rope, self._tiles, plan, self._length)
        q, k, v = rope.heads(qkv)
        if rope.trace is not None:  # codes are made again for the trace
            stored = quantize_keys_and_values(k.detach(), v.detach(), plan.kv, plan.scales)
            tell(rope.trace, "keys and values", torch.cat([stored_values(x) for x in stored], 1))
        cu_seqlens, row_of = self._cu_seqlens, self._row_of

        def attended(q: Tensor) -> Tensor:
            if plan.integer_attention:
                return attend_packed_integer(q, k, v, cu_seqlens, plan.scales, row_of)
            return attend_packed(q, k, v, cu_seqlens, plan.kv, plan.scales, row_of)

        out = attended(q)
        if rope.saves_codes:
            out = gradient_at_codes(attended, q, out)
        return out.flatten(-2, -1)


class Attention(nn.Module):
    """The first half of a decoder layer: a norm, `qkv`, attention and `o`."""

    def __init__(
        self,
        index: int,
        shape: AttentionShape,
        eps: float,
        weights: Weights,
        formats: Mapping[Side, Format],
    ) -> None:
        super().__init__()
        self.index, self.shape, name = index, shape, f"layers.{index}"
        self.norm = RMSNorm(weights, f"{name}.input_norm", eps)
        self.q_norm = RMSNorm(weights, f"{name}.q_norm", eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(weights, f"{name}.k_norm", eps) if shape.qk_norm else None
        self.qkv = weights.linear(f"{name}.qkv", formats, shape.qkv_bias)
        self.o = weights.linear(f"{name}.o", formats)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        rotation: Rotation,
        kv: KeyValues,
        side: Side,
        trace: Trace | None,
        last: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return x + delta and attention's output for that sum, both [T, D], of `last` [R, D]."""
        x, qkv = norm_linear(x, delta, self.norm, self.qkv, side, trace)
        tell(trace, "qkv", qkv)
        attended = self.attend(qkv, rotation, kv, trace, last)
        if last and kv.rows is not None:
            x = x[kv.rows]
        del qkv  # which `o` does not need
        delta = self.o(attended, side)
        tell(trace, "o", delta)
        return x, delta

    def attend(
        self, qkv: Tensor, rotation: Rotation, kv: KeyValues, trace: Trace | None, last: bool
    ) -> Tensor | QTensor:
        """Return attention [T, H * D] of qkv [T, (H + 2G) * D], as `KeyValues.attend` does."""
        qkv, norms = self.normed(qkv)
        rope = Rotary(
            positions=rotation.positions,
            table=rotation.table,
            norms=norms,
            num_heads=self.shape.num_heads,
            num_kv_heads=self.shape.num_kv_heads,
            exponents=rotation.exponents,
            trace=trace,
            as_values=self.o.adapter is not None,
            saves_codes=saves_codes(self.o.plan),
        )
        attended = kv.attend(self.index, qkv, rope, last)
        tell(trace, "attention", attended)
        return attended

    def normed(self, qkv: Tensor) -> tuple[Tensor, tuple[RMSNorm, RMSNorm] | None]:
        """Return qkv, and the norms that its query and key heads still need."""
        if self.q_norm is None or self.k_norm is None:
            return qkv, None
        return qkv, (self.q_norm, self.k_norm)


class WideNormedAttention(Attention):
    """The module of `models.mixer.WideNormAttention`, which norms Q and K before they are heads."""

    def normed(self, qkv: Tensor) -> tuple[Tensor, None]:
        assert self.q_norm is not None, "the record has norms"
        assert self.k_norm is not None, "the record has norms"
        q, k, v = qkv.split(list(self.shape.stored_rows["qkv"]), dim=-1)
        return torch.cat([self.q_norm(q), self.k_norm(k), v], dim=-1), None


def norm_linear(
    x: Tensor,
    delta: Tensor | None,
    norm: RMSNorm,
    linear: Linear,
    side: Side,
    trace: Trace | None,
    bias: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return x + delta [T, D] and linear(norm(x + delta)) [T, N], the start of attention.

    Without `bias`, that of a linear without an adapter is not added. This is the reference; BF16
    tensors on a GPU use the fused form, with the same forward bits.
    """
    if fuses(x):
        return norm_linear_fused(x, delta, norm, linear, side, trace, bias)
    x = x if delta is None else x + delta
    normed = norm(x)
    tell(trace, "input_norm", normed)
    return x, linear(normed, side) if bias else linear.product(normed, side)
