"""The printed table of a memory plan, in GiB: a column for each moment, a row for what is held."""

from __future__ import annotations

from collections.abc import Mapping

from jetrl.memory.plan import GIB, MOMENTS, MemoryPlan, Moment

_LEAST = GIB / 2000  # bytes: less is 0.000 in the table


def plan_table(plan: MemoryPlan) -> list[tuple[str, ...]]:
    """Return the table of a plan as lines of cells: a head, the rows, and what the run needs.

    Rows that would be 0.000 in every column are left out; the sums count them.
    """
    moments = [moment for moment in MOMENTS if plan.at(moment)]

    def cells(what: str, sizes: Mapping[Moment, int]) -> tuple[str, ...]:
        shown = (f"{sizes[m] / GIB:9.3f}" if sizes.get(m) else " " * 9 for m in moments)
        return (what, *shown)

    head = ("GiB", *(f"{moment:>9}" for moment in moments))
    rows = [cells(row.what, row.bytes) for row in plan.rows if max(row.bytes.values()) >= _LEAST]
    held = cells("held", {moment: plan.at(moment) for moment in moments})
    if not plan.reserve:
        return [head, *rows, held]
    reserve = cells("left for kernels' code and holes", dict.fromkeys(moments, plan.reserve))
    needed = cells("needed", {moment: plan.at(moment) + plan.reserve for moment in moments})
    return [head, *rows, held, reserve, needed]


def shown(plan: MemoryPlan, indent: str = "  ") -> str:
    """Return the table of a plan as text."""
    lines = plan_table(plan)
    width = max(len(cells[0]) for cells in lines)
    return "\n".join(
        (indent + "  ".join((cells[0].ljust(width), *cells[1:]))).rstrip() for cells in lines
    )
