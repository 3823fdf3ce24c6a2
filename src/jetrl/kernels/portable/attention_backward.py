"""The backward of integer attention, with the bits of `attention.integer` (section Backward).

Names are those of the definition. After the copies of `attention_copies`, in the order of a call:

* `_dq_kernel`: a block of M queries of a head adds blocks of 128 keys in order.
* `_dk_dv_kernel`: a block of K keys of a query head, in one sequence, adds blocks of 64 queries in
  order. It runs twice, for dK and for dV: both sums do not fit the registers.
* `_sums_kernel` adds the heads of a group in order, then the sequences that share keys in order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.attention.backward_lists import (
    BACKWARD_KEYS,
    BACKWARD_QUERIES,
    INTEGER_SUMS_BYTES,
)
from jetrl.kernels.attention.layout import KeyValueCodes, QueryTiles
from jetrl.kernels.portable.attention_copies import (
    code_bits,
    code_planes,
    copies,
    largest_of_rows,
    multiplier_and_scale,
)
from jetrl.kernels.portable.attention_core import exponentials, in_slots
from jetrl.precision.triton.portable_int8 import BY_BF16, int8_dot

_SUMS_ROWS = 16  # keys per program of _sums_kernel


class _Tile(NamedTuple):
    """Rows of a program's block, and how it is compiled; they change no bits.

    Attributes:
        stages: blocks of the inner loop in shared memory.
        registers: maximum per thread; None: as many as the program needs.
    """

    rows: int
    warps: int
    stages: int
    registers: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The options of a launch."""
        launch: dict[str, Any] = dict(_EXACT)
        launch["num_warps"] = self.warps
        launch["num_stages"] = self.stages
        launch["maxnreg"] = self.registers
        return launch


_EXACT = {"enable_fp_fusion": False}
# Tiles of dQ, dK and dV by compute capability.
_HOPPER = (_Tile(128, 8, 3), _Tile(128, 8, 3), _Tile(64, 4, 3))
_OTHERS = (_Tile(128, 8, 1), _Tile(128, 8, 2), _Tile(128, 8, 2))
_PIECES = (_Tile(64, 8, 1), _Tile(64, 8, 2), _Tile(64, 8, 2))
_TILES = {90: _HOPPER, 103: _PIECES}

_KEYS = tl.constexpr(BACKWARD_KEYS)
_QUERIES = tl.constexpr(BACKWARD_QUERIES)


@triton.jit
def _across(ptr, first, COUNT: tl.constexpr, D: tl.constexpr):
    """Return the addresses of COUNT rows from place `first` on, transposed: [D, COUNT]."""
    row = tl.arange(0, COUNT)
    column = tl.arange(0, D)
    ptr += first * D
    rows = ptr + row[None, :] * D
    return rows + column[:, None]


@triton.jit
def _down(ptr, first, places, COUNT: tl.constexpr, D: tl.constexpr):
    """Return the addresses of COUNT tokens by columns, from place `first` on: [COUNT, D]."""
    slot = tl.arange(0, COUNT)
    column = tl.arange(0, D)
    ptr += first
    columns = ptr + column[None, :] * places
    return columns + slot[:, None]


