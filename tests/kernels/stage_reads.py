"""Find reads of shared memory that may still be under way when a stage is given back for a copy.

A warp that multiplies reads a stage by ordinary loads, and a barrier of its warps and an arrival on
an mbarrier then let another warp ask for a bulk copy over it. A bulk copy does not wait for loads
that have begun; so each has to have ended before the barrier: an instruction in front of it waited
for the load's scoreboard, or for a fence behind the load (docs/kernels.md, "When a stage may be
copied over"). Only the machine code says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;?\s*/\* 0x[0-9a-f]{16} \*/")
CONTROL = re.compile(r"/\* 0x([0-9a-f]{16}) \*/")
LEAVES = r"\b(BRA|BRX|EXIT|RET)\b"
NONE = 7  # the number of no scoreboard


class Instruction(NamedTuple):
    """An instruction of machine code, with its scoreboards."""

    address: str  # in hexadecimal digits
    text: str
    writes: int  # the scoreboard that is free when its result is there
    reads: int  # the scoreboard that is free when its operands have been read
    waits: int  # a bit for each scoreboard that it waits for


class State(NamedTuple):
    """The loads and fences that may be under way at an instruction."""

    reads: frozenset[tuple[str, int]] = frozenset()  # loads: address and scoreboard
    fences: frozenset[tuple[int, str]] = frozenset()  # a fence's scoreboard, a load before it


def instructions(text: str) -> Iterator[Instruction | str]:
    """Yield the instructions of machine code and, as strings, its labels."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if label := re.match(r"(\.L_x_\d+):", line):
            yield label[1]
        elif found := LINE.match(line):
            # Bits 41 on of the second word: 4 of a delay, a hint, two scoreboards, those awaited.
            control = CONTROL.search(lines[number + 1])
            assert control, line
            bits = int(control[1], 16) >> 46
            yield Instruction(found[1], found[2], bits & 7, bits >> 3 & 7, bits >> 6 & 63)


def _blocks(text: str) -> tuple[list[list[Instruction]], list[list[int]]]:
    """Return the code in pieces without branches, and the pieces that may follow each."""
    blocks: list[list[Instruction]] = [[]]
    labels: dict[str, int] = {}
    for item in instructions(text):
        ended = bool(blocks[-1]) and re.search(LEAVES, blocks[-1][-1].text)
        if ended or (isinstance(item, str) and blocks[-1]):
            blocks.append([])
        if isinstance(item, str):
            labels[item] = len(blocks) - 1
        else:
            blocks[-1].append(item)
    following = []
    for number, block in enumerate(blocks):
        last = block[-1].text if block else ""
        targets = [labels[x] for x in re.findall(r"\.L_x_\d+", last) if x in labels]
        falls = number + 1 < len(blocks) and not re.match(LEAVES, last)
        following.append(targets + [number + 1] * falls)
    return blocks, following


def _behind(item: Instruction, state: State) -> State:
    """Return what is under way when an instruction has waited for what it waits for."""
    fenced = {address for board, address in state.fences if item.waits >> board & 1}
    reads = (x for x in state.reads if not item.waits >> x[1] & 1 and x[0] not in fenced)
    return State(frozenset(reads), frozenset(x for x in state.fences if not item.waits >> x[0] & 1))


def _issued(item: Instruction, state: State) -> State:
    """Return what is under way when an instruction has been issued."""
    reads, fences = state
    if "MEMBAR" in item.text and item.reads != NONE:
        fences |= {(item.reads, address) for address, _ in reads}
    if re.search(r"\bLDSM?\b", item.text) and item.writes != NONE:
        reads |= {(item.address, item.writes)}
    return State(reads, fences)


def _arrives(item: Instruction) -> bool:
    return "SYNCS.ARRIVE" in item.text and "A1T0" in item.text


def reads_under_way(text: str) -> list[str]:
    """Return each arrival that gives back a stage while loads are under way, with these loads."""
    blocks, following = _blocks(text)
    entries, changed = {0: State()}, [0]
    while changed:
        number = changed.pop()
        state = entries[number]
        for item in blocks[number]:
            state = _issued(item, _behind(item, state))
        for target in following[number]:
            known = entries.get(target, State())
            joined = State(known.reads | state.reads, known.fences | state.fences)
            if entries.get(target) != joined:
                entries[target] = joined
                changed.append(target)
    found = []
    for number, state in sorted(entries.items()):
        at_barrier = State().reads
        for item in blocks[number]:
            state = _behind(item, state)
            if re.search(r"\bBAR\.", item.text):
                at_barrier = state.reads
            elif _arrives(item):
                loads = " ".join(sorted(address for address, _ in at_barrier | state.reads))
                found += [f"{item.address} {item.text}: {loads}"] if loads else []
            state = _issued(item, state)
    return found


def barrier_of(arrival: str) -> int:
    """Return the bytes from the address in an arrival's registers to its barrier."""
    # Barriers that a loop takes in turn have the offset of the first.
    offset = re.search(r"0x([0-9a-f]+)\]", arrival)
    return int(offset[1], 16) if offset else 0


def last_barrier(text: str) -> int:
    """Return the largest offset of a barrier at which threads arrive."""
    items = [item for item in instructions(text) if isinstance(item, Instruction)]
    return max(barrier_of(item.text) for item in items if _arrives(item))
