"""Drafts from text and their verification: the reference, on states that are easy to follow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jetrl.kernels.decode import take_verified, verify_inputs
from jetrl.kernels.decode_state import (
    BROKEN,
    LAG,
    MAX_DRAFT,
    NOT_DRAWN,
    SOURCES,
    UNKNOWN,
    DecodeState,
    Drafts,
    DraftText,
    Verified,
)
from jetrl.kernels.draft import propose, remember

CPU = torch.device("cpu")
SLOTS, WIDTH = 3, 40


def texts(*rows: list[int], archive: tuple[list[int], ...] = ()) -> tuple[DecodeState, DraftText]:
    """Sequences of one prompt that stand at the end of their rows, and ended completions."""
    state = DecodeState.empty(SLOTS, 10, CPU)
    text = DraftText.empty(SLOTS, WIDTH, 200, 2**12, CPU)
    text.group.fill_(77)
    for slot, row in enumerate(rows):
        state.active[slot], state.position[slot] = 1, len(row) - 1
        state.token[slot], state.limit[slot] = row[-1], 39
        learn(text, slot * text.width, row, LAG)
    at = text.archive_start
    for piece in archive:
        learn(text, at, [*piece, UNKNOWN], 1)
        at += len(piece) + 1
    return state, text


def learn(text: DraftText, at: int, tokens: list[int], lag: int, group: int = 77) -> None:
    places = torch.arange(at, at + len(tokens))
    remember(text, places, torch.tensor(tokens), torch.full_like(places, group), lag)


def draft_of(state: DecodeState, text: DraftText, row: int = 0) -> tuple[list[int], str]:
    drafts = propose(text, state, torch.arange(SLOTS))
    count = int(drafts.counts[row])
    return drafts.tokens[row, :count].tolist(), SOURCES[int(drafts.sources[row])]


def test_a_draft_is_what_followed_the_last_tokens() -> None:
    own = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 1, 2, 3]
    assert draft_of(*texts(own)) == ([4, 5, 6, 7, 8, 9, 10], "self")
    sibling = list(range(1, 20))
    assert draft_of(*texts([5, 6, 7], sibling)) == ([8, 9, 10, 11, 12, 13, 14], "siblings")
    assert draft_of(*texts([5, 6, 7], archive=([4, 5, 6, 7, 8, 9],))) == ([8, 9], "earlier")


def test_other_prompts_and_written_over_text_are_not_drafted_from() -> None:
    state, text = texts([5, 6, 7])
    learn(text, text.archive_start, [4, 5, 6, 7, 8, UNKNOWN], 1, group=78)
    assert draft_of(state, text)[0] == []
    state, text = texts([5, 6, 7], archive=([4, 5, 6, 7, 8],))
    text.text[text.archive_start + 2] = 99
    assert draft_of(state, text)[0] == []


@pytest.mark.parametrize(
    ("draws", "changes", "taken", "active"),
    [
        ([50, 51, 52, 53], {}, [50, 51, 52, 53], 1),  # all drafts were right
        ([50, 51, 9, 53], {}, [50, 51, 9], 1),  # the third was wrong, and 9 is right
        ([9, 51, 52, 53], {}, [9], 1),
        ([50, 51, 52, 53], {"limit": 12}, [50, 51], 0),  # its last position
        ([50, 51, 52, 53], {"stop": 51}, [50, 51], 0),
        ([50, 51, 52, 53], {"broken": 1}, [50, BROKEN], 0),
        ([50, 51, 52, 53], {"rows": 3}, [50, 51, 52], 1),  # two drafts, and what they led to
    ],
)
def test_draws_count_up_to_the_first_that_the_draft_had_not(
    draws: list[int], changes: dict[str, int], taken: list[int], active: int
) -> None:
    state, text = texts(list(range(11)))
    state.limit[0] = changes.get("limit", 39)
    state.stops[:2] = torch.tensor([1, changes.get("stop", 999)])
    tables = torch.arange(30).view(3, 10).int()
    state.tables.copy_(tables)
    guesses = torch.full((SLOTS, MAX_DRAFT), 60).int()
    guesses[0, :3] = torch.tensor([50, 51, 52])
    drafts = Drafts(guesses, torch.tensor([3, 0, 0]).int(), torch.tensor([2, 0, 0]).int())
    rows = torch.arange(SLOTS)
    size = changes.get("rows", 12)
    inputs = verify_inputs(state, text, drafts, rows, 4, 4, size)
    queries = min(4, size, changes.get("limit", 39) - 10)
    assert inputs.queries.tolist() == [queries, 0, 0]
    assert inputs.lengths.tolist() == [10 + queries, 0, 0]
    assert inputs.token_ids[:queries].tolist() == [10, 50, 51, 52][:queries]
    assert inputs.positions[:queries].tolist() == list(range(10, 10 + queries))
    assert inputs.slots.tolist() == [10, 11, 12, 13][:queries] + [-1] * (size - queries)
    assert inputs.keys.tolist() == [10 + queries] * queries + [0] * (size - queries)
    assert inputs.first.tolist() == [0, queries, queries]

    lines = torch.zeros(4, SLOTS * 4)
    out = Verified(lines.int(), lines, torch.zeros(4, SLOTS).int(), torch.zeros(1).int())
    lse = torch.zeros(size)
    if "broken" in changes:
        lse[changes["broken"]] = torch.nan
    tokens, logprobs = torch.tensor([*draws, *[0] * 8])[:size], torch.arange(float(size))
    take_verified(state, text, drafts, inputs, rows, tokens, logprobs, lse, out, 4)
    assert out.tokens[0].tolist() == taken + [NOT_DRAWN] * (12 - len(taken))
    assert out.logprobs[0, : len(taken)].tolist() == list(range(len(taken)))
    assert out.offers[0, 0] == queries - 1 + 8 * 2 + 32 * (draws[0] == 50) + 64
    assert int(out.count) == 1
    assert (state.position[0], state.active[0]) == (10 + len(taken), active)
    if BROKEN not in taken:
        assert state.token[0] == taken[-1]
        assert text.text[11 : 11 + len(taken)].tolist() == taken
    # An eighth of the way to 256 times whether the first token of the draft was right.
    after = 192 + (256 - 192) // 8 if draws[0] == 50 else 192 - 192 // 8
    assert text.quality.tolist() == [after, 192, 192]


def test_the_hopper_kernels_do_what_the_references_do() -> None:
    """Triton's interpreter runs them on the CPU, in a process of its own."""
    pytest.importorskip("triton", reason="it is there on Linux alone")
    program = Path(__file__).with_name("interpreted_verify.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    different, drafted = json.loads(done.stdout)
    assert different == []
    assert drafted > 50, "tokens of drafts that were drawn"
