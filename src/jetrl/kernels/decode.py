"""What decode carries from one forward to the next, on the device: no token passes through Python.

A running sequence has a slot. Row r of a forward is the sequence in slot rows[r]; a row whose slot
is not active takes part with length 0 and changes nothing. One forward is

    inputs = next_inputs(state, rows, page_size)            what the model, cache and sampler read
    tokens, logprobs, lse = ...                             the model and the draw
    take_draws(state, rows, tokens, logprobs, lse, out)     the next token, or the sequence's end

and each step reads nothing that is not on the device, so that it can be a CUDA graph.

Legend: S slots, W pages a table, B rows, K forwards that a `Drawn` holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.kernels.sampling import random_bits
from jetrl.precision.hopper import hopper

NOT_DRAWN = -1  # in `Drawn.tokens`: the sequence had ended before
BROKEN = -2  # in `Drawn.tokens`: the logits have no finite softmax
MAX_STOP_IDS = 256
MAX_ROWS = 4096  # of a forward on a GPU: one program takes the draws of all


@dataclass(frozen=True)
class DecodeState:
    """token, position: int32 [S], the last token and its place, not yet in the cache. limit: int32
    [S], the place of the last token that may be drawn. key: int64 [S], of the random numbers.
    active: int32 [S], 0 once ended. tables: int32 [S, W], pages in order. seed: int64 [1]. stops:
    int32 [1 + MAX_STOP_IDS], how many stop ids, and those."""

    token: Tensor
    position: Tensor
    limit: Tensor
    key: Tensor
    active: Tensor
    tables: Tensor
    seed: Tensor
    stops: Tensor

    @staticmethod
    def empty(slots: int, width: int, device: torch.device) -> DecodeState:
        """All slots inactive; tables of `width` pages."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return DecodeState(
            token=zeros(slots),
            position=zeros(slots),
            limit=zeros(slots),
            key=zeros(slots, dtype=torch.int64),
            active=zeros(slots),
            tables=zeros(slots, width),
            seed=zeros(1, dtype=torch.int64),
            stops=zeros(1 + MAX_STOP_IDS),
        )


@dataclass(frozen=True)
class DecodeInputs:
    """Of one forward. token_ids, positions: int64 [B]. slots: int64 [B], where in the cache the
    keys and values go: page * page_size + place. lengths: int32 [B], keys that are seen. bits:
    int64 [B] random bits of the draw. A row that is not active has length 0, slot -1, bits -1."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    lengths: Tensor
    bits: Tensor


@dataclass(frozen=True)
class Drawn:
    """tokens: int32 [K, B], or NOT_DRAWN or BROKEN. logprobs: float32 [K, B]. count: int32 [1],
    forwards so far: the row of the next one."""

    tokens: Tensor
    logprobs: Tensor
    count: Tensor


def next_inputs(state: DecodeState, rows: Tensor, page_size: int) -> DecodeInputs:
    """The inputs of the next forward of rows int64 [B]."""
    if rows.is_cuda:
        on_gpu: DecodeInputs = hopper("kernels.decode_hopper").next_inputs(state, rows, page_size)
        return on_gpu
    active = state.active[rows] > 0
    position = torch.where(active, state.position[rows], 0).long()
    page = state.tables[rows, position // page_size].long()
    bits = random_bits(
        state.seed.expand(len(rows)).numpy(), state.key[rows].numpy(), (position + 1).numpy()
    )
    return DecodeInputs(
        token_ids=torch.where(active, state.token[rows], 0).long(),
        positions=position,
        slots=torch.where(active, page * page_size + position % page_size, -1),
        lengths=torch.where(active, position + 1, 0).int(),
        bits=torch.where(active, torch.from_numpy(bits), -1),
    )


def take_draws(
    state: DecodeState, rows: Tensor, tokens: Tensor, logprobs: Tensor, lse: Tensor, out: Drawn
) -> None:
    """Writes what was drawn to `out`, and makes it each sequence's last token. A sequence ends with
    a stop id, at its limit, and with logits whose lse is not finite.

    tokens: int64 [B]. logprobs, lse: float32 [B].
    """
    if rows.is_cuda:
        hopper("kernels.decode_hopper").take_draws(state, rows, tokens, logprobs, lse, out)
        return
    active = state.active[rows] > 0
    finite = torch.isfinite(lse)
    at = int(out.count)
    count = len(rows)
    written = torch.where(finite, tokens, BROKEN)
    out.tokens[at, :count] = torch.where(active, written, NOT_DRAWN).int()
    out.logprobs[at, :count] = torch.where(active, logprobs, 0.0)
    out.count.add_(1)
    live, drawn = rows[active], tokens[active].int()
    state.token[live] = drawn
    state.position[live] += 1
    stopped = torch.isin(drawn, state.stops[1 : 1 + int(state.stops[0])])
    goes_on = finite[active] & ~stopped & (state.position[live] < state.limit[live])
    state.active[live] = goes_on.int()
