"""Copies of the operands of the backward of integer attention, for `attention_backward`.

INT8 products of Hopper need both operands with consecutive numbers along the sum. So each operand
of a sum over tokens is written twice: by rows, for sums over D, and by columns. The layout is that
of `attention.padded_lists`: heads first, and runs begin at multiples of 128 places. Padding has
codes and scales 0, so it needs no mask in dK and dV.

* `_queries_kernel` quantizes the queries, and makes planes of dO and out, delta and g, as
  `attention.integer._queries_of` does.
* `_keys_kernel` copies keys and values.

A tensor core leaves two neighboring sums in a thread, and takes four neighboring codes. Each 16
tokens of the columns are in an order (`_slot_tokens`) for which those are the same threads.

Adding 1.5 * 2**23 rounds a float32 to an integer, to nearest even, whose low 16 bits are those of
the sum.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.attention.backward_lists import BACKWARD_KEYS, BACKWARD_QUERIES
from jetrl.kernels.attention.layout import KeyValueCodes
from jetrl.kernels.attention.padded_lists import PaddedLists
from jetrl.kernels.portable.attention_core import query_codes, score_factor

_MAGIC = tl.constexpr(1.5 * 2.0**23)
_ROOM = tl.constexpr(1.0 + 2.0**-7)
_SMALLEST = tl.constexpr(2.0**-101)
_KEYS = tl.constexpr(BACKWARD_KEYS)
_QUERIES = tl.constexpr(BACKWARD_QUERIES)


@triton.jit
def _larger_or_nan(x, y):
    """Return the maximum of x and y, or NaN if x or y is NaN."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_of_rows(x):
    size = tl.abs(x)
    return tl.reduce(size, 1, _larger_or_nan)


@triton.jit
def multiplier_and_scale(largest):
    """Return 2**(15 - t) and 2**(t - 15) of groups with the maximum r; NaN if it is not finite."""
    top = _larger_or_nan(largest * _ROOM, _SMALLEST)
    exponent = top.to(tl.int32, bitcast=True)
    exponent = exponent >> 23  # t + 126
    multiplier = (268 - exponent) << 23
    scale = (exponent - 14) << 23
    zero = top - top
    scale = scale.to(tl.float32, bitcast=True) + zero
    return multiplier.to(tl.float32, bitcast=True), scale


@triton.jit
def code_bits(x, multiplier):
    """Return int32 with the low 16 bits of the codes of rows x."""
    bits = tl.fma(x, multiplier[:, None], _MAGIC)
    return bits.to(tl.int32, bitcast=True)


@triton.jit
def code_planes(bits):
    """Return the planes hi and lo of codes, int8."""
    high = (bits + 128) >> 8
    return high.to(tl.int8), bits.to(tl.int8)


@triton.jit
def _slot_tokens():
    """Return the token of each of 64 slots: 0, 1, 8, 9, 2, 3, 10, 11, ... of 16."""
    slot = tl.arange(0, _QUERIES)
    token = slot & 49
    token += (slot & 2) << 2
    token += (slot & 12) >> 1
    return token


@triton.jit
def _block(blocks_ptr):
    """Return the first place of a program's 64, then place, row and presence of its slots."""
    first = tl.program_id(0) * _QUERIES
    place = first + _slot_tokens()
    record = blocks_ptr + first // _KEYS * 4
    row = tl.load(record) + place % _KEYS
    end = tl.load(record + 1)
    return first, place, row, row < end


@triton.jit
def _store_rows(to, codes, place):
    """Store codes [64, D] by rows."""
    width: tl.constexpr = codes.shape[1]
    column = tl.arange(0, width)
    at = place[:, None] * width
    at = at + column[None, :]
    tl.store(to + at, codes)


@triton.jit
def _store_columns(to, codes, first, places):
    """Store codes [64, D] by columns."""
    column = tl.arange(0, codes.shape[1])
    slot = first + tl.arange(0, _QUERIES)
    at = column[None, :] * places
    at = at + slot[:, None]
    tl.store(to + at, codes)


@triton.jit
def _signed(bits):
    """Return the codes of `code_bits`."""
    return (bits << 16) >> 16


