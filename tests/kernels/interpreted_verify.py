"""Compare the Hopper kernels of drafts with their references, run by Triton's interpreter on a CPU.

    TRITON_INTERPRET=1 python tests/kernels/interpreted_verify.py

It is a program of its own, since the interpreter is chosen when Triton is imported.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any
from unittest import mock

import torch

from jetrl.kernels import decode, decode_state, decode_triton, draft
from jetrl.kernels.decode_state import LAG, MAX_DRAFT, ORDERS, QUALITY_ONE, DecodeState, DraftText

CPU = torch.device("cpu")
LENGTH, VOCABULARY = 60, 6
# Sequences, the most tokens of each in a forward, rows; both numbers of lanes.
CASES = ((1, 1, 1), (20, 1, 20), (8, 8, 64), (3, 2, 5), (33, 4, 70), (100, 2, 130), (40, 8, 320))
SHORT_OF_ROWS = ((20, 1, 12), (8, 2, 5), (40, 8, 33), (300, 2, 256))  # the same
GUARD, CANARY = 1024, -77


def cloned(record: Any, device: torch.device = CPU) -> Any:
    fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    copies = {n: x.to(device, copy=True) for n, x in fields.items() if isinstance(x, torch.Tensor)}
    return dataclasses.replace(record, **copies)


def records(slots: int, random: torch.Generator) -> tuple[DecodeState, DraftText]:
    """Sequences of few different tokens, so that there are drafts, and a stop id among them."""

    def below(high: int, *shape: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random)

    state = DecodeState.empty(slots, 4, CPU)
    state.active.copy_(below(5, slots) > 0)
    state.position.copy_(below(LENGTH - 12, slots, low=10))
    state.limit.copy_(state.position + below(12, slots, low=1))
    state.key.copy_(below(2**62, slots))
    state.seed.copy_(5 + 2**40 * torch.arange(len(state.seed)))
    state.offset.copy_(-below(10, slots))
    state.tables.copy_(below(100, slots, 4))
    state.token.copy_(below(VOCABULARY, slots))
    state.stops[:2] = torch.tensor([1, 3])
    text = DraftText.empty(slots, LENGTH, 4096, 2**14, CPU)
    text.quality.copy_(below(QUALITY_ONE + 1, slots))
    for slot in range(slots):
        tokens = below(VOCABULARY, int(state.position[slot]) + 1)
        places = slot * text.width + torch.arange(len(tokens))
        draft.remember(text, places, tokens, text.group[slot].expand(len(tokens)), LAG)
    return state, text


def differences(case: tuple[int, int, int], device: torch.device) -> tuple[list[str], int]:
    """The fields in which kernels and references differ, and the drafts' tokens that were drawn."""
    count, width, size = case
    random = torch.Generator().manual_seed(count)
    state, text = records(count + 3, random)
    rows = torch.randperm(count + 3, generator=random)[:count]
    ours, their_text, their_rows = cloned(state, device), cloned(text, device), rows.to(device)
    found: list[str] = []

    def compare(one: Any, other: Any, leave_out: tuple[str, ...] = ()) -> None:
        for field in dataclasses.fields(one):
            a, b = getattr(one, field.name), getattr(other, field.name)
            tensors = isinstance(a, torch.Tensor) and field.name not in leave_out
            if tensors and not torch.equal(a, b.cpu()):
                found.append(f"{case} {type(one).__name__}.{field.name}")

    compare(decode.next_inputs(state, rows, 64), decode_triton.next_inputs(ours, their_rows, 64))
    for longest_only in (True, False):
        expected = draft.propose(text, state, rows, longest_only)
        drafts = decode_triton.propose(their_text, ours, their_rows, longest_only)
        used = torch.arange(MAX_DRAFT) < expected.counts[:, None]
        expected = dataclasses.replace(expected, tokens=expected.tokens.int())
        expected.tokens[~used] = drafts.tokens.cpu()[~used]  # What lies past an end is not used.
        compare(expected, drafts)
    inputs = decode.verify_inputs(state, text, expected, rows, 64, width, size)
    theirs = decode_triton.verify_inputs(ours, their_text, drafts, their_rows, 64, width, size)
    inputs.first[inputs.queries == 0] = theirs.first.cpu()[inputs.queries == 0]  # Of no row.
    compare(inputs, theirs)
    # Draws that are often what the draft says, and some without a finite softmax.
    tokens = torch.randint(0, VOCABULARY, (size,), generator=random)
    as_drafted = torch.rand(size, generator=random) < 0.8
    tokens = torch.where(as_drafted, inputs.token_ids.roll(-1), tokens)
    logprobs, lse = torch.randn(2, size, generator=random)
    lse[torch.rand(size, generator=random) < 0.05] = float("nan")
    lines = torch.full((3, count * width + 5), 9.0)
    offers, taken = torch.full((3, count + 2), 9, dtype=torch.int32), torch.ones(1).int()
    out = decode_state.Verified(lines.int(), lines, offers, taken)
    their_out = cloned(out, device)
    draws = (tokens, logprobs, lse)
    decode.take_verified(state, text, expected, inputs, rows, *draws, out, width)
    draws = (x.to(device) for x in draws)
    decode_triton.take_verified(
        ours, their_text, drafts, theirs, their_rows, *draws, their_out, width
    )
    for one, other in ((state, ours), (text, their_text), (out, their_out)):
        compare(one, other, ("tables",))
    # Of two n-grams that went to one entry of a table, either may have come last.
    for order, table, other in zip(ORDERS, text.tables, their_text.tables.cpu(), strict=True):
        entries = (table != other).nonzero().flatten()
        for places in (table[entries].long(), other[entries].long()):
            groups = text.group[places // text.width]
            if not torch.equal(draft.ngram_entry(text, groups, places, order), entries):
                found.append(f"{case} the table of {order}")
    drawn = (out.tokens[1, : count * width] >= 0).sum() - (inputs.queries > 0).sum()
    return found, int(drawn)


def overruns(device: torch.device) -> list[str]:
    """Run the kernels with too few rows and lines, and return what is not as it should be."""
    found, guarded = [], []

    def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        size = (*shape[:-1], shape[-1] + GUARD)
        guarded.append((torch.full(size, CANARY, dtype=dtype, device=device), shape[-1]))
        return guarded[-1][0][..., : shape[-1]]

    for case in SHORT_OF_ROWS:
        count, width, size = case
        random = torch.Generator().manual_seed(count)
        state, text = records(count, random)
        state.active.fill_(1)
        rows = torch.randperm(count, generator=random)
        few = draft.propose(text, state, rows[:size])
        expected = decode.verify_inputs(state, text, few, rows[:size], 64, width, size)
        state, text, rows = cloned(state, device), cloned(text, device), rows.to(device)
        drafts = draft.propose(text, state, rows)
        with mock.patch.object(torch, "empty", empty):
            sizes = (rows, 64, width, size)
            inputs = decode_triton.verify_inputs(state, text, drafts, *sizes)
        for field in dataclasses.fields(inputs):
            ours, theirs = getattr(inputs, field.name).cpu(), getattr(expected, field.name)
            beyond = field.name == "queries" and bool(ours[size:].any())
            if beyond or not torch.equal(ours[:size], theirs):
                found.append(f"{case} VerifyInputs.{field.name}")
        ints, floats = torch.int32, torch.float32
        lines = [
            empty(3 * columns, dtype=dtype, device=device).view(3, columns)
            for columns, dtype in ((count * width, ints), (count * width, floats), (count, ints))
        ]
        out = decode_state.Verified(*lines, torch.full((1,), 3, dtype=torch.int32, device=device))
        drawn = torch.zeros(size, device=device)
        decode_triton.take_verified(
            state, text, drafts, inputs, rows, drawn.long(), drawn, drawn, out, width
        )
        found += [f"{case} a line of {line.dtype}" for line in lines if (line != CANARY).any()]
        found += [f"{case} behind {w.shape}" for w, n in guarded if (w[..., n:] != CANARY).any()]
        guarded.clear()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    compared = [differences(case, CPU) for case in CASES]
    found = [found for one, _ in compared for found in one] + overruns(CPU)
    print(json.dumps([found, sum(n for _, n in compared)]))
