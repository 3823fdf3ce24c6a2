"""Keys and values of a batch as the forward kernels of attention read them.

One pass per layer widens keys and values to 16-bit operands, aligns each sequence to zero-padded
blocks of 64, and computes the factors of the keys (`attention.core`). After that, packed sequences,
quantized pages and BF16 pages look the same.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jetrl.kernels.attention.core import (
    SPLIT_KEYS,
    channel_of_slot,
    key_factors,
    score_scale,
    widen_codes,
)
from jetrl.kernels.attention.layout import BLOCK_KEYS, KeyValueCodes, QueryTiles
from jetrl.precision.quantize import FORMATS, FP8_BLOCK, QTensor
from jetrl.precision.triton.layout import empty_row_groups
from jetrl.precision.triton.quantize import quantize_rows
from jetrl.settings.presets import DEFAULT_SCALES


@gluon.jit(do_not_specialize=["num_blocks"])
def stage_keys_kernel(
    k_ptr, v_ptr, ks_ptr, vs_ptr, blocks_ptr, kv_out, f_out, num_blocks,
    G: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, SCALED: gl.constexpr,
    SCORE_SCALE: gl.constexpr,
):  # fmt: skip
    """Stage one block of 64 keys and values of one key-value head, and the factors of the keys.

    Args:
        k_ptr: FP8, int8 or bfloat16 [rows, G, D], like v_ptr; scales are float32 [rows, G].
        blocks_ptr: int32 [num_blocks, 2], `QueryTiles.key_blocks`.
        kv_out: float16, or bfloat16 without scales, [G, num_blocks, 2, BLOCK_N, D], written.
        f_out: float32 [G, num_blocks, 4, BLOCK_N]; rows 0 to 2 are written if SCALED.
    """
    # A thread holds 8 channels of a key, which it writes as 16 bytes.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])

    # The head is the fastest program index, matching the layout of the input. The output has all
    # blocks of a head together, so that a forward tile reads contiguous memory.
    group = gl.program_id(0) % G
    block = gl.program_id(0) // G
    row0 = gl.load(blocks_ptr + block * 2).to(gl.int64)
    valid = gl.load(blocks_ptr + block * 2 + 1)
    out_block = group.to(gl.int64) * num_blocks + block
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    d = gl.arange(0, D, gl.SliceLayout(0, layout))

    # Write zeros for keys past the context: the forward masks their scores, but a NaN in a value
    # would propagate through a weight of zero.
    ok = (n < valid)[:, None]
    source = row0 * (G * D) + group * D + (n * (G * D))[:, None]
    k_out = kv_out + out_block * (2 * BLOCK_N * D) + n[:, None] * D + d[None, :]
    v_out = k_out + BLOCK_N * D
    v = gl.load(v_ptr + source + d[None, :], mask=ok, other=0.0)
    if SCALED:
        # Codes are exact in FP16. Permute the channels of keys to the order in which the
        # tensor-core instructions of decode add them.
        k = gl.load(k_ptr + source + channel_of_slot(d)[None, :], mask=ok, other=0.0)
        # Keys past the context get a scale of 1, since the factors of 0 are not finite.
        key = gl.arange(0, BLOCK_N, line)
        ks = gl.load(ks_ptr + (row0 + key) * G + group, mask=key < valid, other=1.0)
        vs = gl.load(vs_ptr + (row0 + key) * G + group, mask=key < valid, other=1.0)
        a, b, c = key_factors(ks, vs, SCORE_SCALE)
        f = f_out + out_block * (4 * BLOCK_N) + key
        gl.store(f, a)
        gl.store(f + BLOCK_N, b)
        gl.store(f + 2 * BLOCK_N, c)
        gl.store(k_out, widen_codes(k))
        gl.store(v_out, widen_codes(v))
    else:
        # Decode also reads BF16 keys in order.
        gl.store(k_out, gl.load(k_ptr + source + d[None, :], mask=ok, other=0.0))
        gl.store(v_out, v)


@dataclass(frozen=True)
class StagedKeys:
    """Keys and values of a batch in the layout of the forward kernel, from `stage_keys`.

    Attributes:
        kv: float16 (bfloat16 without scales) [G * num_blocks * 128, D]: per block 64 keys, then 64
            values.
        factors: float32 [G * num_blocks * 4, 64]: per block the rows a, b, c of `attention.core`
            and one unused row; uninitialized without scales.
    """

    kv: Tensor
    factors: Tensor
    num_blocks: int
    codes: KeyValueCodes


def stage_keys(codes: KeyValueCodes, tiles: QueryTiles) -> StagedKeys:
    """Return codes [T, G, D] or [P, 64, G, D], widened and aligned to the blocks of `tiles`."""
    assert codes.k.ndim == 3 or codes.k.shape[1] == BLOCK_KEYS, f"pages of {codes.k.shape[1]}"
    groups, head_dim, num_blocks = codes.num_heads, codes.head_dim, len(tiles.key_blocks)
    dtype = torch.float16 if codes.scaled else torch.bfloat16
    rows = groups * num_blocks
    kv = codes.k.new_empty(rows * 2 * BLOCK_KEYS, head_dim, dtype=dtype)
    factors = codes.k.new_empty(rows * 4 if codes.scaled else 4, BLOCK_KEYS, dtype=torch.float32)
    # A kernel cannot take None: without scales, pass a placeholder.
    k_scales, v_scales = (factors if s is None else s for s in (codes.k_scales, codes.v_scales))
    stage_keys_kernel[(rows,)](
        codes.k, codes.v, k_scales, v_scales, tiles.key_blocks, kv, factors, num_blocks,
        groups, head_dim, BLOCK_KEYS, codes.scaled, score_scale(head_dim, codes.scaled),
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return StagedKeys(kv, factors, num_blocks, codes)


@dataclass(frozen=True)
class TileAttention:
    """Attention by a kernel over staged keys, for training and prefill.

    `launch(q, staged, tiles, o, o_scales, scales, split_keys)` writes o, quantized if `o_scales` is
    a tensor, and returns the log-sum-exp, float32 [H, T].
    """

    launch: Callable[..., Tensor]

    def attend_tiles(
        self, q: Tensor, staged: StagedKeys, tiles: QueryTiles, split_keys: int = SPLIT_KEYS
    ) -> tuple[Tensor, Tensor]:
        """Return causal attention of q over staged keys, and the log-sum-exp, float32 [H, T].

        Args:
            q: bfloat16 [T, H, D], rotated, where T is the number of queries in `tiles`.
            split_keys: keys per split, a multiple of 64; the bits depend on it.
        """
        o = torch.empty_like(q)
        return o, self.launch(q, staged, tiles, o, None, DEFAULT_SCALES, split_keys)

    def attend_batch(
        self, q: Tensor, codes: KeyValueCodes, tiles: QueryTiles
    ) -> tuple[Tensor, Tensor]:
        """Return attention of q over the codes of a packed batch, and the log-sum-exp."""
        return self.attend_tiles(q, stage_keys(codes, tiles), tiles)

    def attend_prefill(
        self, q: Tensor, pages: KeyValueCodes, tiles: QueryTiles, split_keys: int = SPLIT_KEYS
    ) -> Tensor:
        """Return attention of prefill chunks q [T, H, D], rotated, over pages [P, 64, G, D].

        The pages must already contain the keys and values of the chunks. Staging is an extra pass
        over all keys and values of the contexts, so chunks should have a few hundred tokens or
        more.
        """
        return self.attend_tiles(q, stage_keys(pages, tiles), tiles, split_keys)[0]

    def attend_prefill_quantized(
        self,
        q: Tensor,
        pages: KeyValueCodes,
        tiles: QueryTiles,
        scales: str = DEFAULT_SCALES,
        split_keys: int = SPLIT_KEYS,
    ) -> QTensor:
        """Return the same bits as `quantize_rows(attend_prefill(...).flatten(1))`.

        Quantization is fused for head_dim 128. For 64 a group spans two heads, so the quantizer
        runs separately.

        Args:
            scales: "fp32", or "pow2" for power-of-two scales.
        """
        tokens, heads, head_dim = q.shape
        if head_dim != FP8_BLOCK:
            attended = self.attend_prefill(q, pages, tiles, split_keys)
            return quantize_rows(attended.flatten(1), scales=scales)
        rows = empty_row_groups(tokens, heads * head_dim, FORMATS["e4m3"][0], q.device)
        staged = stage_keys(pages, tiles)
        self.launch(q, staged, tiles, rows.codes, rows.scales, scales, split_keys)
        return rows
