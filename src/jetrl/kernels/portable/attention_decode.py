"""Decode of integer attention: one or a few queries per sequence over pages of INT8 codes.

It has the bits of `attention.integer.attend` with scales "fp32", whose names are used here. A
program attends with the query heads of one key-value head, of one or several queries, to one split
of 1,024 keys, and folds its blocks of 128 keys in order. A second kernel folds the splits in order.

The kernel is memory-bound: it reads each page once. Queries are the columns of all products, so
that a few heads fill the smaller side of a tensor-core instruction:

* S^T = K q^T. The rows of K are permuted (`_key_of_row`), so that a thread has the weights d of
  four neighboring keys and exchanges them through shared memory as one word.
* O^T = V^T d^T has the keys along the sum, and INT8 operands need four neighboring keys in a word.
  Pages have neighboring channels there. So V is read as pairs of channels, 16 bits, which
  tensor-core loads can transpose; its bytes are then the even and the odd channels, each with its
  own product and its own half of A.

A page number is loaded one block before the page, so that the loop copies pages ahead.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.attention.layout import BLOCK_KEYS as PAGE_TOKENS
from jetrl.kernels.attention.layout import KeyValueCodes, SequenceQueries
from jetrl.kernels.portable.attention_core import (
    BLOCK_KEYS,
    SPLIT_KEYS,
    bad_state,
    ceiling,
    exponentials,
    fold,
    planes,
    query_codes,
    rounded_sum,
    score_factor,
    weight_bits,
)
from jetrl.precision.triton.portable_int8 import BY_BF16, int8_dot

# Launch options of `_decode_kernel`. Three stages keep two blocks of pages in shared memory: at
# most 97 KB with all else.
_WARPS = 4
_FEW_WARPS = 2  # heads of 64 and up to 16 columns, whose products are too small for four
_WARPS_BF16 = 8  # of products by BF16 tensor cores; four spill
_STAGES = 3
# Warps and stages by channels of a head, for one query of up to 8 heads: the fastest of ten on an
# H200. With less shared memory and fewer threads, more programs share a multiprocessor.
_ONE_QUERY = {64: (1, 2), 128: (2, 2)}
_MAX_COLUMNS = 32
_SPLITS_AT_ONCE = 8  # loads in flight of a program that folds splits

_PAGE = tl.constexpr(PAGE_TOKENS)
_BLOCK = tl.constexpr(BLOCK_KEYS)
_SPLIT = tl.constexpr(SPLIT_KEYS)
_EMPTY = tl.constexpr(-3.4028234663852886e38)  # N of the empty state; -Inf minus itself is NaN


@triton.jit
def _key_of_row():
    """Return the key of each row of S^T, int32 [_BLOCK].

    A thread has rows g, g + 8, g + 64 and g + 72 of an accumulator: keys 4 g' to 4 g' + 3.
    """
    row = tl.arange(0, _BLOCK)
    first = row // 16 % 4 * 32
    first += row % 8 * 4
    within = row // 64 * 2
    within += row // 8 % 2
    return first + within


@triton.jit
def _by_key(x):
    """Return x [columns, rows of S^T] as [keys, columns]; no value leaves its thread."""
    C: tl.constexpr = x.shape[0]
    x = tl.reshape(x, (C, 2, 4, 2, 8))
    x = tl.permute(x, (2, 4, 0, 1, 3))
    # Split and join make the four keys the first registers of a thread, the bytes of a word.
    x_0, x_1 = tl.split(x)
    x_00, x_01 = tl.split(x_0)
    x_10, x_11 = tl.split(x_1)
    x_0 = tl.join(x_00, x_01)
    x_1 = tl.join(x_10, x_11)
    x = tl.join(x_0, x_1)
    x = tl.permute(x, (0, 1, 3, 4, 2))
    return tl.reshape(x, (_BLOCK, C))


@triton.jit
def _products(v, high, low):
    """Return O, int32 [columns, channels], of codes v [channels, keys] and planes of d."""
    o = int8_dot(v, high)
    o *= 256
    o += int8_dot(v, low)
    return tl.trans(o)


@triton.jit
def _attend_block(q, a, k, k_scales, v, v_scales, seen):
    """Return the state of a block: n and C [columns], and A [columns, D].

    Args:
        q: int8 [D, columns]; `a` is float32 [columns].
        k: int8 [rows, D], and its float32 scales [rows].
        v: int16 [D / 2, keys], a pair of codes each, and its float32 scales [rows].
        seen: int1 [columns, rows] if SEVERAL, else [1, rows].
    """
    s = tl.trans(int8_dot(k, q))
    y = s.to(tl.float32) * k_scales[None, :]
    y = tl.where(seen, y, float("-inf"))
    n = ceiling(tl.max(y, 1) * a)
    e = exponentials(y, a, n)  # of hidden keys below 1e-6, which rounds to 0
    c = rounded_sum(e).to(tl.float32)
    # A scale that is not finite makes r so.
    not_finite = k_scales - k_scales
    not_finite += v_scales - v_scales
    known = tl.where(not_finite == 0.0, v_scales, float("inf"))
    r = tl.max(tl.where(seen, known[None, :], 0.0), 1)
    w = tl.div_rn(1.0, r)[:, None]
    g = tl.where(seen, v_scales[None, :] * w, 0.0)
    high, low = planes(weight_bits(e, g))
    high = _by_key(high)
    low = _by_key(low)
    even = _products(v.to(tl.int8), high, low)
    v = v >> 8
    odd = _products(v.to(tl.int8), high, low)
    o = tl.join(even, odd)
    o = tl.reshape(o, (q.shape[1], q.shape[0]))
    o = o.to(tl.float32)
    bad = bad_state(n, r)
    n = tl.where(bad == 0.0, n, 0.0)
    r += bad
    return n, c + bad, o * r[:, None]


@triton.jit(do_not_specialize=["table_stride", "max_splits"])
def _decode_kernel(
    q_ptr, k_ptr, k_scales_ptr, v_ptr, v_scales_ptr, tables_ptr, lengths_ptr, counts_ptr, first_ptr,
    out_ptr, part_ptr, state_ptr, table_stride, max_splits, factor,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr,
    TILE: tl.constexpr, SEVERAL: tl.constexpr,
):  # fmt: skip
    """Attend with the queries of one key-value head to one split of a sequence.

    The grid is (G * ceil(queries / TILE), B, max_splits). Writes outputs for contexts of one split,
    else the state of the split.

    Args:
        q_ptr: bfloat16 [R, H, D].
        k_ptr: int8 [P, 64, G, D], with float32 scales [P, 64, G].
        v_ptr: int16 [P, 64, G, D / 2], pairs of codes, with scales like those of k.
        tables_ptr: int32 [B, table_stride], pages of each sequence.
        lengths_ptr: int32 [B], keys per context, including those of all its queries.
        counts_ptr: int32 [B], queries per sequence; read if SEVERAL, like first_ptr.
        first_ptr: int32 [B], row of each first query.
        out_ptr: bfloat16 [R, H, D], written for contexts of one split.
        part_ptr: float32 [R, max_splits, H, D], A, written for longer contexts.
        state_ptr: float32 [R, max_splits, H, 2], N and L, written for longer contexts.
        TILE: queries per program, TILE * GROUP of COLUMNS.
    """
    H: tl.constexpr = G * GROUP
    PAIRS: tl.constexpr = D // 2
    SLOTS: tl.constexpr = _PAGE * G
    program = tl.program_id(0)
    head = program % G
    query = program // G * TILE
    sequence = tl.program_id(1)
    split = tl.program_id(2)
    begin = split * _SPLIT
    # Columns are the heads of the first query, then of the next. Each has its row and last key.
    column = tl.arange(0, COLUMNS)
    length = tl.load(lengths_ptr + sequence)
    row = sequence + column * 0
    used = column < GROUP
    last = length - 1
    if SEVERAL:
        count = tl.load(counts_ptr + sequence)
        own = query + column // GROUP
        row = tl.load(first_ptr + sequence) + own
        used = column < GROUP * TILE
        used &= own < count
        last = length - count
        last += tl.minimum(own, count - 1)
        length = tl.where(query < count, length, 0)
    if begin >= tl.maximum(length, 1):
        return
    row = row.to(tl.int64)
    q_head = head * GROUP + column % GROUP
    channel = tl.arange(0, D)[None, :]
    at = row * H + q_head
    at = at[:, None] * D
    at += channel
    in_use = used[:, None]
    q = tl.load(q_ptr + at, mask=in_use, other=0.0)
    q, a = query_codes(q)
    q = tl.trans(q)
    a *= factor

    n = tl.full([COLUMNS], _EMPTY, tl.float32)
    mass = tl.zeros([COLUMNS], tl.float32)
    total = tl.zeros([COLUMNS, D], tl.float32)
    # The two pages of a block; a page after the last is the last again, hidden.
    tables_ptr += sequence.to(tl.int64) * table_stride
    last_page = tl.maximum(length - 1, 0)
    last_page //= _PAGE
    number = begin // _PAGE
    page_0 = tl.load(tables_ptr + tl.minimum(number, last_page))
    number += 1
    page_1 = tl.load(tables_ptr + tl.minimum(number, last_page))
    key = tl.arange(0, _BLOCK)
    slot = key % _PAGE * G
    slot += head
    pair = tl.arange(0, PAIRS)[:, None]
    v_within = slot[None, :] * PAIRS + pair
    k_key = _key_of_row()
    k_slot = k_key % _PAGE * G
    k_slot += head
    k_within = k_slot[:, None] * D + channel
    for start in range(begin, tl.minimum(length, begin + _SPLIT), _BLOCK):
        page = tl.where(key < _PAGE, page_0, page_1)
        page = page.to(tl.int64) * SLOTS
        v_at = page[None, :] * PAIRS
        v_at += v_within
        v = tl.load(v_ptr + v_at)
        page = tl.where(k_key < _PAGE, page_0, page_1)
        page = page.to(tl.int64) * SLOTS
        k_at = page[:, None] * D
        k_at += k_within
        k = tl.load(k_ptr + k_at)
        page += k_slot
        k_scales = tl.load(k_scales_ptr + page)
        v_scales = tl.load(v_scales_ptr + page)
        number += 1
        page_0 = tl.load(tables_ptr + tl.minimum(number, last_page))
        number += 1
        page_1 = tl.load(tables_ptr + tl.minimum(number, last_page))

        position = (start + k_key)[None, :]
        seen = position < length
        if SEVERAL:
            seen = position <= last[:, None]
        block_n, c, o = _attend_block(q, a, k, k_scales, v, v_scales, seen)
        block_n, c, o = fold(n, mass, total, block_n, c, o)
        if SEVERAL:  # a block that a query does not see changes nothing
            changes = last >= start
            block_n = tl.where(changes, block_n, n)
            c = tl.where(changes, c, mass)
            changes = changes[:, None]
            o = tl.where(changes, o, total)
        n = block_n
        mass = c
        total = o

    fits = length <= max_splits * _SPLIT
    if fits & (length > _SPLIT):
        row *= max_splits
        row += split
        line = row * H
        line += q_head
        at = line[:, None] * D
        at += channel
        tl.store(part_ptr + at, total, mask=in_use)
        line *= 2
        tl.store(state_ptr + line, n, mask=used)
        line += 1
        tl.store(state_ptr + line, mass, mask=used)
    else:
        # One split folded into the empty state has the same bits. A context too long gives NaN.
        mass = tl.where(fits, mass, float("nan"))
        inverse = tl.div_rn(1.0, mass)
        total *= inverse[:, None]
        out = tl.where(length > 0, total, 0.0)
        out = out.to(tl.bfloat16)
        tl.store(out_ptr + at, out, mask=in_use)


@triton.jit(do_not_specialize=["max_splits"])
def _combine_kernel(
    part_ptr, state_ptr, keys_ptr, out_ptr, max_splits,
    H: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Fold the splits of one head of one row in order, for rows with more than one split.

    All queries of a sequence have as many splits as its last one; those past the keys of a query
    are empty states, which change no bit.

    Args:
        part_ptr, state_ptr: as in `_decode_kernel`.
        keys_ptr: int32 [R], keys in the context of each row; 0 for padding.
        out_ptr: bfloat16 [R, H, D], written.
    """
    head = tl.program_id(0)
    row = tl.program_id(1)
    length = tl.load(keys_ptr + row)
    splits = tl.cdiv(length, _SPLIT)
    if (splits <= 1) | (splits > max_splits):  # `_decode_kernel` wrote the output
        return
    row = row.to(tl.int64)
    channel = tl.arange(0, D)[None, :]
    one = tl.arange(0, 1)
    n = tl.full([1], _EMPTY, tl.float32)
    mass = tl.zeros([1], tl.float32)
    total = tl.zeros([1, D], tl.float32)
    for first in range(0, splits, CHUNK):
        # Unrolled, so that the loads of a chunk are in flight together.
        for i in tl.static_range(CHUNK):
            split = first + i + one
            inside = split < splits
            split += row * max_splits
            line = split * H + head
            at = line[:, None] * D
            at += channel
            part = tl.load(part_ptr + at, mask=inside[:, None], other=0.0)
            line *= 2
            part_n = tl.load(state_ptr + line, mask=inside, other=_EMPTY)
            line += 1
            part_mass = tl.load(state_ptr + line, mask=inside, other=0.0)
            n, mass, total = fold(n, mass, total, part_n, part_mass, part)
    inverse = tl.div_rn(1.0, mass)
    total *= inverse[:, None]
    out = total.to(tl.bfloat16)
    row *= H
    row += head
    row *= D
    tl.store(out_ptr + row + channel, out)


