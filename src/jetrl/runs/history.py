"""The totals of a run so far, for resuming, listing and the report's headline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from jetrl.runs.attempts import Attempt
from jetrl.runs.digest import last_digest
from jetrl.runs.format import number, percent
from jetrl.runs.metrics import is_eval_mean, is_share
from jetrl.runs.storage import Record
from jetrl.types import Metrics


@dataclass(frozen=True)
class Change:
    """The first and last value of a metric.

    Attributes:
        is_share: The values are shares of 1, and shown as percentages.
    """

    name: str
    first_step: int
    first: float
    last_step: int
    last: float
    is_share: bool = False

    @property
    def ends(self) -> tuple[str, str]:
        """Return the first and last value as text."""
        form = percent if self.is_share else number
        return form(self.first), form(self.last)


@dataclass(frozen=True)
class RunHistory:
    """The totals of a run.

    Attributes:
        last_step: The last RL step; -1 if there is none.
        num_steps: RL steps, without an evaluation before the first step (step 0).
        elapsed_s: Wall time of all attempts; a killed attempt counts up to its last metric.
        num_tokens: Tokens whose log-probs of sampler and trainer were compared; None: none were.
        num_different: Compared tokens whose log-probs differ.
        digest: After the last step (runs/digest.py); "" if the run has none.
    """

    last_step: int = -1
    num_steps: int = 0
    num_sft_steps: int = 0
    elapsed_s: float = 0.0
    started: float | None = None
    num_tokens: int | None = None
    num_different: int | None = None
    reward: Change | None = None
    evals: tuple[Change, ...] = ()
    digest: str = ""


def history_of(records: Sequence[Record], attempts: Sequence[Attempt] = ()) -> RunHistory:
    rl, sft = in_phase(records, "rl"), in_phase(records, "sft")
    eval_names = sorted({name for record in rl for name in record if is_eval_mean(name)})
    evals = (change_of(rl, name) for name in eval_names)
    times = [float(r["time"]) for r in records if "time" in r]
    return RunHistory(
        last_step=max((r["step"] for r in rl), default=-1),
        num_steps=sum(r["step"] > 0 for r in rl),
        num_sft_steps=sum("sft/loss" in r for r in sft),
        elapsed_s=_elapsed(times, attempts),
        started=min([a.started for a in attempts] + times, default=None),
        num_tokens=_total(rl, "mismatch/num_tokens"),
        num_different=_total(rl, "mismatch/num_different"),
        reward=change_of(rl, "reward/mean"),
        evals=tuple(change for change in evals if change is not None),
        digest=last_digest(records),
    )


def summary_of(history: RunHistory) -> Metrics:
    """Return the summary of a run for trackers: totals, and first and last rewards."""
    summary: Metrics = {"steps": history.num_steps, "wall_time_s": history.elapsed_s}
    if history.num_different is not None:
        summary["mismatch/num_different"] = history.num_different
    for change in (history.reward, *history.evals):
        if change is not None:
            summary |= {f"{change.name}/first": change.first, f"{change.name}/last": change.last}
    return summary


def change_of(records: Sequence[Record], name: str) -> Change | None:
    """Return the first and last value of a metric; None if no record has it."""
    having = [r for r in records if name in r]
    if not having:
        return None
    first, last = having[0], having[-1]
    return Change(
        name=name,
        first_step=first["step"],
        first=first[name],
        last_step=last["step"],
        last=last[name],
        is_share=is_share(name, having),
    )


def phase_of(record: Record) -> str:
    """Return the phase of a line of metrics.jsonl: `sft` or `rl`."""
    return str(record.get("phase", "rl"))


def in_phase(records: Sequence[Record], phase: str) -> list[Record]:
    return [record for record in records if phase_of(record) == phase]


def values_of(records: Iterable[Record], name: str) -> list[Any]:
    return [record[name] for record in records if name in record]


def mean(values: Iterable[float]) -> float:
    """Return the mean of at least one value; unlike `fmean`, not finite if the sum is not."""
    listed = [float(value) for value in values]
    try:
        return fmean(listed)
    except (OverflowError, ValueError):
        return sum(listed) / len(listed)


def _total(records: Sequence[Record], name: str) -> int | None:
    values = values_of(records, name)
    return int(sum(values)) if values else None


def _elapsed(times: Sequence[float], attempts: Sequence[Attempt]) -> float:
    if not attempts:
        return max(times) - min(times) if times else 0.0
    total = 0.0
    for index, attempt in enumerate(attempts):
        following = attempts[index + 1].started if index + 1 < len(attempts) else float("inf")
        seen = [t for t in times if attempt.started <= t < following]
        end = attempt.ended if attempt.ended is not None else max(seen, default=attempt.started)
        total += max(0.0, end - attempt.started)
    return total
