"""A queue of work: the runs of one study, or of several whose runs share the places.

Each entry of a queue file (`queue_file.py`) becomes some work, and the entries of one study have
one sitting, which alone writes its results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.study.definition import Definition
from benchmarks.study.places import Part
from benchmarks.study.plan import PlannedRun, chosen, planned_runs
from benchmarks.study.progress import Progress
from benchmarks.study.queue_file import Entry
from benchmarks.study.results import Results
from benchmarks.study.sitting import Sitting

from jetrl.errors import UserError


@dataclass(frozen=True)
class Work:
    """The runs of a study that an entry of the queue names.

    Attributes:
        definition: The definition of the study.
        results: Its results so far.
        runs: The runs to work off.
    """

    definition: Definition
    results: Results
    runs: Sequence[PlannedRun]


def work_of(entry: Entry, definition: Definition, results: Results) -> Work:
    """Return the runs that an entry of the queue names.

    Args:
        entry: The entry.
        definition: The definition of its study.
        results: The results of the study so far.

    Raises:
        UserError: Settings of a run are refused, or the study has nothing of a name in `only`.
    """
    runs = planned_runs(definition)
    try:
        return Work(definition, results, chosen(runs, entry.only))
    except UserError as error:
        where = f"{entry.place}: {entry.file}: " if entry.place else ""
        raise UserError(f"{where}{error}") from None


def parts_of(queue: Sequence[Work], progress: Progress) -> list[Part]:
    """Return the parts of a queue, with one sitting for each study.

    Args:
        queue: The runs, in the order in which places go to them.
        progress: The console; its lines name the study where there are several.

    Raises:
        UserError: Results, or a run directory, are of other settings; or two studies have the same
            folder of runs, or the same results file.
    """
    studies: dict[str, list[Work]] = {}
    for work in queue:
        studies.setdefault(str(work.definition.source), []).append(work)
    _check_apart([own[0].definition for own in studies.values()])
    sittings = {}
    for source, own in studies.items():
        definition, results = own[0].definition, own[0].results
        runs = {run.name: run for work in own for run in work.runs}
        tell = progress.event if len(studies) == 1 else _naming(definition.study.name, progress)
        sittings[source] = Sitting(definition, [*runs.values()], results, tell)
    return [
        Part(sittings[str(work.definition.source)], frozenset(run.name for run in work.runs))
        for work in queue
    ]


def _check_apart(definitions: Sequence[Definition]) -> None:
    """Check that no two studies write the same files.

    Raises:
        UserError: Two do.
    """
    sources: dict[Path, Path] = {}
    for definition in definitions:
        for path in (definition.out.absolute(), definition.results_file.absolute()):
            if path in sources:
                raise UserError(
                    f"{sources[path]} and {definition.source} both write {path}; give one of them "
                    "another study.name, study.out or study.results"
                )
            sources[path] = definition.source


def _naming(study: str, progress: Progress) -> Callable[[str], None]:
    """Return a function that prints a line with the name of a study before it."""
    return lambda text: progress.event(f"{study}: {text}")