def attend_decode(
    q: Tensor, pages: KeyValueCodes, block_tables: Tensor, lengths: Tensor, longest: int,
    split_keys: int, queries: SequenceQueries | None,
) -> Tensor:  # fmt: skip
    """Return attention of one or a few queries per sequence over its pages.

    A query attends to the keys up to its own, and its bits do not depend on other queries. Can be
    captured in a CUDA graph.

    Args:
        q: bfloat16 [B, H, D], rotated, or [R, H, D] with several queries per sequence.
        pages: INT8 keys and values [P, 64, G, D], D 64 or 128, H / G at most 16.
        block_tables: int32 [B, at least ceil(longest / 64)], pages of each context in order.
        lengths: int32 [B], keys per context, including those of its queries; 0 gives zeros.
        longest: sizes the launch; a context that needs more splits than this length gives NaN.
        split_keys: keys per split; the definition has 1,024.
        queries: rows of several queries per sequence; the results of padding rows are arbitrary.
    """
    group = _check(q, pages, block_tables, lengths, longest, split_keys, queries)
    rows, heads, head_dim = q.shape
    width = 1
    counts = lengths  # not read
    first = lengths
    keys = lengths
    if queries is not None:
        width = queries.most
        counts = queries.counts
        first = queries.first
        keys = queries.keys
    splits = triton.cdiv(longest, SPLIT_KEYS)
    states = splits if splits > 1 else 0
    part = q.new_empty(rows, states, heads, head_dim, dtype=torch.float32)
    state = q.new_empty(rows, states, heads, 2, dtype=torch.float32)
    # Queries per program, and columns for their heads.
    tile = min(width, _MAX_COLUMNS // group)
    columns = triton.next_power_of_2(tile * group)
    columns = max(8, columns)
    warps, stages = _WARPS, _STAGES
    if head_dim == 64 and columns <= 16:
        warps = _FEW_WARPS
    elif BY_BF16.value:
        warps = _WARPS_BF16
    if width == 1 and columns == 8 and not BY_BF16.value:
        warps, stages = _ONE_QUERY[head_dim]
    v = pages.v.view(torch.int16)
    out = torch.empty_like(q)
    tiles = triton.cdiv(width, tile)
    _decode_kernel[(pages.num_heads * tiles, len(lengths), splits)](
        q, pages.k, pages.k_scales, v, pages.v_scales,
        block_tables, lengths, counts, first, out, part, state,
        block_tables.stride(0), splits, score_factor(head_dim),
        pages.num_heads, group, head_dim, columns, tile, width > 1,
        num_warps=warps, num_stages=stages, enable_fp_fusion=False,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(heads, rows)](
            part, state, keys, out, splits, heads, head_dim, _SPLITS_AT_ONCE,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _check(
    q: Tensor, pages: KeyValueCodes, block_tables: Tensor, lengths: Tensor, longest: int,
    split_keys: int, queries: SequenceQueries | None,
) -> int:  # fmt: skip
    """Check the arguments of `attend_decode`; return the query heads per key-value head."""
    assert q.dtype == torch.bfloat16
    assert q.ndim == 3
    assert q.is_contiguous()
    assert pages.k.dtype == torch.int8
    assert pages.v.dtype == torch.int8
    assert pages.k.ndim == 4, "keys are packed, not paged"
    tokens = pages.k.shape[1]
    assert tokens == PAGE_TOKENS, f"pages of {tokens} tokens"
    heads, head_dim = q.shape[1:]
    assert head_dim == pages.head_dim
    assert head_dim in (64, 128), f"heads of {head_dim}"
    group, rest = divmod(heads, pages.num_heads)
    assert rest == 0, f"{heads} query heads"
    assert 1 <= group <= 16, f"{group} query heads per key-value head"
    assert block_tables.dtype == torch.int32
    assert block_tables.stride(1) == 1
    assert lengths.dtype == torch.int32
    assert len(lengths) == len(block_tables)
    if queries is None:
        assert len(q) == len(lengths), "several queries need `queries`"
    limit = block_tables.shape[1] * PAGE_TOKENS
    assert 1 <= longest <= limit, f"{longest} tokens"
    assert split_keys == SPLIT_KEYS, f"splits of {split_keys} keys"
    return group
