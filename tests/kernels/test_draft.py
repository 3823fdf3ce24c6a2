"""Drafts from text and their verification: the reference, on states that are easy to follow."""

from __future__ import annotations

import torch
from tests.kernels.interpreted import interpreted

from jetrl.kernels.decode_state import LAG, SOURCES, UNKNOWN, DecodeState, DraftText
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


def test_the_hopper_kernels_do_what_the_references_do() -> None:
    """Triton's interpreter runs them on the CPU, in a process of its own."""
    different, drafted = interpreted("interpreted_verify.py")
    assert different == []
    assert drafted > 50, "tokens of drafts that were drawn"
