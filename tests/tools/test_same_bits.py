"""The comparison of tools/same_bits.py can fail: it names each changed file of a run's folder."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import same_bits

CHECKPOINT = Path("runs/demo/checkpoints/step_000002")
LINES = (
    {"step": 1, "time": 1.5, "reward/mean": 0.1, "policy/loss": -2e-05, "timing/step_s": 0.25},
    {"step": 2, "time": 2.5, "reward/mean": 0.2, "policy/loss": float("nan"), "memory/peak_gib": 1},
)


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders with the results of the same small run."""
    base, new = tmp_path / "base", tmp_path / "new"
    checkpoint = base / CHECKPOINT
    checkpoint.mkdir(parents=True)
    tensors = {"down": torch.arange(6.0).reshape(2, 3), "codes": torch.zeros(4, dtype=torch.int64)}
    save_file(tensors, checkpoint / "masters.safetensors")
    state = {
        "step": 2,
        "extra": {"metrics": LINES[1], "states": {"prompts": {}, "sizes": [1, None]}},
    }
    (checkpoint / "state.json").write_text(json.dumps(state))
    manifest = {"state.json": {"bytes": 91, "sha256": "ab"}}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    run = base / "runs/demo"
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in LINES))
    (run / "rollouts").mkdir()
    (run / "rollouts/step_000001.jsonl").write_text('{"logprobs": [-0.5, -0.25], "reward": 1.0}\n')
    (run / "config.toml").write_text('[run]\nname = "demo"\n')
    (run / "log.txt").write_text("12:00")
    shutil.copytree(base, new)
    return base, new


def differences(sides: tuple[Path, Path]) -> list[str]:
    return [str(difference) for difference in same_bits.compare_folders(*sides).differences]


def replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_copies_are_the_same_and_times_memory_and_logs_may_differ(sides: tuple[Path, Path]) -> None:
    found = same_bits.compare_folders(*sides)
    assert (found.differences, found.files, found.tensors) == ([], 6, 2)
    assert found.values > 10
    run = sides[1] / "runs/demo"
    replaced(run / "metrics.jsonl", '"time": 1.5', '"time": 9.0')
    replaced(run / "metrics.jsonl", '"timing/step_s": 0.25', '"timing/step_s": 0.75')
    replaced(run / "metrics.jsonl", ', "memory/peak_gib": 1', "")
    replaced(sides[1] / CHECKPOINT / "state.json", '"memory/peak_gib": 1', '"memory/peak_gib": 22')
    replaced(sides[1] / CHECKPOINT / "manifest.json", '"bytes": 91, "sha256": "ab"', '"bytes": 92')
    (run / "log.txt").write_text("13:00")
    (run / "report.html").write_text("new")
    assert differences(sides) == []


def test_the_last_bit_of_a_metric(sides: tuple[Path, Path]) -> None:
    (bits,) = struct.unpack("<q", struct.pack("<d", 0.1))
    (above,) = struct.unpack("<d", struct.pack("<q", bits + 1))
    replaced(sides[1] / "runs/demo/metrics.jsonl", "0.1", repr(above))
    words = "runs/demo/metrics.jsonl, line 1, reward/mean: 0.1 -> 0.10000000000000002"
    assert differences(sides) == [words]


@pytest.mark.parametrize(
    "file, old, new, words",
    [
        ("runs/demo/metrics.jsonl", 'mean": 0.2', 'mean": 0', "line 2, reward/mean: 0.2 -> 0"),
        ("runs/demo/metrics.jsonl", "NaN", "1", "line 2, policy/loss: NaN -> 1"),
        ("runs/demo/metrics.jsonl", '"reward/mean": 0.2, ', "", "reward/mean: 0.2 -> absent"),
        ("runs/demo/rollouts/step_000001.jsonl", "-0.25", "-0.26", "logprobs[1]: -0.25 -> -0.26"),
        ("runs/demo/rollouts/step_000001.jsonl", ", -0.25", "", "logprobs (length): 2 -> 1"),
        ("runs/demo/config.toml", "demo", "other", "run, name: 'demo' -> 'other'"),
        (f"{CHECKPOINT}/state.json", "null", "0", "extra, states, sizes[1]: None -> 0"),
        (f"{CHECKPOINT}/state.json", "{}", '{"a": 1}', "extra, states, prompts: {} -> absent"),
    ],
)
def test_one_value(sides: tuple[Path, Path], file: str, old: str, new: str, words: str) -> None:
    replaced(sides[1] / file, old, new)
    (found,) = differences(sides)
    assert found.startswith(file)
    assert words in found


@pytest.mark.parametrize(
    "name, changed, words",
    [
        (
            "down",
            torch.tensor([[0.0, 1, 2], [3, 4, 5.0000005]]),
            "down, element 5 (1 of 6 differ): 5.0 (0x40a00000) -> 5.000000476837158 (",
        ),
        ("down", torch.arange(6.0).reshape(3, 2), "down: F32 [2, 3] -> F32 [3, 2]"),
        ("codes", None, "codes: I64 [4] -> absent"),
    ],
)
def test_a_tensor(
    sides: tuple[Path, Path], name: str, changed: torch.Tensor | None, words: str
) -> None:
    path = sides[1] / CHECKPOINT / "masters.safetensors"
    tensors = {key: tensor for key, tensor in load_file(path).items() if key != name}
    save_file(tensors if changed is None else tensors | {name: changed}, path)
    (found,) = differences(sides)
    assert found.startswith(f"{CHECKPOINT}/masters.safetensors, {words}")


def test_differences_are_in_the_order_of_writing_and_files_of_one_side_are_named(
    sides: tuple[Path, Path],
) -> None:
    (sides[1] / "runs/demo/rollouts/step_000001.jsonl").unlink()
    (sides[1] / "runs/demo/new.json").write_text("{}")
    assert differences(sides) == [
        "runs/demo/rollouts/step_000001.jsonl: there -> no such file",
        "runs/demo/new.json: no such file -> there",
    ]
    replaced(sides[1] / "runs/demo/config.toml", "demo", "other")
    replaced(sides[1] / CHECKPOINT / "state.json", "null", "0")
    replaced(sides[1] / "runs/demo/metrics.jsonl", 'mean": 0.2', 'mean": 0.3')
    assert "metrics.jsonl" in differences(sides)[0]
    assert len(differences(sides)) == 5


def test_a_case_that_exercises_nothing_is_refused(sides: tuple[Path, Path]) -> None:
    case = same_bits.Case("demo", "", (), measures=("reward/mean", "critic/loss"))
    with pytest.raises(same_bits.CannotRunError, match="hollow: critic/loss absent"):
        same_bits.check_measures(case, sides[0])
    case = same_bits.Case("demo", "", (), measures=("reward/mean",))
    same_bits.check_measures(case, sides[0])
    replaced(sides[0] / "runs/demo/metrics.jsonl", "policy/loss", "policy/grad_norm")
    replaced(sides[0] / "runs/demo/metrics.jsonl", "-2e-05", "0.0")
    with pytest.raises(same_bits.CannotRunError, match="policy/grad_norm of the run demo"):
        same_bits.check_measures(case, sides[0])
