"""A study recognises what earlier sittings left, also where defaults have changed since."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.study.definition import Definition, definition_of
from benchmarks.study.plan import PlannedRun, planned_runs
from benchmarks.study.results import Results, RunResult
from benchmarks.study.scheduler import Item, look

from jetrl.errors import UserError


def planned(out: Path, **train: Any) -> tuple[PlannedRun, Definition]:
    """A run of a study of one arm that gives the settings of [train] these values."""
    tree = {
        "study": {"name": "s", "seeds": [0], "out": str(out)},
        "settings": {"train": train},
        "arms": {"one": {}},
    }
    definition = definition_of(tree, out / "s.toml")
    (run,) = planned_runs(definition)
    return run, definition


def result_of(run: PlannedRun, **more: Any) -> RunResult:
    """A result of a run that finished."""
    known = {"name": run.name, "point": {}, "arm": run.arm, "seed": run.seed, "steps": 1}
    return RunResult(**{**known, "digest": run.digest, "end": "finished", **more})


@pytest.mark.parametrize(
    ("digest", "said", "is_known"),
    [
        ("same", "", True),  # a file of before there was `said`
        ("same", "other", True),
        ("other", "same", True),  # a default has changed
        ("other", "other", False),
        ("other", "", False),
    ],
)
def test_a_result_is_known_by_its_settings_or_by_what_was_said(
    tmp_path: Path, digest: str, said: str, is_known: bool
) -> None:
    run, definition = planned(tmp_path, lr=3e-4)
    result = result_of(
        run,
        digest=run.digest if digest == "same" else "0",
        said={"same": run.said, "other": "0", "": ""}[said],
    )
    results = Results(tmp_path / "r.json", "s.toml", definition.tree, runs={run.name: result})
    item = Item(run)
    if is_known:
        look(item, definition, results)
        assert item.stage == "done"
    else:
        with pytest.raises(UserError, match="made with other settings"):
            look(item, definition, results)
