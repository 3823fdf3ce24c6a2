"""A look ahead at the machine that makes the runs of a study: its memory and its kind of card.

A run that finds less memory than it needs is trained in smaller micro-batches, which changes its
bits: so what runs beside it would show in its results. And a start that is trained again on another
kind of card may get other weights than those that earlier runs began from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from benchmarks.study.plan import PlannedRun
from benchmarks.study.results import Results

from jetrl.memory.device import free_bytes
from jetrl.memory.plan import GIB, OtherModels, Workload, memory_plan
from jetrl.session.building import model_config


def room_of(cards: Sequence[str]) -> int | None:
    """Return the bytes of the smallest card, or those that the CPU has free; None: not known.

    Args:
        cards: The GPUs of the study; none: it runs on the CPU.
    """
    if not cards:
        return free_bytes("cpu")
    visible = range(torch.cuda.device_count())
    return min((torch.cuda.get_device_properties(n).total_memory for n in visible), default=None)


def room_warning(runs: Sequence[PlannedRun], jobs: int, num_cards: int, room: int | None) -> str:
    """Return a warning about runs side by side that may need more memory than the device has.

    The warning is empty where they fit.

    Args:
        runs: The runs that are left to do.
        jobs: How many are made at once on a card, or on the CPU.
        num_cards: The number of cards; 0: the runs are made on the CPU.
        room: The bytes of a card, or of the CPU; None: not known.

    Raises:
        UserError: A model of the runs cannot be read.
    """
    needs = _needs(runs, "cuda" if num_cards else "cpu")
    needs.sort(key=lambda one: -one[0])
    places = max(num_cards, 1)

    def held(count: int) -> int:
        """Return the bytes of so many runs a card, the largest ones, dealt out evenly."""
        largest = [need for need, _ in needs[: count * places]]
        return -(-sum(largest) // places)

    if room is None or held(jobs) <= room:
        return ""
    fitting = max((count for count in range(1, jobs) if held(count) <= room), default=0)
    need, name = needs[0]
    fewer = f"take --jobs {fitting} or" if fitting else "not even one is sure to fit, so take"
    return (
        f"warning: {min(jobs, len(needs))} runs at once may need {held(jobs) / GIB:.1f} GiB, and "
        f"{'a card' if num_cards else 'the CPU'} has {room / GIB:.1f} ({name} alone "
        f"{need / GIB:.1f}, with prompts as long as answers): {fewer} a smaller "
        "train.tokens_per_micro_batch. A run that finds too little makes smaller micro-batches by "
        "itself, which changes its bits"
    )


def kind_warning(runs: Sequence[PlannedRun], results: Results, cards: Sequence[str]) -> str:
    """Return a warning about starts that would be trained again on another kind of card.

    The warning is empty where there is no such start.

    Args:
        runs: The runs of a study that are worked off, those that are done among them.
        results: The results of the study so far.
        cards: The GPUs of the study; none: it runs on the CPU.
    """
    numbers = range(torch.cuda.device_count()) if cards else ()
    here = sorted({torch.cuda.get_device_name(number) for number in numbers}) or ["CPU"]
    starts = {run.name: run.start for run in runs if run.start is not None}
    begun = {start.name for name, start in starts.items() if name in results.runs}
    again = {
        start.name
        for name, start in starts.items()
        if name not in results.runs and not (start.path / "model" / "config.json").is_file()
    }
    if not begun & again or set(here) & set(results.devices):
        return ""
    return (
        f"warning: {results.path} has runs of {', '.join(results.devices)}, and this machine has "
        f"{', '.join(here)}: if {', '.join(sorted(begun & again))} gets other weights when it is "
        "trained again here, the runs that begin from it fail. Take the same kind of card, or put "
        "the start back from a copy"
    )


def _needs(runs: Sequence[PlannedRun], device: str) -> list[tuple[int, str]]:
    """Return the bytes that each run needs, with its name."""
    known: dict[tuple[object, ...], int] = {}
    needs = []
    for run in runs:
        kind = (run.arm, *run.point.values())  # seeds change nothing
        if kind not in known:
            config = model_config(run.start.settings if run.start else run.settings)
            others, load = OtherModels.of(run.settings), Workload.of(run.settings, config)
            plan = memory_plan(run.settings, config, others, load, device=device)
            known[kind] = plan.needed
        needs.append((known[kind], run.name))
    return needs
