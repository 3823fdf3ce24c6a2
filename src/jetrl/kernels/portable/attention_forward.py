"""Integer attention with many queries per sequence: training forward and chunked prefill.

The bits are those of `attention.integer` for every query row. First, `stage_keys` copies keys and
values of a packed batch or of pages to blocks of 64 keys per head, values transposed for INT8
products, next to what all queries need of the scales. Then a program attends R queries of one head
to their keys, in blocks of 128: two consecutive staged blocks. Blocks that all its queries see need
no masks; at most the last two do.

Three choices make it fast and change no bits:

* Values are staged in an order of keys in which the weights are in the registers of their product
  already (`in_slots`).
* Finished splits keep A in global memory, since registers are full. Each thread stores and loads
  its own values (`_by_thread`).
* Factors of A that are powers of two are grouped and fused if nothing can be subnormal.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.attention.layout import BLOCK_KEYS as STAGED_KEYS
from jetrl.kernels.attention.layout import TILE_ROWS, KeyValueCodes, QueryTiles
from jetrl.kernels.portable.attention_core import (
    BLOCK_KEYS,
    SPLIT_KEYS,
    bad_state,
    ceiling,
    exponentials,
    fold,
    fold_weights,
    in_slots,
    planes,
    query_codes,
    rounded_sum,
    score_factor,
    weight_bits,
)
from jetrl.precision.triton.portable_int8 import int8_dot

# The planes of four neighbors. It saves a thread 97 of about 1,670 instructions per block of keys
# (D = 128, SASS of sm_90, Triton 3.7, 2026-11-29).
_PACK = tl.constexpr(
    "{ .reg .b32 a, b, c; prmt.b32 a, $2, $3, 0x5140; prmt.b32 b, $4, $5, 0x5140;"
    " prmt.b32 c, a, b, 0x5410; xor.b32 $1, c, 0x80808080; prmt.b32 $0, a, b, 0x7632; }"
)
_NAN_BITS = tl.constexpr(0x7FC00000)
# With r in this range, no product with r and a power of two is subnormal or overflows, so products
# may be grouped and fused without a change of bits.
_SMALLEST_EXACT, _LARGEST_EXACT = tl.constexpr(2.0**-26), tl.constexpr(2.0**96)


@triton.jit
def _larger_bits(a, b):
    return tl.maximum(a, b)


@triton.jit
def _key_of_slot(slot):
    """Return the key at a slot of the staged values, a permutation of each 16 keys."""
    # Slots 4 t to 4 t + 3 have keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9: what thread t of four holds
    # of 16 scores, and what it needs as four neighbors in the operand of INT8 products.
    return (slot // 16) * 16 + ((slot >> 1) & 1) * 8 + ((slot >> 2) & 3) * 2 + (slot & 1)


@triton.jit(do_not_specialize=["num_blocks"])
def _stage_kernel(
    k_ptr, v_ptr, ks_ptr, vs_ptr, blocks_ptr, k_out, v_out, scales_out, pairs_out, num_blocks,
    G: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Stage one block of 64 keys of one head, and the scales of the pair of blocks from it on.

    Args:
        k_ptr: int8 [rows, G, D], like v_ptr; scales are float32 [rows, G].
        blocks_ptr: int32 [num_blocks, 2], `QueryTiles.key_blocks`.
        k_out: and others: `StagedKeys`, written.
    """
    program = tl.program_id(0)
    group = program % G
    block = program // G
    out_block = group.to(tl.int64) * (num_blocks + 2) + block
    # The last two blocks are zeros.
    row0 = tl.load(blocks_ptr + block * 2, mask=block < num_blocks, other=0).to(tl.int64)
    valid = tl.load(blocks_ptr + block * 2 + 1, mask=block < num_blocks, other=0)
    n = tl.arange(0, KEYS)
    d = tl.arange(0, D)
    at = (row0 + n)[:, None] * (G * D) + group * D + d[None, :]
    out = out_block * (KEYS * D)
    k = tl.load(k_ptr + at, mask=(n < valid)[:, None], other=0)
    tl.store(k_out + out + n[:, None] * D + d[None, :], k)
    key = _key_of_slot(n)
    at = (row0 + key)[:, None] * (G * D) + group * D + d[None, :]
    v = tl.load(v_ptr + at, mask=(key < valid)[:, None], other=0)
    tl.store(v_out + out + d[None, :] * KEYS + n[:, None], v)
    k_scale = tl.load(ks_ptr + (row0 + n) * G + group, mask=n < valid, other=0.0)
    v_scale = tl.load(vs_ptr + (row0 + n) * G + group, mask=n < valid, other=0.0)
    scales = scales_out + out_block * (2 * KEYS) + n
    finite = bad_state(k_scale, v_scale) == 0.0
    tl.store(scales, tl.where(finite, k_scale, 0.0))
    tl.store(scales + KEYS, tl.where(finite, v_scale, 0.0))

    # The pair of this block and the next. It is used only if this block begins a block of 128 keys
    # of its sequence; keys past the end of a sequence are then hidden from all queries.
    n = tl.arange(0, 2 * KEYS)
    pair = block + n // KEYS
    staged = pair < num_blocks
    row = tl.load(blocks_ptr + pair * 2, mask=staged, other=0).to(tl.int64) + n % KEYS
    inside = n % KEYS < tl.load(blocks_ptr + pair * 2 + 1, mask=staged, other=0)
    k_scale = tl.load(ks_ptr + row * G + group, mask=inside, other=0.0)
    v_scale = tl.load(vs_ptr + row * G + group, mask=inside, other=0.0)
    # Scales are not negative: their bits have their order, and NaN is above all.
    finite = bad_state(k_scale, v_scale) == 0.0
    bits = tl.where(finite, v_scale.to(tl.int32, bitcast=True), _NAN_BITS)
    largest = tl.associative_scan(bits, 0, _larger_bits).to(tl.float32, bitcast=True)
    whole = tl.max(bits, axis=0).to(tl.float32, bitcast=True)
    pairs = pairs_out + out_block * (4 * KEYS) + n
    tl.store(pairs, largest)
    tl.store(pairs + 2 * KEYS, v_scale * tl.div_rn(1.0, whole))


