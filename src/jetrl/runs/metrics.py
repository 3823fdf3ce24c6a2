"""Registry of metrics: the name, unit and meaning of everything that a run measures.

An unregistered name is refused, so that plots and users' scripts can rely on names; `eval_metric`,
`task_metric` and `part_metric` fill in free parts such as <task>. A line of metrics.txt has name,
unit and meaning, two blanks apart. docs/metrics.md is generated from it (tools.documents).
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from jetrl.types import Metrics

FREE = r"[^/<>\s]+"
"""Pattern of <task> and <name>: a path component without blanks or angle brackets."""

MEASURED = ("speculation", "timing", "throughput", "distributed", "memory")
"""Times, speeds and memory; all others have the same bits when a run is repeated on the CPU."""


class Metric(NamedTuple):
    name: str
    unit: str
    meaning: str

    @property
    def measured(self) -> bool:
        return self.name.split("/")[0] in MEASURED

    def matches(self, name: str) -> bool:
        """Return True if a name is this metric, or matches its placeholder."""
        return re.fullmatch(re.sub(r"<\w+>", lambda _: FREE, self.name), name) is not None


_TABLE = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").replace("\n    ", " ")
METRICS = tuple(
    Metric(name=name, unit=unit, meaning=meaning)
    for name, unit, meaning in (line.split("  ", 2) for line in _TABLE.splitlines())
)


@functools.lru_cache(maxsize=4096)  # called for each metric of each line of a long run
def find_metric(name: str) -> Metric | None:
    return next((metric for metric in METRICS if metric.matches(name)), None)


def check_metrics(metrics: Metrics) -> Metrics:
    """Return the metrics as Python numbers; raise ValueError if a name is not registered."""
    checked: Metrics = {}
    for name, value in metrics.items():
        if find_metric(name) is None:
            near = difflib.get_close_matches(name, [m.name for m in METRICS], n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"unknown metric {name!r}: names are fixed in runs/metrics.txt{hint}")
        if isinstance(value, bool | str) or not hasattr(value, "__float__"):
            raise TypeError(f"metric {name}: {value!r} is not a number")
        checked[name] = value if type(value) is int else float(value)
    return checked


def reproducible(metrics: Metrics) -> Metrics:
    """Return the metrics that a repeated or resumed run on the CPU must reproduce bit for bit."""
    known = {name: find_metric(name) for name in metrics}
    return {name: metrics[name] for name, metric in known.items() if metric and not metric.measured}


def eval_metric(task: str, what: str) -> str:
    """Return `eval/<task>/<what>`; the task `my/tasks.py:Sum` becomes `tasks.py:Sum`."""
    return f"eval/{_component(task.rpartition('/')[2])}/{what}"


def is_eval_mean(name: str) -> bool:
    return name.startswith("eval/") and name.endswith("/mean")


def outside_metric(mean: str) -> str:
    """Return the name of the number of rewards below 0 or above 1 in a mean on the eval split."""
    return f"{mean.removesuffix('mean')}outside_0_1"


def is_share(name: str, records: Iterable[Metrics]) -> bool:
    """Return True for a mean reward on the eval split whose rewards were all from 0 to 1."""
    outside = outside_metric(name)
    having = [record for record in records if name in record]
    return is_eval_mean(name) and all(0 <= r[name] <= 1 and outside not in r for r in having)


def task_metric(what: str, task: str) -> str:
    """Return the metric name `<what>/task/<task>` of a task in a mixture."""
    return f"{what}/task/{_component(task.rpartition('/')[2])}"


def part_metric(part: str) -> str:
    """Return `reward/part/<part>`, the mean of `Score.parts[part]`."""
    return f"reward/part/{_component(part)}"


def _component(text: str) -> str:
    return re.sub(r"[/<>\s]", "_", text) or "_"
