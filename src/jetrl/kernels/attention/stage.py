"""Keys and values as the forward reads them: widened, lined up in blocks, with their factors.

One pass over keys and values, before the forward of a layer: widens them to the operand the tensor
core wants, lines each sequence up to blocks of 64, padded with zeros, and works out the keys'
factors (`attention_core`). It makes packed sequences, FP8 pages and BF16 pages the same thing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jetrl.kernels.attention.core import channel_of_slot, key_factors, score_scale
from jetrl.kernels.attention.layout import BLOCK_KEYS, KeyValueCodes, QueryTiles


@gluon.jit(do_not_specialize=["num_blocks"])
def stage_keys_kernel(
    k_ptr,
    v_ptr,
    ks_ptr,
    vs_ptr,
    blocks_ptr,
    kv_out,
    f_out,
    num_blocks,
    G: gl.constexpr,
    D: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SCALED: gl.constexpr,
    SCORE_SCALE: gl.constexpr,
):
    """One block of one key-value head: 16-bit keys (channels permuted) and values, and factors."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    group = gl.program_id(0) % G
    block = gl.program_id(0) // G
    row0 = gl.load(blocks_ptr + block * 2).to(gl.int64)
    valid = gl.load(blocks_ptr + block * 2 + 1)
    out_block = group.to(gl.int64) * num_blocks + block
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    d = gl.arange(0, D, gl.SliceLayout(0, layout))
    ok = (n < valid)[:, None]
    source = row0 * (G * D) + group * D + (n * (G * D))[:, None]
    k_out = kv_out + out_block * (2 * BLOCK_N * D) + n[:, None] * D + d[None, :]
    v_out = k_out + BLOCK_N * D
    v = gl.load(v_ptr + source + d[None, :], mask=ok, other=0.0)
    if SCALED:
        k = gl.load(k_ptr + source + channel_of_slot(d)[None, :], mask=ok, other=0.0)
        key = gl.arange(0, BLOCK_N, line)
        ks = gl.load(ks_ptr + (row0 + key) * G + group, mask=key < valid, other=1.0)
        vs = gl.load(vs_ptr + (row0 + key) * G + group, mask=key < valid, other=1.0)
        a, b, c = key_factors(ks, vs, SCORE_SCALE)
        f = f_out + out_block * (4 * BLOCK_N) + key
        gl.store(f, a)
        gl.store(f + BLOCK_N, b)
        gl.store(f + 2 * BLOCK_N, c)
        gl.store(k_out, k.to(gl.float16))
        gl.store(v_out, v.to(gl.float16))
    else:
        gl.store(k_out, gl.load(k_ptr + source + d[None, :], mask=ok, other=0.0))
        gl.store(v_out, v)


@dataclass(frozen=True)
class StagedKeys:
    """Keys and values as the forward kernel reads them, made by `stage_keys`.

    kv: float16 (bfloat16 without scales) [G * blocks * 128, D], a block's keys, then its values;
    factors: float32 [G * blocks * 4, 64], rows a, b, c of `attention_core` and one unused.
    """

    kv: Tensor
    factors: Tensor
    num_blocks: int
    codes: KeyValueCodes


def stage_keys(codes: KeyValueCodes, tiles: QueryTiles) -> StagedKeys:
    """Widen and line up the keys and values that `tiles` names, of a packed batch or of pages."""
    if codes.k.ndim == 4 and codes.k.shape[1] != BLOCK_KEYS:
        raise ValueError(f"pages of {BLOCK_KEYS} tokens expected, got k {list(codes.k.shape)}")
    groups, head_dim, num_blocks = codes.num_heads, codes.head_dim, len(tiles.key_blocks)
    dtype = torch.float16 if codes.scaled else torch.bfloat16
    rows = groups * num_blocks
    kv = codes.k.new_empty(rows * 2 * BLOCK_KEYS, head_dim, dtype=dtype)
    factors = codes.k.new_empty(rows * 4 if codes.scaled else 4, BLOCK_KEYS, dtype=torch.float32)
    k_scales, v_scales = (factors if s is None else s for s in (codes.k_scales, codes.v_scales))
    stage_keys_kernel[(rows,)](
        codes.k, codes.v, k_scales, v_scales, tiles.key_blocks, kv, factors, num_blocks,
        groups, head_dim, BLOCK_KEYS, codes.scaled, score_scale(head_dim, codes.scaled),
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return StagedKeys(kv, factors, num_blocks, codes)
