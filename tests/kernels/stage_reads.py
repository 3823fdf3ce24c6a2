"""Find reads of shared memory that may still be under way when a stage is given back for a copy.

A warp that multiplies reads a stage by ordinary loads, and a barrier of its warps and an arrival on
an mbarrier then let another warp ask for a bulk copy over it. A bulk copy does not wait for loads
that have begun; so each has to have ended before the barrier: an instruction in front of it waited
for the load's scoreboard, or for a fence behind the load (docs/notes-gemm.md, "When a stage may be
copied over"). Whether that is so, the machine code alone says.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;?\s*/\* 0x[0-9a-f]{16} \*/")
CONTROL = re.compile(r"/\* 0x([0-9a-f]{16}) \*/")
READ = re.compile(r"\bLDSM?\b")
OFFSET = re.compile(r"0x([0-9a-f]+)\]")
NONE = 7  # the number of no scoreboard

Reads = frozenset[tuple[str, int]]  # loads under way: address and scoreboard
Fences = frozenset[tuple[int, str]]  # a fence's scoreboard, and a load in front of the fence


@dataclass(frozen=True)
class Instruction:
    """An instruction of machine code; scoreboards that it frees and awaits (NONE: frees none)."""

    address: str  # in hexadecimal digits
    text: str
    writes: int  # the scoreboard that is free when its result is there
    reads: int  # the scoreboard that is free when its operands have been read
    waits: int  # a bit for each scoreboard that it waits for


def disassembled(cubin: bytes, nvdisasm: str) -> str:
    """Return a kernel's machine code as text, with its encoding."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [nvdisasm, "-c", "-hex", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


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
    blocks: list[list[Instruction]] = []
    labels: dict[str, int] = {}
    begins = True
    for item in instructions(text):
        if isinstance(item, str):
            labels[item] = len(blocks)
            begins = True
            continue
        if begins:
            blocks.append([])
        blocks[-1].append(item)
        begins = re.search(r"\b(BRA|BRX|EXIT|RET)\b", item.text) is not None
    following = []
    for number, block in enumerate(blocks):
        last = block[-1].text
        targets = [labels[x] for x in re.findall(r"\.L_x_\d+", last) if x in labels]
        if not re.match(r"(BRA|BRX|EXIT|RET)\b", last):
            targets.append(number + 1)
        following.append([x for x in targets if x < len(blocks)])
    return blocks, following


def _behind(item: Instruction, reads: Reads, fences: Fences) -> tuple[Reads, Fences]:
    """Return what is under way when an instruction has waited for what it waits for."""
    fenced = {address for board, address in fences if item.waits >> board & 1}
    reads = frozenset(x for x in reads if not item.waits >> x[1] & 1 and x[0] not in fenced)
    return reads, frozenset(x for x in fences if not item.waits >> x[0] & 1)


def _issued(item: Instruction, reads: Reads, fences: Fences) -> tuple[Reads, Fences]:
    """Return what is under way when an instruction has been issued."""
    if "MEMBAR" in item.text and item.reads != NONE:
        fences |= {(item.reads, address) for address, _ in reads}
    if READ.search(item.text) and item.writes != NONE:
        reads |= {(item.address, item.writes)}
    return reads, fences


def _arrives(item: Instruction) -> bool:
    """Return whether an instruction is an arrival of threads at an mbarrier."""
    return "SYNCS.ARRIVE" in item.text and "A1T0" in item.text


def reads_under_way(text: str) -> list[str]:
    """Return each arrival that gives back a stage while loads are under way, with these loads."""
    blocks, following = _blocks(text)
    entries: dict[int, tuple[Reads, Fences]] = {0: (frozenset(), frozenset())}
    changed = [0] if blocks else []
    while changed:
        number = changed.pop()
        state = entries[number]
        for item in blocks[number]:
            state = _issued(item, *_behind(item, *state))
        for target in following[number]:
            reads, fences = entries.get(target, (frozenset(), frozenset()))
            joined = reads | state[0], fences | state[1]
            if entries.get(target) != joined:
                entries[target] = joined
                changed.append(target)
    found = []
    for number, state in sorted(entries.items()):
        at_barrier: Reads = frozenset()
        for item in blocks[number]:
            state = _behind(item, *state)
            if re.search(r"\bBAR\.", item.text):
                at_barrier = state[0]
            elif _arrives(item):
                loads = " ".join(sorted(address for address, _ in at_barrier | state[0]))
                found += [f"{item.address} {item.text}: {loads}"] if loads else []
            state = _issued(item, *state)
    return found


def barrier_of(arrival: str) -> int:
    """Return the bytes from the address in an arrival's registers to its barrier."""
    offset = OFFSET.search(arrival)
    return int(offset[1], 16) if offset else 0


def last_barrier(text: str) -> int:
    """Return the largest offset of a barrier at which threads arrive."""
    items = [item for item in instructions(text) if isinstance(item, Instruction)]
    return max(barrier_of(item.text) for item in items if _arrives(item))
