"""What a run has done so far, in numbers: totals for resuming, listing and the report's
headline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jetrl.runs.attempts import Attempt


@dataclass(frozen=True)
class Change:
    """A quantity's first and last value, with the steps they were measured at."""

    name: str
    first_step: int
    first: float
    last_step: int
    last: float


@dataclass(frozen=True)
class RunHistory:
    """Totals of a run. Tokens are None where no step measured the mismatch (then nothing is
    claimed).

    last_step: the last RL step, -1 if none. num_steps, num_sft_steps: lines of each phase; an
    evaluation before the first step (step 0) is not a step. elapsed_s: wall time over all attempts;
    of a killed one, up to its last metric. evals: the mean of each evaluated task, in the RL phase.
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


def history_of(records: Sequence[dict[str, Any]], attempts: Sequence[Attempt] = ()) -> RunHistory:
    """The history told by lines of metrics.jsonl (in order) and the attempts."""
    rl = [r for r in records if r.get("phase", "rl") == "rl"]
    sft = [r for r in records if r.get("phase", "rl") == "sft"]
    eval_names = sorted({n for r in rl for n in r if n.startswith("eval/") and n.endswith("/mean")})
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
    )


def summary_of(history: RunHistory) -> dict[str, float]:
    """A run in a few numbers, for trackers: rewards at its begin and end, and the last of each
    evaluation, by their metric's names; steps, and whether sampler and trainer agreed."""
    found: dict[str, float] = {"steps": history.num_steps, "wall_time_s": history.elapsed_s}
    if history.num_different is not None:
        found["mismatch/num_different"] = history.num_different
    for change in (history.reward, *history.evals):
        if change is not None:
            found[f"{change.name}/first"] = change.first
            found[f"{change.name}/last"] = change.last
    return found


def change_of(records: Sequence[dict[str, Any]], name: str) -> Change | None:
    """First and last value of a metric; None if it was never measured."""
    having = [r for r in records if name in r]
    if not having:
        return None
    first, last = having[0], having[-1]
    return Change(name, first["step"], first[name], last["step"], last[name])


def _total(records: Sequence[dict[str, Any]], name: str) -> int | None:
    values = [r[name] for r in records if name in r]
    return int(sum(values)) if values else None


def _elapsed(times: Sequence[float], attempts: Sequence[Attempt]) -> float:
    if not attempts:
        return max(times) - min(times) if times else 0.0
    total = 0.0
    for number, attempt in enumerate(attempts):
        following = attempts[number + 1].started if number + 1 < len(attempts) else float("inf")
        seen = [t for t in times if attempt.started <= t < following]
        end = attempt.ended if attempt.ended is not None else max(seen, default=attempt.started)
        total += max(0.0, end - attempt.started)
    return total
