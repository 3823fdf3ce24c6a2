"""The printed table of a memory plan adds up to what messages say that a run needs."""

from __future__ import annotations

import re

import pytest

from jetrl.errors import UserError
from jetrl.memory.activations import PlannedMicroBatch
from jetrl.memory.fitting import check_fits, plan_table
from jetrl.memory.plan import GIB, MemoryPlan, OtherModels, Row, Workload
from jetrl.session.building import model_config
from jetrl.settings.loading import load_config

BATCH = PlannedMicroBatch(16, 16, several=False, shared=False)


def test_rows_and_reserve_add_up_to_what_is_needed() -> None:
    rows = (
        Row("weights", {"rollout": 2 * GIB, "backward": 2 * GIB}),
        Row("pages", {"rollout": GIB}),
        Row("crumbs", {"rollout": GIB // 3000, "backward": 1}),
    )
    plan = MemoryPlan(rows, BATCH, reserve=GIB // 2)
    assert plan.needed == 3 * GIB + GIB // 3000 + GIB // 2
    assert [(line[0], *(cell.strip() for cell in line[1:])) for line in plan_table(plan)] == [
        ("GiB", "rollout", "backward"),
        ("weights", "2.000", "2.000"),
        ("pages", "1.000", ""),
        ("held", "3.000", "2.000"),
        ("left for kernels' code and holes", "0.500", "0.500"),
        ("needed", "3.500", "2.500"),
    ]


def test_the_row_that_names_a_refused_runs_need_has_the_number_of_the_message() -> None:
    settings = load_config("demo")
    config = model_config(settings)
    load = Workload.of(settings, config)
    with pytest.raises(UserError) as error:
        check_fits(settings, config, OtherModels(), load, "cuda", int(0.5 * GIB), cards=2)
    text = str(error.value)
    said = re.search(r"it needs ([0-9.]+) GiB on each", text)
    (row,) = (line for line in text.splitlines() if line.strip().startswith("needed"))
    assert said is not None
    assert round(max(map(float, row.split()[1:])), 1) == float(said[1])
