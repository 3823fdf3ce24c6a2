"""A study of raw text: its runs are supervised, and compared by their held-out loss."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.study.definition import read_definition
from benchmarks.study.results import Curves, read_results
from benchmarks.study.tables import loss_table
from tests.study.conftest import PoolInThisProcess

from jetrl.cli.main import main
from jetrl.models.tiny import make_tiny

STUDY = """
[study]
name = "tiny"
seeds = [0, 1]
out = "OUT/runs"
reference = "bf16"
metrics = ["sft/loss"]

[eval]
preset = "fp32"

[settings]
model.path = "OUT/tiny"
task = { name = "text", path = "OUT/data" }
sft = { steps = 3, tokens_per_step = 128, lengths = [64], lr = 1e-2 }
run.device = "cpu"
eval.every = 2
report.enabled = false

[arms.bf16]
precision.preset = "bf16"

[arms.fp32]
precision.preset = "fp32"
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text_study")
    make_tiny(folder / "tiny", vocab_size=128, hidden_size=64, num_layers=1)
    (folder / "data").mkdir()
    for name, count in (("train", 20), ("test", 3)):
        rows = "".join(f'{{"text": "the quick brown fox, number {n}"}}\n' for n in range(count))
        (folder / "data" / f"{name}.jsonl").write_text(rows)
    file = folder / "tiny.toml"
    file.write_text(STUDY.replace("OUT", str(folder)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.study.running.Pool", PoolInThisProcess)
        patch.setattr("benchmarks.study.scheduler.POLL_S", 0.0)
        assert main(["study", str(file)]) == 0
    return file


def test_losses_and_speeds_of_all_runs_are_kept(study: Path) -> None:
    runs = read_results(study.parent / "runs" / "results.json").runs
    assert sorted(runs) == ["bf16-s0", "bf16-s1", "fp32-s0", "fp32-s1"]
    for run in runs.values():
        assert run.steps == 3
        assert run.own is not None
        assert run.common is not None
        assert 3.0 < run.own.mean < 5.0
        assert run.own.mean == pytest.approx(run.common.mean, rel=0.01)
        assert (run.own.preset, run.common.preset) == (run.arm, "fp32")
        assert {"sft/loss", "memory/peak_gib"} <= {*run.curves.values}
        if run.arm == "fp32":  # its export is not rounded
            assert run.own.mean == pytest.approx(run.common.mean, rel=1e-6)


def test_the_report_compares_seed_by_seed(study: Path, capsys: pytest.CaptureFixture) -> None:
    definition = read_definition(study)
    runs = list(read_results(study.parent / "runs" / "results.json").runs.values())
    head, bf16, fp32 = (lambda t: (t.head, *t.rows))(loss_table(definition, runs))
    own = {run.name: run.own.mean for run in runs if run.own}
    gap = sum(own[f"fp32-s{seed}"] - own[f"bf16-s{seed}"] for seed in (0, 1)) / 2
    column = list(head).index("own - bf16")
    assert bf16[column].startswith("+0.0000")
    peaks = runs[0].curves.values["memory/peak_gib"] + runs[2].curves.values["memory/peak_gib"]
    assert bf16[-1] == f"{max(peaks):.2f}"
    without = [run.model_copy(update={"curves": Curves()}) for run in runs]
    assert loss_table(definition, without).rows[0][-2:] == ["-", "-"]
    assert fp32[column].startswith(f"{gap:+.4f} [")
    assert main(["study", str(study), "--report-only"]) == 0
    assert f"{gap:+.4f}" in capsys.readouterr().out
