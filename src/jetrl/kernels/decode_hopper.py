"""`kernels.decode` on Hopper: a kernel before a forward and one after its draws, a lane a row.

Both are latency: few loads, each waiting for the one before. The first cuts the rows into programs
of 128 lanes; the second is one program for all rows, since it moves the counter of forwards on. The
random bits are Philox 4x32-10 of the same seed, key and counter as `kernels.sampling.random_bits`,
and the same bits.
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
    """Return the random bits of draws, int64 in [0, 2**53), as `kernels.sampling.random_bits`.

    Args:
        seed: int64 [...].
        key: int64 [...], the sequences' keys.
        position: int64 [...], the positions that the tokens are drawn for.
    """
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
    """Gather one forward's inputs from the slots of its rows, one row in each lane.

    Args:
        token_ptr, position_ptr, key_ptr, active_ptr, tables_ptr, seed_ptr: of `DecodeState`, read.
        rows_ptr: int64 [count], the slot of each row.
        token_ids_ptr, positions_ptr, slots_ptr, lengths_ptr, bits_ptr: of `DecodeInputs`, written.
    """
    # Loads depend on each other three deep: row -> slot -> position -> page.
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = row < count
    slot = tl.load(rows_ptr + row, mask=mask, other=0)
    active = mask & (tl.load(active_ptr + slot, mask=mask, other=0) > 0)
    token = tl.load(token_ptr + slot, mask=active, other=0)
    position = tl.load(position_ptr + slot, mask=active, other=0)
    page = tl.load(tables_ptr + slot * width + position // PAGE, mask=active, other=0)
    place = page.to(tl.int64) * PAGE + position % PAGE

    # The forward of position p draws the token of position p + 1, which is what its bits count.
    key = tl.load(key_ptr + slot, mask=active, other=0)
    seed = tl.load(seed_ptr) + tl.zeros([LANES], tl.int64)
    bits = random_bits(seed, key, position.to(tl.int64) + 1)

    # Every row is written, since the buffers are new: one that is not active as such.
    tl.store(token_ids_ptr + row, token.to(tl.int64), mask=mask)
    tl.store(positions_ptr + row, position.to(tl.int64), mask=mask)
    tl.store(slots_ptr + row, tl.where(active, place, -1), mask=mask)
    tl.store(lengths_ptr + row, tl.where(active, position + 1, 0), mask=mask)
    tl.store(bits_ptr + row, tl.where(active, bits, -1), mask=mask)


@triton.jit
def _take_kernel(
    token_ptr, position_ptr, limit_ptr, active_ptr, stops_ptr, rows_ptr,
    tokens_ptr, logprobs_ptr, lse_ptr, out_tokens_ptr, out_logprobs_ptr, out_count_ptr,
    count, lines, out_width, NOT_DRAWN: tl.constexpr, BROKEN: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Take in one forward's draws: write them for the host, move each sequence on or end it.

    Args:
        token_ptr, position_ptr, active_ptr: of `DecodeState`, read and written.
        limit_ptr, stops_ptr: of `DecodeState`, read.
        rows_ptr: int64 [count], the slot of each row.
        tokens_ptr, logprobs_ptr, lse_ptr: int64, float32 and float32 [count], what `sample` gave.
        out_tokens_ptr, out_logprobs_ptr, out_count_ptr: of `Drawn`, lines of out_width entries;
            line `out_count` is written, if there is one.
    """
    row = tl.arange(0, LANES)  # a single program: it moves the counter on
    mask = row < count
    slot = tl.load(rows_ptr + row, mask=mask, other=0)
    active = mask & (tl.load(active_ptr + slot, mask=mask, other=0) > 0)

    # For the host: the token, or why there is none.
    token = tl.load(tokens_ptr + row, mask=active, other=0).to(tl.int32)
    logprob = tl.load(logprobs_ptr + row, mask=active, other=0.0)
    lse = tl.load(lse_ptr + row, mask=active, other=0.0)
    finite = tl.abs(lse) < float("inf")
    at = tl.load(out_count_ptr)
    written = tl.where(active, tl.where(finite, token, BROKEN), NOT_DRAWN)
    kept = mask & (at < lines)
    tl.store(out_tokens_ptr + at * out_width + row, written, mask=kept)
    tl.store(out_logprobs_ptr + at * out_width + row, logprob, mask=kept)

    # The end of a sequence, by the rule of `rollout.stopping` as far as the device knows it. Stop
    # ids are one list for all rows, so each is a scalar load that every lane compares with.
    position = tl.load(position_ptr + slot, mask=active, other=0) + 1
    runs_on = finite & (position < tl.load(limit_ptr + slot, mask=active, other=0))
    for i in range(0, tl.load(stops_ptr)):
        runs_on = runs_on & (token != tl.load(stops_ptr + 1 + i))
    tl.store(token_ptr + slot, token, mask=active)
    tl.store(position_ptr + slot, position, mask=active)
    tl.store(active_ptr + slot, runs_on.to(tl.int32), mask=active)

    tl.debug_barrier()  # every lane has read the counter
    tl.store(out_count_ptr, at + 1)


def next_inputs(state: DecodeState, rows: Tensor, page_size: int) -> DecodeInputs:
    """Return what `kernels.decode.next_inputs` returns, on Hopper.

    Args:
        rows: int64 [B], the slot of each row.
    """
    count = check_rows(rows)
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
    """Do what `kernels.decode.take_draws` does, on Hopper.

    Args:
        state: the running sequences, changed in place.
        rows: int64 [B], the slot of each row.
        tokens: int64 [B], the tokens drawn.
        logprobs: float32 [B], their log-probs.
        lse: float32 [B], each row's log-sum-exp, not finite where there was no draw.
        out: where the draws are written: the row of its count, which moves on.
    """
    count = check_rows(rows)
    _take_kernel[(1,)](
        state.token, state.position, state.limit, state.active, state.stops, rows,
        tokens, logprobs, lse, out.tokens, out.logprobs, out.count,
        count, *out.tokens.shape, NOT_DRAWN, BROKEN,
        max(32, triton.next_power_of_2(count)), num_warps=4,
    )  # fmt: skip


def check_rows(rows: Tensor) -> int:
    """Return the number of rows, once they are what the kernels of decode take.

    Args:
        rows: int64 [1 to MAX_ROWS], slots, contiguous.

    Raises:
        ValueError: another dtype, layout or number.
    """
    count = len(rows)
    if rows.dtype != torch.int64 or not rows.is_contiguous() or not 1 <= count <= MAX_ROWS:
        raise ValueError(
            f"rows: contiguous int64 [1 to {MAX_ROWS}], not {rows.dtype} {list(rows.shape)}"
        )
    return count
