"""Compare the Hopper kernels of drafts with their references, run by Triton's interpreter on a CPU.

    TRITON_INTERPRET=1 python tests/kernels/interpreted_verify.py

It is a program of its own, since the interpreter is chosen when Triton is imported. The tables of
n-grams are not compared: of two n-grams with one entry either may be there.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch

from jetrl.kernels import decode_verify, decode_verify_hopper, draft, draft_hopper
from jetrl.kernels.decode_state import DecodeState
from jetrl.kernels.draft_state import LAG, MAX_DRAFT, QUALITY_ONE, DraftText

CPU = torch.device("cpu")
LENGTH, VOCABULARY = 60, 6
# Sequences, the most tokens of each in a forward, rows; both numbers of lanes.
CASES = ((1, 1, 1), (20, 1, 20), (8, 8, 64), (3, 2, 5), (33, 4, 70), (100, 2, 130), (40, 8, 320))


def cloned(record: Any) -> Any:
    tensors = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    return dataclasses.replace(
        record, **{n: x.clone() for n, x in tensors.items() if isinstance(x, torch.Tensor)}
    )


def records(slots: int, random: torch.Generator) -> tuple[DecodeState, DraftText]:
    """Sequences of few different tokens, so that there are drafts, and a stop id among them."""

    def below(high: int, *shape: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random)

    state = DecodeState.empty(slots, 4, CPU)
    state.active.copy_(below(5, slots) > 0)
    state.position.copy_(below(LENGTH - 12, slots, low=10))
    state.limit.copy_(state.position + below(12, slots, low=1))
    state.key.copy_(below(2**62, slots))
    state.seed.fill_(5)
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


def differences(case: tuple[int, int, int]) -> tuple[list[str], int]:
    """The fields in which kernels and references differ, and the drafts' tokens that were drawn."""
    count, width, size = case
    random = torch.Generator().manual_seed(count)
    state, text = records(count + 3, random)
    rows = torch.randperm(count + 3, generator=random)[:count]
    found: list[str] = []

    def compare(ours: Any, theirs: Any, leave_out: tuple[str, ...] = ()) -> None:
        for field in dataclasses.fields(ours):
            one, other = getattr(ours, field.name), getattr(theirs, field.name)
            tensors = isinstance(one, torch.Tensor) and field.name not in leave_out
            if tensors and not torch.equal(one, other):
                found.append(f"{case} {type(ours).__name__}.{field.name}")

    expected = draft.propose(text, state, rows)
    drafts = draft_hopper.propose(text, state, rows)
    used = torch.arange(MAX_DRAFT) < expected.counts[:, None]
    drafts.tokens[~used] = expected.tokens.int()[~used]  # What lies past an end is not used.
    compare(dataclasses.replace(expected, tokens=expected.tokens.int()), drafts)
    sizes = (rows, 64, width, size)
    inputs = decode_verify.verify_inputs(state, text, drafts, *sizes)
    theirs = decode_verify_hopper.verify_inputs(state, text, drafts, *sizes)
    theirs.first[inputs.queries == 0] = inputs.first[inputs.queries == 0]  # Of no row.
    compare(inputs, theirs)
    # Draws that are often what the draft says, and some without a finite softmax.
    tokens = torch.randint(0, VOCABULARY, (size,), generator=random)
    as_drafted = torch.rand(size, generator=random) < 0.8
    tokens = torch.where(as_drafted, inputs.token_ids.roll(-1), tokens)
    logprobs, lse = torch.randn(2, size, generator=random)
    lse[torch.rand(size, generator=random) < 0.05] = float("nan")
    results = []
    for take in (decode_verify.take_verified, decode_verify_hopper.take_verified):
        own = cloned(state), cloned(text)
        out = decode_verify.Verified(
            torch.full((3, count * width + 5), 9, dtype=torch.int32),
            torch.full((3, count * width + 5), 9.0),
            torch.full((3, count + 2), 9, dtype=torch.int32),
            torch.ones(1, dtype=torch.int32),
        )
        take(*own, drafts, inputs, rows, tokens, logprobs, lse, out, width)
        results.append((*own, out))
    for ours, theirs in zip(*results, strict=True):
        compare(ours, theirs, ("tables",))
    drawn = (results[0][2].tokens[1, : count * width] >= 0).sum() - (inputs.queries > 0).sum()
    return found, int(drawn)


if __name__ == "__main__":
    torch.set_num_threads(1)
    compared = [differences(case) for case in CASES]
    print(
        json.dumps([[found for one, _ in compared for found in one], sum(n for _, n in compared)])
    )
