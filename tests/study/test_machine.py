"""A study warns before its first run of too little memory, and of another kind of card."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks.study.definition import definition_of
from benchmarks.study.plan import PlannedRun, planned_runs
from benchmarks.study.results import Results
from benchmarks.study.running import kind_warning, room_warning
from tests.study.test_analysis import run

from jetrl.memory.plan import GIB

ROOT = Path(__file__).parents[2]


@pytest.fixture
def runs(tmp_path: Path) -> list[PlannedRun]:
    """Five runs with small micro-batches and five with large ones, of 5.4 million parameters."""
    tree = {
        "study": {"name": "s", "seeds": [0, 1, 2, 3, 4], "out": str(tmp_path / "out")},
        "settings": {
            "recipe": "demo",
            "model": {"config": str(ROOT / "benchmarks/study/models/5m.json")},
            "rollout": {"max_tokens": 500},
        },
        "start": {"seed": 0},
        "arms": {
            "small": {"train": {"tokens_per_micro_batch": 2048}},
            "large": {"train": {"tokens_per_micro_batch": 65536}},
        },
    }
    return planned_runs(definition_of(tree, tmp_path / "s.toml"))


def gib_in(warning: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d", warning)]


def test_the_largest_runs_are_counted_and_the_jobs_that_fit_are_named(
    runs: list[PlannedRun],
) -> None:
    alone = gib_in(room_warning(runs, 1, 1, 1))[2]
    assert alone > 2
    room = round(3.5 * alone * GIB)
    warning = room_warning(runs, 4, 1, room)
    together, has, again = gib_in(warning)
    assert (together, has, again) == pytest.approx((4 * alone, 3.5 * alone, alone), abs=0.3)
    assert warning.startswith("warning: 4 runs at once may need")
    assert "large-s0 alone" in warning
    assert "take --jobs 3 or a smaller train.tokens_per_micro_batch" in warning
    assert room_warning(runs, 3, 1, room) == ""


def test_another_kind_of_card_is_named_with_the_starts_that_are_trained_again(
    runs: list[PlannedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H100")
    results = Results(Path("r.json"), "s.toml", {}, devices=["NVIDIA H200"])
    assert kind_warning(runs, results, ["0", "1"]) == "", "nothing is done yet"
    results.runs = {runs[0].name: run("", "small", 0, 0.5)}
    warning = kind_warning(runs, results, ["0", "1"])
    assert warning.startswith("warning: r.json has runs of NVIDIA H200, and this machine has NVIDI")
    assert runs[0].start is not None
    assert runs[0].start.name in warning
    assert "this machine has CPU" in kind_warning(runs, results, [])
    assert kind_warning(runs[:1], results, ["0", "1"]) == "", "nothing is left"
    results.devices.append("NVIDIA H100")
    assert kind_warning(runs, results, ["0", "1"]) == ""
    results.devices.pop()
    (runs[0].start.path / "model").mkdir(parents=True)
    (runs[0].start.path / "model" / "config.json").touch()
    assert kind_warning(runs, results, ["0", "1"]) == "", "the start is there"
