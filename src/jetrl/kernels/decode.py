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

import torch
from torch import Tensor

from jetrl.kernels.decode_state import BROKEN, NOT_DRAWN, DecodeInputs, DecodeState, Drawn
from jetrl.kernels.sampling import random_bits


def next_inputs(state: DecodeState, rows: Tensor, page_size: int) -> DecodeInputs:
    """The inputs of the next forward of rows int64 [B]."""
    if rows.is_cuda:
        from jetrl.kernels.decode_hopper import next_inputs as next_inputs_hopper

        return next_inputs_hopper(state, rows, page_size)
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
        from jetrl.kernels.decode_hopper import take_draws as take_draws_hopper

        take_draws_hopper(state, rows, tokens, logprobs, lse, out)
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
