"""The steps of decode between two forwards, on the device: no token passes through Python.

A running sequence has a slot (`kernels.decode_state`). Row r of a forward is the sequence in slot
rows[r]; a row whose slot is not active takes part with length 0 and changes nothing. One forward is

    inputs = next_inputs(state, rows, page_size)            what the model, cache and sampler read
    tokens, logprobs, lse = ...                             the model and the draw
    take_draws(state, rows, tokens, logprobs, lse, out)     the next token, or the sequence's end

and each step reads nothing that is not on the device, so that it can be a CUDA graph.

When a sequence ends is decided by `rollout.stopping`, on the host, which sees the tokens some
forwards later. `take_draws` is the device's form of that rule, so that a sequence that has ended is
not computed further: it ends one with a stop id and at its limit, as the host does, and where the
logits are broken, for which the host stops the run. Stop strings and stop ids beyond MAX_STOP_IDS
are the host's alone: the device goes on, and the host drops what lies past the end.

Legend: S slots, W pages a table, B rows, K forwards that a `Drawn` holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.kernels.decode_state import BROKEN, NOT_DRAWN, DecodeInputs, DecodeState, Drawn
from jetrl.kernels.sampling import random_bits


def next_inputs(state: DecodeState, rows: Tensor, page_size: int) -> DecodeInputs:
    """Return what the next forward of some rows reads.

    Args:
        rows: int64 [B], the slot of each row.
    """
    if rows.is_cuda:
        from jetrl.kernels.decode_hopper import next_inputs as next_inputs_hopper

        return next_inputs_hopper(state, rows, page_size)
    active = state.active[rows] > 0
    position = torch.where(active, state.position[rows], 0).long()
    page = state.tables[rows, position // page_size].long()
    # The forward of position p draws the token of position p + 1, which is what its bits count.
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
    """Record a forward's draws, and make each the last token of its sequence or the sequence's end.

    A sequence ends with a stop id, at its limit, and with logits whose lse is not finite (see the
    module).

    Args:
        state: the running sequences, changed in place.
        rows: int64 [B], the slot of each row.
        tokens: int64 [B], the tokens drawn.
        logprobs: float32 [B], their log-probs.
        lse: float32 [B], each row's log-sum-exp, not finite where there was no draw.
        out: where the draws are written: the row of its count, which moves on.
    """
    if rows.is_cuda:
        from jetrl.kernels.decode_hopper import take_draws as take_draws_hopper

        take_draws_hopper(state, rows, tokens, logprobs, lse, out)
        return
    active = state.active[rows] > 0
    finite = torch.isfinite(lse)
    at, count = int(out.count), len(rows)
    written = torch.where(finite, tokens, BROKEN)
    out.tokens[at, :count] = torch.where(active, written, NOT_DRAWN).int()
    out.logprobs[at, :count] = torch.where(active, logprobs, 0.0)
    out.count.add_(1)
    live, drawn = rows[active], tokens[active].int()
    state.token[live] = drawn
    state.position[live] += 1
    # The end: a stop id, the last position that may be drawn, or no draw at all.
    stopped = torch.isin(drawn, state.stops[1 : 1 + int(state.stops[0])])
    runs_on = finite[active] & ~stopped & (state.position[live] < state.limit[live])
    state.active[live] = runs_on.int()