@triton.jit
def _queries_kernel(
    do_ptr, q_ptr, out_ptr, statistics_ptr, blocks_ptr, codes_ptr, floats_ptr,
    places, num_rows, factor,
    H: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write the copies of 64 queries of a head.

    Args:
        q_ptr: bfloat16 [T, H, D], like do_ptr and out_ptr.
        statistics_ptr: float32 [2, T, H].
        codes_ptr: int8 [H, 6, places * D], written: q, hi and lo of dO by rows [places, D], then
            the same by columns [D, places].
        floats_ptr: float32 [H, 5, places], written: a, N, g, delta and the scale of q.
        factor: log2(e) / sqrt(D).
    """
    # All rows are in the order of slots.
    head = tl.program_id(1)
    first, place, row, present = _block(blocks_ptr)
    line = row.to(tl.int64) * H
    line += head
    inside = present[:, None]
    at = line[:, None] * D
    at = at + tl.arange(0, D)[None, :]
    q = tl.load(q_ptr + at, mask=inside, other=0.0)
    do = tl.load(do_ptr + at, mask=inside, other=0.0)
    do = do.to(tl.float32)
    out = tl.load(out_ptr + at, mask=inside, other=0.0)
    out = out.to(tl.float32)
    statistics_ptr += line
    reference = tl.load(statistics_ptr, mask=present, other=0.0)
    statistics_ptr += tl.cast(num_rows, tl.int64) * H
    mass = tl.load(statistics_ptr, mask=present, other=1.0)
    q_codes, q_scale = query_codes(q)
    largest = largest_of_rows(do)
    multiplier, do_scale = multiplier_and_scale(largest)
    do_bits = code_bits(do, multiplier)
    high, low = code_planes(do_bits)
    largest = largest_of_rows(out)
    multiplier, out_scale = multiplier_and_scale(largest)
    out_bits = code_bits(out, multiplier)
    products = _signed(do_bits) * _signed(out_bits)
    delta = tl.sum(products.to(tl.int64), axis=1)
    delta = delta.to(tl.float32) * out_scale
    g = tl.div_rn(1.0, mass)
    g = g * do_scale
    zero = g - g
    zero += delta - delta
    g += zero  # NaN unless both are finite
    # Padding has weights 0, whatever the keys are.
    g = tl.where(present, g, 0.0)
    q_scale = tl.where(present, q_scale, 0.0)
    size = places * D
    codes_ptr += head.to(tl.int64) * 6 * size
    _store_rows(codes_ptr, q_codes, place)
    codes_ptr += size
    _store_rows(codes_ptr, high, place)
    codes_ptr += size
    _store_rows(codes_ptr, low, place)
    codes_ptr += size
    _store_columns(codes_ptr, q_codes, first, places)
    codes_ptr += size
    _store_columns(codes_ptr, high, first, places)
    codes_ptr += size
    _store_columns(codes_ptr, low, first, places)
    floats_ptr += head.to(tl.int64) * 5 * places
    floats_ptr += place
    tl.store(floats_ptr, q_scale * factor)
    floats_ptr += places
    tl.store(floats_ptr, reference)
    floats_ptr += places
    tl.store(floats_ptr, g)
    floats_ptr += places
    tl.store(floats_ptr, delta)
    floats_ptr += places
    tl.store(floats_ptr, q_scale)


@triton.jit
def _keys_kernel(
    k_ptr, k_scales_ptr, v_ptr, v_scales_ptr, blocks_ptr, codes_ptr, scales_ptr, places,
    G: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write the copies of 64 keys and values of a head.

    Args:
        k_ptr: int8 [T, G, D], like v_ptr; scales are float32 [T, G].
        codes_ptr: int8 [G, 3, places * D], written: k and v by rows, then k by columns.
        scales_ptr: float32 [G, 2, places], written.
    """
    group = tl.program_id(1)
    first, place, row, present = _block(blocks_ptr)
    line = row.to(tl.int64) * G
    line += group
    inside = present[:, None]
    at = line[:, None] * D
    at = at + tl.arange(0, D)[None, :]
    k = tl.load(k_ptr + at, mask=inside, other=0)
    v = tl.load(v_ptr + at, mask=inside, other=0)
    k_scale = tl.load(k_scales_ptr + line, mask=present, other=0.0)
    v_scale = tl.load(v_scales_ptr + line, mask=present, other=0.0)
    size = places * D
    codes_ptr += group.to(tl.int64) * 3 * size
    _store_rows(codes_ptr, k, place)
    codes_ptr += size
    _store_rows(codes_ptr, v, place)
    codes_ptr += size
    _store_columns(codes_ptr, k, first, places)
    scales_ptr += group.to(tl.int64) * 2 * places
    scales_ptr += place
    tl.store(scales_ptr, k_scale)
    scales_ptr += places
    tl.store(scales_ptr, v_scale)


class _Copies(NamedTuple):
    """The outputs of `_queries_kernel` and of `_keys_kernel`."""

    codes: Tensor
    floats: Tensor
    keys: Tensor
    scales: Tensor


def copies(
    do: Tensor, q: Tensor, codes: KeyValueCodes, o: Tensor, statistics: Tensor, lists: PaddedLists
) -> _Copies:
    """Return the copies of all heads."""
    tokens, heads, head_dim = q.shape
    groups = codes.num_heads
    places = lists.num_places
    size = places * head_dim
    made = _Copies(
        codes=codes.k.new_empty(heads, 6, size),
        floats=statistics.new_empty(heads, 5, places),
        keys=codes.k.new_empty(groups, 3, size),
        scales=statistics.new_empty(groups, 2, places),
    )
    factor = score_factor(head_dim)
    programs = places // BACKWARD_QUERIES
    _queries_kernel[(programs, heads)](
        do, q, o, statistics, lists.blocks, made.codes, made.floats, places, tokens, factor,
        heads, head_dim,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    k, v = codes.k, codes.v
    _keys_kernel[(programs, groups)](
        k, codes.k_scales, v, codes.v_scales, lists.blocks, made.keys, made.scales, places,
        groups, head_dim,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return made