@dataclass(frozen=True)
class StagedKeys:
    """Keys and values in the layout of the forward kernel, from `stage_keys`.

    N is the number of blocks plus 2; the last two are zeros, and hidden from all queries.

    Attributes:
        k: int8 [G, N, 64, D].
        v: int8 [G, N, D, 64], keys in the order of `_key_of_slot`.
        scales: float32 [G, N, 2, 64], of keys and of values.
        pairs: float32 [G, N, 2, 128], for a block of 128 keys that begins here: r_i of a query
            whose last visible key is j, and g_ij of queries that see all of them. r_i is NaN if a
            scale is not finite.
    """

    k: Tensor
    v: Tensor
    scales: Tensor
    pairs: Tensor


def stage_keys(codes: KeyValueCodes, tiles: QueryTiles) -> StagedKeys:
    """Return int8 codes [T, G, D] or [P, 64, G, D] in the blocks of `tiles`."""
    assert codes.k_scales is not None, "integer attention needs scales"
    assert codes.v_scales is not None
    assert (codes.k.dtype, codes.v.dtype) == (torch.int8, torch.int8), f"values {codes.v.dtype}"
    assert codes.k.ndim == 3 or codes.k.shape[1] == STAGED_KEYS, f"pages of {codes.k.shape[1]}"
    groups, head_dim, num_blocks = codes.num_heads, codes.head_dim, len(tiles.key_blocks)
    size = num_blocks + 2
    empty_codes = codes.k.new_empty
    empty_scales = codes.k_scales.new_empty
    staged = StagedKeys(
        k=empty_codes((groups, size, STAGED_KEYS, head_dim)),
        v=empty_codes((groups, size, head_dim, STAGED_KEYS)),
        scales=empty_scales((groups, size, 2, STAGED_KEYS)),
        pairs=empty_scales((groups, size, 2, BLOCK_KEYS)),
    )
    _stage_kernel[(groups * size,)](
        codes.k, codes.v, codes.k_scales, codes.v_scales, tiles.key_blocks,
        staged.k, staged.v, staged.scales, staged.pairs, num_blocks,
        groups, head_dim, STAGED_KEYS,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return staged


@triton.jit
def _place(j, stem_blocks, stem_block0, own_block0):
    """Return the staged block, int64, at which block j of 128 keys of a sequence begins."""
    start = tl.where(2 * j < stem_blocks, stem_block0, own_block0)
    return start.to(tl.int64) + 2 * j


@triton.jit
def _products(q, k_ptr, block, D: tl.constexpr, KEYS: tl.constexpr, STAGED: tl.constexpr):
    """Return S_ij of a block, int32 [R, KEYS]."""
    key = tl.arange(0, KEYS)
    d = tl.arange(0, D)
    k_ptr += block * (STAGED * D)
    k = tl.load(k_ptr + key[None, :] * D + d[:, None])
    return int8_dot(q, k)


@triton.jit
def _planes_in_slots(bits, ASM: tl.constexpr):
    """Return the planes hi and lo of `weight_bits` [R, K], int8 with keys in slots."""
    if ASM:
        return tl.inline_asm_elementwise(
            _PACK, "=r,=r,r,r,r,r", [in_slots(bits)],
            dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    return planes(in_slots(bits))


@triton.jit
def _add_block(
    s, a, N, L, A, B, v_ptr, scales_ptr, pairs_ptr, block, last_key,
    D: tl.constexpr, C: tl.constexpr, KEYS: tl.constexpr, STAGED: tl.constexpr,
    CUT: tl.constexpr, ASM: tl.constexpr, STACKED: tl.constexpr,
):  # fmt: skip
    """Return the state (N, L, A, B) of a split after one more block, from its S_ij.

    Queries see all its keys or, if CUT, those up to `last_key` [R], if that is not negative.
    """
    # Scores, and the scales of values.
    key = tl.arange(0, KEYS)
    at = key // STAGED * (2 * STAGED)
    at += key % STAGED
    scales = scales_ptr + block * (2 * STAGED) + at
    pairs = pairs_ptr + block * (2 * KEYS)
    y = s.to(tl.float32) * tl.load(scales)[None, :]
    if CUT:
        sees = last_key >= 0
        y = tl.where(key[None, :] <= last_key[:, None], y, float("-inf"))
        r = tl.load(pairs + tl.minimum(last_key, KEYS - 1), mask=sees, other=1.0)
        # The e of a hidden key is so small that d is 0, if g is limited: it may have any scale.
        g = tl.load(scales + STAGED)[None, :] * tl.div_rn(1.0, r)[:, None]
        g = tl.minimum(g, 2.0)
    else:
        r = tl.load(pairs + KEYS - 1)
        g = tl.load(pairs + KEYS + key)[None, :]

    # The block's own n, and its sums.
    n = ceiling(tl.max(y, axis=1) * a)
    e = exponentials(y, a, n)
    mass = rounded_sum(e).to(tl.float32)
    bad = bad_state(n, r)
    if CUT:
        # A block without visible keys: with n = -Inf and sums of 0 it changes nothing.
        n = tl.where(sees, n, float("-inf"))
        bad = tl.where(sees, bad, 0.0)
    hi, lo = _planes_in_slots(weight_bits(e, g), ASM)
    N, z, z_block = fold_weights(N, n)
    L = (L * z) + ((mass + bad) * z_block)
    values = v_ptr + block * (STAGED * D)
    A = _add_values(A, hi, lo, r, z, z_block, values, D, C, KEYS, STAGED, CUT, STACKED)
    if C < D:
        values += C * STAGED
        B = _add_values(B, hi, lo, r, z, z_block, values, D, C, KEYS, STAGED, CUT, STACKED)
    return N, L, A, B


@triton.jit
def _add_values(
    A, hi, lo, r, z, z_block, values,
    D: tl.constexpr, C: tl.constexpr, KEYS: tl.constexpr, STAGED: tl.constexpr, CUT: tl.constexpr,
    STACKED: tl.constexpr,
):  # fmt: skip
    """Return C channels of A after one more block of values, from the planes of their weights."""
    key = tl.arange(0, KEYS)
    d = tl.arange(0, C)
    at = key // STAGED * (STAGED * D)
    at += key % STAGED
    values += at[:, None]
    v = tl.load(values + d[None, :] * STAGED)
    if STACKED:
        # One product, so one wait: Triton waits for each product of INT8 by wgmma.
        both = tl.permute(tl.join(hi, lo), (2, 0, 1))
        both = tl.reshape(both, (2 * hi.shape[0], KEYS))
        sums = tl.reshape(int8_dot(both, v), (2, hi.shape[0], C))
        high, low = tl.split(tl.permute(sums, (1, 2, 0)))
        total = (high * 256 + low).to(tl.float32)
    else:
        products = int8_dot(hi, v) * 256
        total = int8_dot(lo, v, products).to(tl.float32)
    if CUT:
        A = (A * z[:, None]) + ((total * r[:, None]) * z_block[:, None])
    elif (r >= _SMALLEST_EXACT) & (r <= _LARGEST_EXACT):
        # One of z and z_block is 1.
        A = tl.fma(A, z[:, None], total * (z_block * r)[:, None])
    else:
        A = (A * z[:, None]) + ((total * r) * z_block[:, None])
    return A


@triton.jit
def _by_thread(A):
    """Return A [R, C] as [., ., 4], in the order of registers, threads, and registers again.

    If a thread holds A like a product of the tensor core, with four warps along rows, stores and
    loads of this form move no values between threads.
    """
    parts = tl.reshape(A, (A.shape[0] // 16, 2, 8, A.shape[1] // 8, 4, 2))
    parts = tl.permute(parts, (3, 0, 2, 4, 1, 5))
    return tl.reshape(parts, (A.shape[1] // 8, A.shape[0] * 2, 4))


@triton.jit
def _from_threads(A, R: tl.constexpr, C: tl.constexpr):
    """Return A [R, C], the inverse of `_by_thread`."""
    parts = tl.reshape(A, (C // 8, R // 16, 8, 4, 2, 2))
    return tl.reshape(tl.permute(parts, (1, 4, 2, 0, 3, 5)), (R, C))


@triton.jit
def _empty_state(R: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """Return N, L, A and B of no blocks."""
    L = tl.zeros([R], tl.float32)
    N = L - float("inf")
    A = tl.zeros([R, C], tl.float32)
    if C < D:
        return N, L, A, A
    else:
        return N, L, A, L


@triton.jit
def _scratch(scratch_ptr, R: tl.constexpr, C: tl.constexpr):
    """Return pointers to C channels of the finished splits in the form of `_by_thread`."""
    group = tl.arange(0, C // 8)[:, None, None]
    thread = tl.arange(0, 2 * R)[None, :, None]
    register = tl.arange(0, 4)[None, None, :]
    at = group * (8 * R) + thread * 4 + register
    return scratch_ptr + at


@triton.jit
def _with_finished(
    scratch_ptr, N0, L0, N, L, A, B, R: tl.constexpr, D: tl.constexpr, C: tl.constexpr
):
    """Return the fold of the finished splits, N0, L0 and channels in memory, and a split."""
    A0 = _from_threads(tl.load(_scratch(scratch_ptr, R, C)), R, C)
    N1, L1, A = fold(N0, L0, A0, N, L, A)
    if C < D:
        B0 = _from_threads(tl.load(_scratch(scratch_ptr + R * C, R, C)), R, C)
        N1, L1, B = fold(N0, L0, B0, N, L, B)
    return N1, L1, A, B


@triton.jit
def _finish_split(
    scratch_ptr, first, N0, L0, N, L, A, B, R: tl.constexpr, D: tl.constexpr, C: tl.constexpr
):
    """Fold a split into the finished ones: N0, L0 and channels in memory. Return N0 and L0.

    It needs no barrier, which would keep the loop around it from being pipelined: loads and stores
    have one form, so each thread loads what it has stored.
    """
    if not first:
        N, L, A, B = _with_finished(scratch_ptr, N0, L0, N, L, A, B, R, D, C)
    tl.store(_scratch(scratch_ptr, R, C), _by_thread(A))
    if C < D:
        tl.store(_scratch(scratch_ptr + R * C, R, C), _by_thread(B))
    return N, L


@triton.jit(do_not_specialize=["num_blocks", "num_queries"])
def _attend_kernel(
    q_ptr, codes_ptr, k_ptr, v_ptr, scales_ptr, pairs_ptr, tiles_ptr,
    out_ptr, statistics_ptr, scratch_ptr, num_blocks, num_queries,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr,
    C: tl.constexpr, KEYS: tl.constexpr, STAGED: tl.constexpr, SPLIT: tl.constexpr,
    FACTOR: tl.constexpr, ASM: tl.constexpr, STACKED: tl.constexpr,
):  # fmt: skip
    """Attend R queries of one head: a part of a tile, if the tile has that many rows.

    Args:
        q_ptr: bfloat16 [T, H, D], rotated; its codes are written to codes_ptr.
        k_ptr: and the next three: `StagedKeys`.
        tiles_ptr: int32 [n, 6], `QueryTiles.tiles`, of up to R * PARTS rows.
        out_ptr: bfloat16 [T, H, D], written.
        statistics_ptr: float32 [2, T, H], N and L, written.
        scratch_ptr: float32 [programs, R, D], A of finished splits, if a context has several.
        C: channels per product with values, D or D / 2.
        SPLIT: blocks per split.
    """
    # Heads are the fastest index, so that concurrent programs share keys in L2, then the parts of
    # a tile, the last one first: it has the most keys.
    program = tl.program_id(0)
    head = program % H
    item = program // H
    tile = tiles_ptr + item // PARTS * 6
    skip = (PARTS - 1 - item % PARTS) * R
    rows_left = tl.load(tile + 1) - skip
    if rows_left <= 0:
        return
    first = tl.load(tile + 2) + skip  # position of the first query
    own_block0 = tl.load(tile + 3)
    stem_blocks = tl.load(tile + 4)
    stem_block0 = tl.load(tile + 5)
    group_block0 = (head // GROUP).to(tl.int64) * (num_blocks + 2)
    k_ptr += group_block0 * (STAGED * D)
    v_ptr += group_block0 * (STAGED * D)
    scales_ptr += group_block0 * (2 * STAGED)
    pairs_ptr += group_block0 * (2 * KEYS)
    scratch_ptr += program.to(tl.int64) * (R * D)

    i = tl.arange(0, R)
    row = tl.load(tile).to(tl.int64)
    row += skip + i
    d = tl.arange(0, D)
    at = row[:, None] * (H * D)
    at += head * D + d[None, :]
    inside = i < rows_left
    q, q_scale = query_codes(tl.load(q_ptr + at, mask=inside[:, None], other=0.0))
    a = q_scale * FACTOR
    # Codes go through memory, so that products read them from shared memory, not from registers.
    tl.store(codes_ptr + at, q, mask=inside[:, None])
    tl.debug_barrier()
    q = tl.load(codes_ptr + at, mask=inside[:, None], other=0)

    # N0 and L0 are of the finished splits; N, L, A and B are of the current split. A has the
    # first C channels, B has others.
    N, L, A, B = _empty_state(R, D, C)
    N0, L0 = N, L
    whole_blocks = (first + 1) // KEYS
    keys = first + tl.minimum(rows_left, R)
    all_blocks = tl.cdiv(keys, KEYS)
    for j in range(0, whole_blocks):
        if (j % SPLIT == 0) & (j > 0):
            N0, L0 = _finish_split(scratch_ptr, j == SPLIT, N0, L0, N, L, A, B, R, D, C)
            N, L, A, B = _empty_state(R, D, C)
        block = _place(j, stem_blocks, stem_block0, own_block0)
        s = _products(q, k_ptr, block, D, KEYS, STAGED)
        N, L, A, B = _add_block(
            s, a, N, L, A, B, v_ptr, scales_ptr, pairs_ptr, block, 0,
            D, C, KEYS, STAGED, False, ASM, STACKED,
        )  # fmt: skip
    for j in tl.range(whole_blocks, all_blocks, num_stages=1):
        if (j % SPLIT == 0) & (j > 0):
            N0, L0 = _finish_split(scratch_ptr, j == SPLIT, N0, L0, N, L, A, B, R, D, C)
            N, L, A, B = _empty_state(R, D, C)
        block = _place(j, stem_blocks, stem_block0, own_block0)
        s = _products(q, k_ptr, block, D, KEYS, STAGED)
        last_key = first + i - j * KEYS
        N, L, A, B = _add_block(
            s, a, N, L, A, B, v_ptr, scales_ptr, pairs_ptr, block, last_key,
            D, C, KEYS, STAGED, True, ASM, STACKED,
        )  # fmt: skip
    if all_blocks > SPLIT:
        N, L, A, B = _with_finished(scratch_ptr, N0, L0, N, L, A, B, R, D, C)

    inverse = tl.div_rn(1.0, L)[:, None]
    out = out_ptr + row[:, None] * (H * D)
    out += head * D + tl.arange(0, C)[None, :]
    tl.store(out, (A * inverse).to(tl.bfloat16), mask=inside[:, None])
    if C < D:
        tl.store(out + C, (B * inverse).to(tl.bfloat16), mask=inside[:, None])
    statistics = statistics_ptr + row * H + head
    tl.store(statistics, N, mask=inside)
    tl.store(statistics + num_queries.to(tl.int64) * H, L, mask=inside)


def attend_batch(q: Tensor, codes: KeyValueCodes, tiles: QueryTiles) -> tuple[Tensor, Tensor]:
    """Return causal attention of a packed batch, and what its backward needs.

    Args:
        q: bfloat16 [T, H, D], rotated, D 64 or 128; it is quantized here.
        codes: int8 with float32 scales, [T, G, D]; stems are stored once.

    Returns:
        out, bfloat16 [T, H, D], and the statistics N and L, float32 [2, T, H].
    """
    return attend_staged(q, stage_keys(codes, tiles), tiles)


def attend_prefill(
    q: Tensor, pages: KeyValueCodes, tiles: QueryTiles, split_keys: int = SPLIT_KEYS
) -> Tensor:
    """Return attention of prefill chunks q, bfloat16 [T, H, D], over pages [P, 64, G, D].

    The pages must already contain the keys and values of the chunks.
    """
    assert split_keys == SPLIT_KEYS, f"splits of {split_keys} keys"
    return attend_staged(q, stage_keys(pages, tiles), tiles)[0]


@dataclass(frozen=True)
class Config:
    """Sizes that change no bits.

    Attributes:
        rows: queries per program, 16 per warp; or 8, if products are of BF16.
        channels: maximum per product with values.
        stacked: whether both planes of the weights are one product with values.
    """

    rows: int = 64
    channels: int = 64  # with more, mma.sync gives each warp all rows, and data moves
    warps: int = 4
    stages: int = 2  # 42 KB of shared memory for heads of 128
    registers: int | None = None
    stacked: bool = False


_DEFAULT = Config()
# Two programs per SM: the fastest that was timed on an H200 (docs/kernels.md).
_HOPPER = Config(stages=3, stacked=True)
# Four warps spill: 720 bytes (D = 128, sm_103, Triton 3.7, 2026-11-30).
_PIECES = Config(warps=8, stages=1)
_BY_CAPABILITY = {(9, 0): _HOPPER, (10, 3): _PIECES}


def config_of(device: torch.device) -> Config:
    """Return the sizes for a GPU; on a CPU (Triton's interpreter) any will do."""
    if device.type != "cuda":
        return _DEFAULT
    return _BY_CAPABILITY.get(torch.cuda.get_device_capability(device), _DEFAULT)


def attend_staged(
    q: Tensor, staged: StagedKeys, tiles: QueryTiles, config: Config | None = None
) -> tuple[Tensor, Tensor]:
    """Return `attend_batch` of keys that are staged already."""
    num_queries, heads, head_dim = q.shape
    groups, num_blocks = staged.k.shape[:2]
    assert (q.dtype, q.is_contiguous()) == (torch.bfloat16, True), f"queries of {q.dtype}"
    assert num_queries == tiles.num_queries, f"{num_queries} queries, tiles for other lengths"
    assert (heads % groups, head_dim) == (0, staged.k.shape[-1]), f"{heads} heads of {head_dim}"
    assert head_dim in (64, 128), f"heads of {head_dim}"
    config = config or config_of(q.device)
    assert config.rows in (8 * config.warps, 16 * config.warps), f"{config}"
    parts = triton.cdiv(TILE_ROWS, config.rows)
    programs = heads * parts * len(tiles.tiles)
    out = torch.empty_like(q)
    statistics = q.new_empty(2, num_queries, heads, dtype=torch.float32)
    # A kernel cannot take None: without scratch, pass a placeholder.
    scratch = statistics
    if tiles.longest > SPLIT_KEYS:
        scratch = q.new_empty(programs, config.rows, head_dim, dtype=torch.float32)
    _attend_kernel[(programs,)](
        q, torch.empty_like(q, dtype=torch.int8), staged.k, staged.v, staged.scales, staged.pairs,
        tiles.tiles, out, statistics, scratch, num_blocks - 2, num_queries,
        heads, heads // groups, head_dim, config.rows, parts, min(head_dim, config.channels),
        BLOCK_KEYS, STAGED_KEYS, SPLIT_KEYS // BLOCK_KEYS, score_factor(head_dim),
        q.device.type == "cuda", config.stacked,
        num_warps=config.warps, num_stages=config.stages, maxnreg=config.registers,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out, statistics
