from pathlib import Path

import pytest
from tools.documents.metrics import KNOWN_AS, render_metrics_document

from jetrl.runs.metrics import (
    METRICS,
    check_metrics,
    eval_metric,
    find_metric,
    part_metric,
    reproducible,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_document_is_the_rendered_registry():
    assert DOCUMENT.read_text(encoding="utf-8") == render_metrics_document()


def test_names_are_unique_and_those_of_other_systems_are_of_registered_metrics():
    names = {metric.name for metric in METRICS}
    assert len(names) == len(METRICS)
    assert all(known.keys() <= names for known in KNOWN_AS.values())


@pytest.mark.parametrize(
    "name, value, error, words",
    [
        ("eval/x/pass_at_4", 1.0, ValueError, "unknown metric"),
        ("eval/a/b/mean", 1.0, ValueError, "unknown metric"),
        ("policy/entropie", 1.0, ValueError, "did you mean policy/entropy"),
        ("reward/mean", "3", TypeError, "reward/mean"),
        ("reward/mean", True, TypeError, "reward/mean"),
    ],
)
def test_a_metric_that_is_not_registered_or_no_number_is_refused(name, value, error, words):
    with pytest.raises(error, match=words):
        check_metrics({name: value})


@pytest.mark.parametrize("task", ["reasoning_gym:chain sum", "/home/me/my tasks.py:Sum", "", "<b>"])
def test_any_task_name_makes_a_registered_name(task):
    assert find_metric(eval_metric(task, "mean")) is not None
    assert find_metric(part_metric(task)) is not None
    assert eval_metric("tasks/sum.py:Sum", "mean") == "eval/sum.py:Sum/mean"


def test_reproducible_leaves_out_what_the_machine_decides():
    line = {"step": 1, "time": 2.0, "timing/step_s": 3.0, "memory/peak_gib": 1.0}
    assert reproducible(line | {"reward/mean": 0.5}) == {"reward/mean": 0.5}
