"""Study files: what they make, and what they refuse, by key and line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.study.definition import Definition, read_definition
from benchmarks.study.plan import chosen, planned_runs
from benchmarks.study.results import request_of

from jetrl.errors import UserError

Read = Callable[[str], Definition]
HEAD = """\
[study]
name = "mine"
seeds = [0, 3]
[settings]
recipe = "demo"
train.lr = 1e-3
"""
ARMS = """\
[arms.bf16]
precision.preset = "bf16"
[arms."mixed+tis"]
precision.preset = "mixed"
algorithm.correction = "tis"
label = "mixed with TIS"
"""


@pytest.fixture
def study(tmp_path: Path) -> Read:
    """Reads a study file of the given text."""

    def read(text: str) -> Definition:
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return read_definition(path)

    return read


def test_runs_are_grid_times_arms_times_seeds(study: Read) -> None:
    definition = study(
        HEAD
        + "[grid.length.short]\nrollout.max_tokens = 8\n"
        + "[grid.length.long]\nrollout.max_tokens = 16\ntrain.lr = 2e-3\n"
        + ARMS
    )
    runs = planned_runs(definition)
    names = ["short-bf16-s0", "short-mixed+tis-s0", "long-bf16-s0", "long-mixed+tis-s0"]
    assert [run.name for run in runs[:4]] == names
    assert len({run.digest for run in runs}) == len(runs) == 8
    last = runs[-1].settings
    named = (last.run.seed, last.run.name, last.run.dir)
    assert named == (3, "long-mixed+tis-s3", "studies/mine/runs")
    assert (last.rollout.max_tokens, last.train.lr, last.algorithm.correction) == (16, 2e-3, "tis")
    assert definition.reference == "bf16"
    assert definition.label("mixed+tis") == "mixed with TIS"
    assert [run.name for run in chosen(runs, ["bf16", "length=long", "seed=3"])] == ["long-bf16-s3"]
    with pytest.raises(UserError, match=r"--only bf61: no such arm.*bf16, mixed.tis, length=long"):
        chosen(runs, ["bf61"])


def test_a_start_is_shared_by_what_does_not_change_it(study: Read) -> None:
    """Arms and algorithms share a start; another task, or another seed, has its own."""
    definition = study(
        HEAD
        + "[start]\nsft.steps = 3\nprecision = 'fp32'\nbf16_rounding = 'dithered'\n"
        + "[grid.loss.grpo]\nalgorithm.name = 'grpo'\n[grid.loss.gspo]\nalgorithm.name = 'gspo'\n"
        + "[grid.sums.9]\ntask.options.max_operand = 9\n"
        + "[grid.sums.19]\ntask.options.max_operand = 19\n"
        + ARMS
    )
    runs = planned_runs(definition)
    starts = [run.start for run in runs]
    assert len(runs) == 16
    assert len({start.digest for start in starts if start}) == 4
    assert request_of(definition, runs[0], "finished", "", "").bf16_rounding == "dithered"
    for run in runs:
        assert run.start is not None
        assert run.settings.model.path == f"{run.start.path}/model"
        assert (run.settings.model.config, run.settings.sft.steps) == (None, 0)
        precision = run.start.settings.precision
        assert (precision.preset, precision.bf16_rounding) == ("fp32", "dithered")
        assert run.start.settings.model.config is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + "[arms]\n", "at least one arm"),
        (HEAD.replace("name", "nmae") + ARMS, "line 2: unknown key study.nmae; did you mean name"),
        (HEAD.replace("[0, 3]", "[0, 0]") + ARMS, "line 3: study.seeds = .*each one once"),
        (HEAD.replace("mine", "../up") + ARMS, "line 2: study.name = '../up'"),
        (HEAD + ARMS + "kill_after = [3, 2]\n", "line 13: .*ascending order"),
        (
            HEAD + ARMS + "".join(f"[grid.a{n}.x]\n[grid.a{n}.y]\n" for n in range(12)),
            "16,384 runs; a study has at most 10,000",
        ),
    ],
)
def test_a_wrong_key_is_named_with_its_line(study: Read, text: str, message: str) -> None:
    with pytest.raises(UserError, match=f"(?s)mine.toml.*{message}"):
        study(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"{HEAD}train.lrr = 1\n{ARMS}",
            "line 7: unknown setting train.lrr; did you mean train.lr",
        ),
        (HEAD + ARMS + "train.lr = 'high'\n", r"line 13: train.lr = .*\(settings of the run mixed"),
        (HEAD + "run.seed = 1\n" + ARMS, "line 7: run.seed is set by the study itself"),
        (HEAD + ARMS + "task.name = 'text'\n", "mixed.*-s0 reads raw text.*write task.name"),
        (HEAD + ARMS + "task.eval_split = 'train'\n", "evaluated on split 'train', .*write task.e"),
        (f"{HEAD}[start]\nsft.steps = 9\n{ARMS}sft.steps = 1\n", "line 15: arms.*sets sft.steps"),
    ],
)
def test_wrong_settings_are_named_before_any_run(study: Read, text: str, message: str) -> None:
    with pytest.raises(UserError, match=f"(?s){message}"):
        planned_runs(study(text))