@triton.jit
def _scaled_ds(
    own, keys_ptr, scales_ptr, places, key,
    N: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return fl(ds * sk), float32 [M, N], of queries and the N keys from place `key` on."""
    q, do_high, do_low, a, n, g, delta, query = own
    number = key + tl.arange(0, N)
    scales_ptr += number
    k_scale = tl.load(scales_ptr)[None, :]
    scales_ptr += places
    v_scale = tl.load(scales_ptr)[None, :]
    at = _across(keys_ptr, key, N, D)
    k = tl.load(at)
    at += places * D
    v = tl.load(at)
    scores = int8_dot(q, k)
    y = scores.to(tl.float32) * k_scale
    e = exponentials(y, a, n)
    w = e * g[:, None]
    t = int8_dot(do_high, v)
    t = t << 8
    t = int8_dot(do_low, v, t)
    t = t.to(tl.float32)
    z = tl.fma(t, v_scale, -delta[:, None])
    ds = w * z
    x = ds * k_scale
    if MASKED:
        visible = number[None, :] <= query[:, None]
        x = tl.where(visible, x, 0.0)
    return x


@triton.jit
def _dq_step(
    dq, own, keys_ptr, scales_ptr, places, key, D: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Return dQ, [M, D], with the block of keys from place `key` on added."""
    # The scores of all keys would not fit the registers: they are in two halves.
    N: tl.constexpr = _KEYS // 2
    x = _scaled_ds(own, keys_ptr, scales_ptr, places, key, N, D, MASKED)
    y = _scaled_ds(own, keys_ptr, scales_ptr, places, key + N, N, D, MASKED)
    largest = tl.maximum(tl.abs(x), tl.abs(y), propagate_nan=tl.PropagateNan.ALL)
    largest = largest_of_rows(largest)
    multiplier, scale = multiplier_and_scale(largest)
    x = in_slots(code_bits(x, multiplier))
    high, low = code_planes(x)
    y = in_slots(code_bits(y, multiplier))
    next_high, next_low = code_planes(y)
    keys_ptr += 2 * places * D
    at = _down(keys_ptr, key, places, N, D)
    k = tl.load(at)
    at += N
    next_k = tl.load(at)
    total = int8_dot(high, k)
    total = int8_dot(next_high, next_k, total)
    total = total << 8
    total = int8_dot(low, k, total)
    total = int8_dot(next_low, next_k, total)
    total = total.to(tl.float32)
    return tl.fma(total, scale[:, None], dq)


@triton.jit
def _key_place(i, num_stem, stem, run):
    """Return the place of key i of those that a block of queries sees."""
    return tl.multiple_of(tl.where(i < num_stem, stem + i, run + i - num_stem), _KEYS)


@triton.jit
def _dq_kernel(
    codes_ptr, floats_ptr, keys_ptr, scales_ptr, dq_ptr, blocks_ptr, places, factor,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Write dQ, bfloat16 [T, H, D], of a block of M queries of a head.

    Args:
        codes_ptr: copies of `_queries_kernel`, like floats_ptr; the next two are of `_keys_kernel`.
        blocks_ptr: int32 [n, 6], `query_blocks` of the lists.
        factor: 1 / sqrt(D).
    """
    # Heads are the fastest index of programs; blocks of queries are sorted longest first.
    H: tl.constexpr = G * GROUP
    PARTS: tl.constexpr = _KEYS // M
    program = tl.program_id(0)
    head = program % H
    part = program // H
    first = part % PARTS * M
    blocks_ptr += part // PARTS * 6
    place = tl.load(blocks_ptr)
    row = tl.load(blocks_ptr + 1) + first
    end = tl.load(blocks_ptr + 2)
    if row >= end:
        return
    run = tl.load(blocks_ptr + 3)
    stem = tl.load(blocks_ptr + 4)
    num_stem = tl.load(blocks_ptr + 5)
    within = first + tl.arange(0, M)
    query = tl.multiple_of(place, _KEYS) + within
    column = tl.arange(0, D)
    size = places * D
    codes_ptr += head.to(tl.int64) * 6 * size
    at = codes_ptr + query[:, None] * D
    at = at + column[None, :]
    q = tl.load(at)
    at += size
    do_high = tl.load(at)
    at += size
    do_low = tl.load(at)
    floats_ptr += head.to(tl.int64) * 5 * places
    floats_ptr += query
    a = tl.load(floats_ptr)
    floats_ptr += places
    n = tl.load(floats_ptr)
    floats_ptr += places
    g = tl.load(floats_ptr)
    floats_ptr += places
    delta = tl.load(floats_ptr)
    own = (q, do_high, do_low, a, n, g, delta, query)
    group = (head // GROUP).to(tl.int64)
    keys_ptr += group * 3 * size
    scales_ptr += group * 2 * places
    dq = tl.zeros([M, D], tl.float32)
    # The keys of the stem, then those of the run before the queries, then those next to them.
    before = num_stem + place - run
    for masked in tl.static_range(2):
        start = before * masked
        stop = before + _KEYS * masked
        if BY_BF16:  # Triton would keep the products of all of a `for` in tensor memory at once
            i = start
            while i < stop:
                key = _key_place(i, num_stem, stem, run)
                dq = _dq_step(dq, own, keys_ptr, scales_ptr, places, key, D, masked)
                i += _KEYS
        else:
            for i in range(start, stop, _KEYS):
                key = _key_place(i, num_stem, stem, run)
                dq = _dq_step(dq, own, keys_ptr, scales_ptr, places, key, D, masked)
    row += tl.arange(0, M)
    line = row.to(tl.int64) * H
    line += head
    dq_ptr += line[:, None] * D
    dq_ptr = dq_ptr + column[None, :]
    inside = row < end
    dq = dq * factor
    tl.store(dq_ptr, dq.to(tl.bfloat16), mask=inside[:, None])


@triton.jit
def _planes_of_rows(x):
    """Return hi and lo of the rows of x, int8 in slots, and scales."""
    largest = largest_of_rows(x)
    multiplier, scale = multiplier_and_scale(largest)
    bits = in_slots(code_bits(x, multiplier))
    high, low = code_planes(bits)
    return high, low, scale


@triton.jit
def _visible(x, key, query, MASKED: tl.constexpr):
    """Return x [K, 64], 0 at hidden keys."""
    if MASKED:
        visible = key[:, None] <= query[None, :]
        x = tl.where(visible, x, 0.0)
    return x


@triton.jit
def _dk_products(
    w, v, v_scale, key, codes_ptr, floats_ptr, places, query,
    D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the products B q, int32 [K, D], and their scales."""
    size = places * D
    at = _across(codes_ptr + size, query, _QUERIES, D)
    do_high = tl.load(at)
    at += size
    do_low = tl.load(at)
    number = query + tl.arange(0, _QUERIES)
    floats_ptr += number
    floats_ptr += 3 * places
    delta = tl.load(floats_ptr)
    floats_ptr += places
    q_scale = tl.load(floats_ptr)
    t = int8_dot(v, do_high)
    t = t << 8
    t = int8_dot(v, do_low, t)
    t = t.to(tl.float32)
    z = tl.fma(t, v_scale[:, None], -delta[None, :])
    ds = w * z
    x = ds * q_scale[None, :]
    x = _visible(x, key, number, MASKED)
    high, low, scale = _planes_of_rows(x)
    codes_ptr += 3 * size
    q = tl.load(_down(codes_ptr, query, places, _QUERIES, D))
    total = int8_dot(high, q)
    total = total << 8
    total = int8_dot(low, q, total)
    return total, scale


@triton.jit
def _dv_products(
    w, key, codes_ptr, places, query, D: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Return M, int32 [K, D], and its scales."""
    number = query + tl.arange(0, _QUERIES)
    w = _visible(w, key, number, MASKED)
    high, low, scale = _planes_of_rows(w)
    size = places * D
    at = _down(codes_ptr, query, places, _QUERIES, D)
    at += 4 * size
    do_high = tl.load(at)
    at += size
    do_low = tl.load(at)
    total = int8_dot(high, do_high)
    total = total << 8
    total = int8_dot(high, do_low, total)
    total = int8_dot(low, do_high, total)
    return total, scale * 256.0


@triton.jit
def _key_step(
    total, stored, codes_ptr, floats_ptr, places, query,
    OF_VALUES: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return dK or dV, [K, D], with the queries from place `query` on added."""
    k, k_scale, v, v_scale, key = stored
    q = tl.load(_across(codes_ptr, query, _QUERIES, D))
    at = floats_ptr + query
    at = at + tl.arange(0, _QUERIES)
    a = tl.load(at)
    at += places
    n = tl.load(at)
    at += places
    g = tl.load(at)
    scores = int8_dot(k, q)
    y = scores.to(tl.float32) * k_scale[:, None]
    e = exponentials(y, a[None, :], n[None, :])
    w = e * g[None, :]
    if OF_VALUES:
        products, scale = _dv_products(w, key, codes_ptr, places, query, D, MASKED)
    else:
        products, scale = _dk_products(
            w, v, v_scale, key, codes_ptr, floats_ptr, places, query, D, MASKED
        )
    products = products.to(tl.float32)
    return tl.fma(products, scale[:, None], total)


@triton.jit(do_not_specialize=["first_head", "num_heads"])
def _dk_dv_kernel(
    codes_ptr, floats_ptr, keys_ptr, scales_ptr, sums_ptr, blocks_ptr,
    places, first_head, num_heads,
    OF_VALUES: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """Write the sums of dK, or of dV if OF_VALUES, of K keys of a query head in one sequence.

    Args:
        codes_ptr: copies of `_queries_kernel`, like floats_ptr; the next two are of `_keys_kernel`.
        sums_ptr: float32 [num_sums, num_heads, 2, 128, D], written: dK, then dV.
        blocks_ptr: int32 [num_sums, 5], `key_blocks` of the lists.
        first_head: the query head that is the first of `num_heads`.
    """
    PARTS: tl.constexpr = _KEYS // K
    program = tl.program_id(0)
    head_here = program % num_heads
    part = program // num_heads
    head = (first_head + head_here).to(tl.int64)
    first = part % PARTS * K
    blocks_ptr += part // PARTS * 5
    # The part has own queries from its own first key on.
    place = tl.load(blocks_ptr) + first
    place = tl.multiple_of(place, K)
    own = tl.load(blocks_ptr + 1) - first // _QUERIES
    own = tl.maximum(own, 0)
    branch = tl.load(blocks_ptr + 2)
    branch = tl.multiple_of(branch, _KEYS)
    blocks = own + tl.load(blocks_ptr + 3)
    index = tl.load(blocks_ptr + 4).to(tl.int64)
    within = tl.arange(0, K)
    column = tl.arange(0, D)
    key = place + within
    size = places * D
    group = head // GROUP
    keys_ptr += group * 3 * size
    at = keys_ptr + key[:, None] * D
    at = at + column[None, :]
    k = tl.load(at)
    at += size
    v = tl.load(at)
    scales_ptr += group * 2 * places
    scales_ptr += key
    k_scale = tl.load(scales_ptr)
    scales_ptr += places
    v_scale = tl.load(scales_ptr)
    stored = (k, k_scale, v, v_scale, key)
    codes_ptr += head * 6 * size
    floats_ptr += head * 5 * places
    total = tl.zeros([K, D], tl.float32)
    # Queries next to the keys see some of them; later ones and those of a branch see all.
    diagonal = tl.minimum(own, K // _QUERIES)
    for seen in tl.static_range(2):
        start = diagonal * seen
        stop = diagonal + (blocks - diagonal) * seen
        for i in range(start, stop):
            later = place + i * _QUERIES
            query = tl.where(i < own, later, branch + (i - own) * _QUERIES)
            query = tl.multiple_of(query, _QUERIES)
            total = _key_step(
                total, stored, codes_ptr, floats_ptr, places, query, OF_VALUES, D, 1 - seen
            )
    index = index * num_heads
    index = (index + head_here) * 2
    if OF_VALUES:
        index += 1
    row = index * _KEYS + first
    row = row + within
    sums_ptr += row[:, None] * D
    sums_ptr = sums_ptr + column[None, :]
    tl.store(sums_ptr, total)


@triton.jit(do_not_specialize=["first_group", "num_groups"])
def _sums_kernel(
    sums_ptr, dk_ptr, dv_ptr, blocks_ptr, factor, first_group, num_groups,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write dK and dV, bfloat16 [T, G, D], of ROWS keys of a head.

    Args:
        sums_ptr: float32 [num_sums, num_groups * GROUP, 2, 128, D], dK before dV.
        blocks_ptr: int32 [n, 4], `blocks` of the lists.
        factor: 1 / sqrt(D).
    """
    SIZE: tl.constexpr = _KEYS * D
    program = tl.program_id(0)
    group_here = program % num_groups
    block = program // num_groups
    place = tl.program_id(1) * ROWS
    place = place + tl.arange(0, ROWS)
    column = tl.arange(0, D)[None, :]
    blocks_ptr += block * 4
    row = tl.load(blocks_ptr) + place
    end = tl.load(blocks_ptr + 1)
    index = tl.load(blocks_ptr + 2).to(tl.int64)
    sequences = tl.load(blocks_ptr + 3)
    index = index * num_groups
    index = (index + group_here) * GROUP
    sums_ptr += index * 2 * SIZE
    sums_ptr += place[:, None] * D
    sums_ptr = sums_ptr + column
    dk = tl.zeros([ROWS, D], tl.float32)
    dv = tl.zeros([ROWS, D], tl.float32)
    for _ in range(0, sequences):
        own_dk = tl.zeros([ROWS, D], tl.float32)
        own_dv = tl.zeros([ROWS, D], tl.float32)
        at = sums_ptr
        for _head in range(0, GROUP):
            own_dk += tl.load(at)
            at += SIZE
            own_dv += tl.load(at)
            at += SIZE
        dk += own_dk
        dv += own_dv
        sums_ptr += tl.cast(num_groups, tl.int64) * (2 * GROUP * SIZE)
    line = row.to(tl.int64) * G
    line += first_group + group_here
    at = line[:, None] * D
    at = at + column
    inside = row < end
    inside = inside[:, None]
    dk = dk * factor
    tl.store(dk_ptr + at, dk.to(tl.bfloat16), mask=inside)
    tl.store(dv_ptr + at, dv.to(tl.bfloat16), mask=inside)


def attention_backward(
    do: Tensor, q: Tensor, codes: KeyValueCodes, o: Tensor, statistics: Tensor, tiles: QueryTiles
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dQ [T, H, D], dK and dV [T, G, D], bfloat16, of integer attention.

    Args:
        do: bfloat16 [T, H, D], contiguous, gradient of the output o.
        q: bfloat16 [T, H, D], rotated.
        codes: INT8 keys and values [T, G, D] of the forward.
        statistics: float32 [2, T, H], N and L of the forward.
    """
    tokens, heads, head_dim = q.shape
    groups = codes.num_heads
    group, rest = divmod(heads, groups)
    assert rest == 0, f"{heads} query heads of {groups} groups"
    assert head_dim in (32, 64, 128, 256), f"heads of {head_dim}"
    assert codes.k.shape == (tokens, groups, head_dim), f"keys {codes.k.shape}"
    assert codes.k.dtype == codes.v.dtype == torch.int8, f"keys in {codes.k.dtype}"
    for x in (do, q, o):
        assert x.dtype == torch.bfloat16, f"{x.dtype}"
        assert x.shape == q.shape, f"{x.shape}"
        assert x.is_contiguous()
    assert statistics.dtype == torch.float32, f"{statistics.dtype}"
    assert statistics.shape == (2, tokens, heads), f"{statistics.shape}"
    assert statistics.is_contiguous()
    lists = tiles.padded
    assert lists.num_places >= tokens, "paged attention has no backward"
    dq = torch.empty_like(q)
    dk = q.new_empty(codes.k.shape)
    dv = q.new_empty(codes.k.shape)
    if tokens == 0:
        return dq, dk, dv
    made = copies(do, q, codes, o, statistics, lists)
    places = lists.num_places
    factor = 1.0 / math.sqrt(head_dim)
    of_dq, of_dk, of_dv = _tiles_of(q.device)
    parts = BACKWARD_KEYS // of_dq.rows
    programs = len(lists.query_blocks) * parts * heads
    _dq_kernel[(programs,)](
        made.codes, made.floats, made.keys, made.scales, dq, lists.query_blocks, places, factor,
        groups, group, head_dim, of_dq.rows,
        **of_dq.options,
    )  # fmt: skip
    # The sums of all heads at once, or of as many groups as fit; each round overwrites them.
    of_group = lists.num_sums * group * 2 * BACKWARD_KEYS * head_dim
    fit = max(1, INTEGER_SUMS_BYTES // (of_group * 4))
    at_once = min(groups, fit)
    sums = statistics.new_empty(at_once * of_group)
    for first in range(0, groups, at_once):
        here = min(at_once, groups - first)
        for of_values, tile in ((False, of_dk), (True, of_dv)):
            parts = BACKWARD_KEYS // tile.rows
            programs = lists.num_sums * parts * here * group
            _dk_dv_kernel[(programs,)](
                made.codes, made.floats, made.keys, made.scales, sums, lists.key_blocks,
                places, first * group, here * group, of_values, groups, group, head_dim, tile.rows,
                **tile.options,
            )  # fmt: skip
        programs = len(lists.blocks) * here
        _sums_kernel[(programs, BACKWARD_KEYS // _SUMS_ROWS)](
            sums, dk, dv, lists.blocks, factor, first, here, groups, group, head_dim, _SUMS_ROWS,
            num_warps=4, **_EXACT,
        )  # fmt: skip
    return dq, dk, dv


def _tiles_of(device: torch.device) -> tuple[_Tile, _Tile, _Tile]:
    """Return the tiles of dQ, dK and dV for a GPU, or for the interpreter on a CPU."""
    if device.type == "cpu":
        return _OTHERS
    major, minor = torch.cuda.get_device_capability(device)
    return _TILES.get(10 * major + minor, _OTHERS)
