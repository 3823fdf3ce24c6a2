"""`kernels.decode` on Hopper: one program does all rows of a forward, in two kernels beside it.

Both are latency: a program of up to 1024 lanes, a lane a row. The random bits are Philox 4x32-10
of the same seed, key and counter as `kernels.sampling.random_bits`, and the same bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.decode_state import (
    BROKEN,
    MAX_ROWS,
    NOT_DRAWN,
    DecodeInputs,
    DecodeState,
    Drawn,
)


@triton.jit
def random_bits(seed, key, position):
    """int64 in [0, 2**53) for int64 seed, sequence key and position, element by element."""
    low: tl.constexpr = 0xFFFFFFFF
    c0, c1, _, _ = tl.philox(
        seed,
        (key & low).to(tl.uint32),
        ((key >> 32) & low).to(tl.uint32),
        (position & low).to(tl.uint32),
        ((position >> 32) & low).to(tl.uint32),
    )
    wide = (c0.to(tl.uint64) << 32) | c1.to(tl.uint64)
    return (wide >> 11).to(tl.int64)


@triton.jit
def _inputs_kernel(
    token_ptr, position_ptr, key_ptr, active_ptr, tables_ptr, seed_ptr, rows_ptr,
    token_ids_ptr, positions_ptr, slots_ptr, lengths_ptr, bits_ptr,
    count, width, PAGE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = row < count
    slot = tl.load(rows_ptr + row, mask=mask, other=0)
    active = mask & (tl.load(active_ptr + slot, mask=mask, other=0) > 0)
    token = tl.load(token_ptr + slot, mask=active, other=0)
    position = tl.load(position_ptr + slot, mask=active, other=0)
    page = tl.load(tables_ptr + slot * width + position // PAGE, mask=active, other=0)
    place = page.to(tl.int64) * PAGE + position % PAGE
    key = tl.load(key_ptr + slot, mask=active, other=0)
    seed = tl.load(seed_ptr) + tl.zeros([LANES], tl.int64)
    bits = random_bits(seed, key, position.to(tl.int64) + 1)
    tl.store(token_ids_ptr + row, token.to(tl.int64), mask=mask)
    tl.store(positions_ptr + row, position.to(tl.int64), mask=mask)
    tl.store(slots_ptr + row, tl.where(active, place, -1), mask=mask)
    tl.store(lengths_ptr + row, tl.where(active, position + 1, 0), mask=mask)
    tl.store(bits_ptr + row, tl.where(active, bits, -1), mask=mask)


@triton.jit
def _take_kernel(
    token_ptr, position_ptr, limit_ptr, active_ptr, stops_ptr, rows_ptr,
    tokens_ptr, logprobs_ptr, lse_ptr, out_tokens_ptr, out_logprobs_ptr, out_count_ptr,
    count, out_width, NOT_DRAWN: tl.constexpr, BROKEN: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, LANES)  # a single program: it moves the counter on
    mask = row < count
    slot = tl.load(rows_ptr + row, mask=mask, other=0)
    active = mask & (tl.load(active_ptr + slot, mask=mask, other=0) > 0)
    token = tl.load(tokens_ptr + row, mask=active, other=0).to(tl.int32)
    logprob = tl.load(logprobs_ptr + row, mask=active, other=0.0)
    lse = tl.load(lse_ptr + row, mask=active, other=0.0)
    finite = tl.abs(lse) < float("inf")
    at = tl.load(out_count_ptr)
    written = tl.where(active, tl.where(finite, token, BROKEN), NOT_DRAWN)
    tl.store(out_tokens_ptr + at * out_width + row, written, mask=mask)
    tl.store(out_logprobs_ptr + at * out_width + row, logprob, mask=mask)
    position = tl.load(position_ptr + slot, mask=active, other=0) + 1
    goes_on = finite & (position < tl.load(limit_ptr + slot, mask=active, other=0))
    for i in range(0, tl.load(stops_ptr)):
        goes_on = goes_on & (token != tl.load(stops_ptr + 1 + i))
    tl.store(token_ptr + slot, token, mask=active)
    tl.store(position_ptr + slot, position, mask=active)
    tl.store(active_ptr + slot, goes_on.to(tl.int32), mask=active)
    tl.debug_barrier()  # every lane has read the counter
    tl.store(out_count_ptr, at + 1)


def next_inputs(state: DecodeState, rows: Tensor, page_size: int) -> DecodeInputs:
    """`kernels.decode.next_inputs` on Hopper."""
    count = _check_rows(rows)
    wide = torch.empty(4, count, dtype=torch.int64, device=rows.device)
    lengths = torch.empty(count, dtype=torch.int32, device=rows.device)
    token_ids, positions, slots, bits = wide.unbind(0)
    _inputs_kernel[(triton.cdiv(count, 128),)](
        state.token, state.position, state.key, state.active, state.tables, state.seed, rows,
        token_ids, positions, slots, lengths, bits,
        count, state.tables.shape[1], page_size, 128, num_warps=4,
    )  # fmt: skip
    return DecodeInputs(token_ids, positions, slots, lengths, bits)


def take_draws(
    state: DecodeState, rows: Tensor, tokens: Tensor, logprobs: Tensor, lse: Tensor, out: Drawn
) -> None:
    """`kernels.decode.take_draws` on Hopper."""
    count = _check_rows(rows)
    _take_kernel[(1,)](
        state.token, state.position, state.limit, state.active, state.stops, rows,
        tokens, logprobs, lse, out.tokens, out.logprobs, out.count,
        count, out.tokens.shape[1], NOT_DRAWN, BROKEN,
        max(32, triton.next_power_of_2(count)), num_warps=4,
    )  # fmt: skip


def _check_rows(rows: Tensor) -> int:
    count = len(rows)
    if rows.dtype != torch.int64 or not rows.is_contiguous() or not 1 <= count <= MAX_ROWS:
        raise ValueError(
            f"rows: contiguous int64 [1 to {MAX_ROWS}], not {rows.dtype} {list(rows.shape)}"
        )
    return count
