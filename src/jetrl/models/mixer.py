"""The mixer of a decoder layer, its first half, in which tokens read earlier ones: weights, costs.

A kind of mixer has a record here and a module, paired in `models.decoder.MIXERS`, like a kind of
block (`models.block` has the rules for weights). Its norm is `input_norm`. All families share the
config.json keys of attention, so `families` creates its record. The fields of other records are
their keys in config.json; a family names them by their entry in `layer_types` (`Family.mixers`). No
other code names a weight of a mixer. This file must not import torch.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from jetrl.kernels.attention import backward_lists
from jetrl.models.block import LayerHalf, Names, SavedCodes, Shapes

if TYPE_CHECKING:  # as in `models.block`
    from jetrl.precision.formats import Format

    KVFormats = tuple[Format, Format]  # of keys and of values, as a cache stores them


class Mixer(LayerHalf):
    """The base class of the records of mixers.

    `wide` is the bytes of an activation; `queries` is the format of queries, INT8 or BF16.
    """

    @abstractmethod
    def cached_bytes(self, kv: KVFormats) -> int:
        """Return the bytes per token in the pages of the KV cache."""

    @abstractmethod
    def staged_bytes(self, kv: KVFormats, queries: Format) -> int:
        """Return the bytes per cached token that a GPU stages during prefill."""

    @abstractmethod
    def kept_bytes(self, wide: int, kv: KVFormats, queries: Format) -> int:
        """Return the bytes per token saved for backward, without the norm's output."""

    @abstractmethod
    def forward_bytes(self, hidden: int, wide: int, splits: int) -> int:
        """Return the maximum bytes per token held by a forward without gradients.

        Decode divides contexts into up to `splits` parts; other forwards have 1.
        """

    @abstractmethod
    def backward_bytes(self, tokens: int, longest: int, shared: bool, queries: Format) -> int:
        """Return the maximum bytes that backward holds on top of the saved activations.

        `longest`: tokens of the longest sequence. `shared`: whether sequences may share prefixes.
        """


class AttentionShape(Mixer):
    """Grouped-query attention: y = o(attention(q, k, v)), q, k, v = qkv(x).

    `qkv` stacks the query heads, the key heads and the values for one GEMM.

    Attributes:
        qkv_bias: `qkv` has a bias.
        qk_norm: Query and key heads have a norm each, before the rotation.
    """

    linears = ("qkv", "o")

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    qk_norm: bool

    @property
    def stored_rows(self) -> Shapes:
        keys = self.num_kv_heads * self.head_dim
        return {"qkv": (self.num_heads * self.head_dim, keys, keys)}

    def parameter_shapes(self, hidden: int) -> Shapes:
        rows = sum(self.stored_rows["qkv"])
        shapes = {"input_norm.weight": (hidden,), "qkv.weight": (rows, hidden)}
        if self.qkv_bias:
            shapes["qkv.bias"] = (rows,)
        if self.qk_norm:
            shapes["q_norm.weight"] = shapes["k_norm.weight"] = (self.head_dim,)
        shapes["o.weight"] = (hidden, self.num_heads * self.head_dim)
        return shapes

    def stored_names(self, fused: bool) -> Names:
        apart = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        return {
            "input_norm": ("input_layernorm",),
            "qkv": ("self_attn.qkv_proj",) if fused else apart,
            "q_norm": ("self_attn.q_norm",),
            "k_norm": ("self_attn.k_norm",),
            "o": ("self_attn.o_proj",),
        }

    def cached_bytes(self, kv: KVFormats) -> int:
        return self.num_kv_heads * sum(format.head_bytes(self.head_dim) for format in kv)

    def staged_bytes(self, kv: KVFormats, queries: Format) -> int:
        if queries.coded:  # codes, scales, and two factors for each of two places of a key
            return self.num_kv_heads * (2 * self.head_dim + 2 * 4 + 4 * 4)
        # 16-bit keys and values, and the factors of keys with scales.
        factors = 4 * 4 if kv[0].code else 0
        return self.num_kv_heads * (2 * 2 * self.head_dim + factors)

    def kept_bytes(self, wide: int, kv: KVFormats, queries: Format) -> int:
        # Q, K and V; queries and attention's output; keys and values as stored; the log-sum-exp, or
        # the two statistics of INT8 queries.
        query, keys, _ = self.stored_rows["qkv"]
        statistics = 8 if queries.coded else 4
        return wide * (3 * query + 2 * keys) + self.cached_bytes(kv) + statistics * self.num_heads

    @property
    def saved_codes(self) -> SavedCodes | None:
        # Of qkv only what the norms of query and key heads read.
        query, keys, _ = self.stored_rows["qkv"]
        normed = (query + keys,) if self.qk_norm else ()
        return SavedCodes((query, *normed), replaced=2 * (query + keys), restored=query + 2 * keys)

    def forward_bytes(self, hidden: int, wide: int, splits: int) -> int:
        queries, keys, _ = self.stored_rows["qkv"]
        return wide * (3 * hidden + 3 * queries + 6 * keys) + 4 * queries * splits

    def backward_bytes(self, tokens: int, longest: int, shared: bool, queries: Format) -> int:
        if queries.coded:
            return self._integer_backward_bytes(tokens, longest, shared)
        query, keys, _ = self.stored_rows["qkv"]
        across = -(-longest // backward_lists.BACKWARD_QUERIES)
        across *= -(-longest // backward_lists.BACKWARD_KEYS)
        # Queries of a branch see all keys of its stem, which may be summed in several parts.
        met = across if shared else across // 2 + 1
        ds = self.num_heads * -(-tokens // longest) * met * backward_lists.DS_TILE_BYTES
        if shared:
            ds += 2 * 4 * keys * (tokens + longest)
        return 2 * (3 * query + 4 * keys) * tokens + min(ds, backward_lists.STORED_DS_BYTES)

    def _integer_backward_bytes(self, tokens: int, longest: int, shared: bool) -> int:
        """Return `backward_bytes` of INT8 queries (kernels/portable/attention_backward.py)."""
        query, keys, _ = self.stored_rows["qkv"]
        # Each sequence begins at a multiple of 128 places, and is as long as the longest.
        block = backward_lists.BACKWARD_KEYS
        places = -(-tokens // longest) * (-(-longest // block) * block)
        # dO, dQ, dK and dV. Then codes by rows and columns (queries and two planes of dO, keys,
        # values by rows only), and float32 factors.
        gradients = 2 * (2 * query + 2 * keys) * tokens
        copies = 6 * query + 3 * keys + 4 * (5 * self.num_heads + 2 * self.num_kv_heads)
        # Float32 sums of dK and dV per query head, of as many key heads at once as fit. A stem's
        # keys have sums for each of its branches, which are taken to be as many as the others.
        of_head = (2 if shared else 1) * 2 * 4 * query * places // self.num_kv_heads
        at_once = max(1, backward_lists.INTEGER_SUMS_BYTES // of_head)
        return gradients + copies * places + min(self.num_kv_heads, at_once) * of_head


class WideNormAttention(AttentionShape):
    """Attention whose norms are over all query heads and all key heads together, as in OLMoE."""

    def parameter_shapes(self, hidden: int) -> Shapes:
        queries, keys, _ = self.stored_rows["qkv"]
        shapes = super().parameter_shapes(hidden)
        return shapes | {"q_norm.weight": (queries,), "k_norm.weight": (keys,)}

    @property
    def saved_codes(self) -> None:
        return None
