"""Digests of whole runs: repeated, resumed, with another seed, and from the files of a run."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from tests.distributed.test_checksum import defined
from tests.e2e.small import SMALL, trained, without_last_checkpoint

from jetrl import load_config
from jetrl.cli.main import main
from jetrl.runs.directory import RunDirectory
from jetrl.session import RunResult
from jetrl.settings.loading import to_toml
from jetrl.training.checkpoint_files import fingerprint

STEPS = ["sft.steps=3", "checkpoint.every=1", "checkpoint.keep_last=9", "loop.steps=3"]
run = partial(trained, [*SMALL, *STEPS])


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return run(tmp_path_factory.mktemp("runs"), "first", "report.enabled=true")


def lines_of(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    lines = RunDirectory.open(path).metrics()
    return {(line.get("phase", "rl"), line["step"]): line for line in lines}


def compared(capsys: pytest.CaptureFixture[str], *paths: Path) -> tuple[int, str]:
    """Return the exit code and the last sentence of `jetrl compare --same`."""
    capsys.readouterr()
    code = main(["compare", *map(str, paths), "--same"])
    return code, capsys.readouterr().out.splitlines()[-1]


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_the_digest_of_a_step_is_that_of_the_files_of_a_run(first: RunResult) -> None:
    path = first.run_path
    lines = lines_of(path)
    assert [line for line in lines if "digest" in lines[line]] == [
        *(("sft", update) for update in (1, 2, 3)),
        *(("rl", step) for step in (1, 2, 3)),
    ]
    line = lines["rl", 3]
    samples = RunDirectory.open(path).rollouts(3)
    masters = load_file(path / "checkpoints" / "step_000003" / "masters.safetensors")

    def counted(key: str, kind: str) -> bytes:
        counts = [np.int32(len(sample[key])).tobytes() for sample in samples]
        values = [np.array(sample[key], kind).tobytes() for sample in samples]
        return b"".join(part for pair in zip(counts, values, strict=True) for part in pair)

    weights = "".join(
        f"{name} {'x'.join(map(str, masters[name].shape))} {defined(masters[name]):016x}\n"
        for name in sorted(masters)
    )
    data = {
        "prompts": counted("prompt_token_ids", "<i4"),
        "tokens": counted("token_ids", "<i4"),
        "logprobs": counted("logprobs", "<f4"),
        "rewards": np.array([sample["reward"] for sample in samples], "<f8").tobytes(),
        "losses": f"policy/loss {line['policy/loss'].hex()}\n".encode(),
        "grad_norms": f"policy/grad_norm {line['policy/grad_norm'].hex()}\n".encode(),
        "weights": weights.encode(),
    }
    text = lines["rl", 2]["digest"]["run"] + "\nrl 3\n"
    text += "".join(f"{name} {sha(part)[:16]}\n" for name, part in data.items())
    assert line["digest"] == {
        "run": sha(text.encode()),
        **{name: sha(part)[:16] for name, part in data.items()},
    }
    assert line["digest/run"] == int(line["digest"]["run"][:6], 16)
    assert first.digest == line["digest"]["run"]
    assert first.report_path is not None
    assert first.digest in first.report_path.read_text()


def test_a_resumed_run_has_the_digest_of_an_uncut_one(
    first: RunResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without_last_checkpoint(first.run_path, tmp_path / "cut")
    resumed = run(tmp_path, "cut", resume=True)
    assert resumed.digest == first.digest
    code, said = compared(capsys, first.run_path, resumed.run_path)
    assert (code, said) == (0, f"cut: the same digest as first after step 3: {first.digest}")


def as_of_a_gpu(path: Path, backend: str) -> None:
    """Change the settings and the log of attempts of a run to those that a GPU's run would have."""
    settings = load_config(path / "config.toml", ["run.device=cuda", f"run.backend={backend}"])
    (path / "config.toml").write_text(to_toml(settings))
    attempts = path / "attempts.jsonl"
    there = {'"device": "cpu"': '"device": "cuda:0"', '"reference"': f'"{backend}"'}
    for here, gpu in there.items():
        assert here in attempts.read_text()
        attempts.write_text(attempts.read_text().replace(here, gpu))


@pytest.mark.parametrize("backend, preset", [("triton", "integer"), ("hopper", "unified")])
def test_a_run_of_a_gpu_continues_on_a_cpu(
    backend: str, preset: str, first: RunResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_preset = f"precision.preset={preset}"
    uncut = first if preset == "unified" else run(tmp_path, "uncut", of_preset)
    path = without_last_checkpoint(uncut.run_path, tmp_path / "cut")
    as_of_a_gpu(path, backend)
    words = ["train", str(path / "config.toml"), "--resume"]
    assert main(words) == 2
    assert f"run.backend = {backend} needs" in capsys.readouterr().err
    assert main([*words, "run.device=cpu"]) == 0
    out = capsys.readouterr().out
    assert lines_of(path)["rl", 3]["digest"]["run"] == uncut.digest
    own = load_config(path / "config.toml").run
    assert (own.device, own.backend) == ("cpu", "auto")
    said = f"on cuda with backend {backend}, and continues on cpu with backend reference: with"
    assert (said in out) == (preset != "integer"), "only integer has the same bits on both"


def test_a_run_with_other_weights_differs_from_the_first_step_on(
    first: RunResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing_new = run(
        tmp_path, "again", "rollout.max_batch_size=3", "eval.every=1", "eval.prompts=4"
    )
    assert nothing_new.digest == first.digest, "neither changes a bit of the run"
    seed = run(tmp_path, "seed", "run.seed=7")
    code, said = compared(capsys, first.run_path, nothing_new.run_path, seed.run_path)
    at = "seed: the digest differs from first's at supervised step 1, first in losses"
    assert (code, said) == (1, f"{at} (also grad_norms, weights)")
    run(tmp_path, "rate", "sft.lr=1e-2")
    run(tmp_path, "colder", "rollout.temperature=0.5")
    expected = {
        "rate": "supervised step 1, first in weights",
        "colder": "step 1, first in tokens (also logprobs)",  # all rewards are 0
    }
    for name, where in expected.items():
        code, said = compared(capsys, first.run_path, tmp_path / name)
        assert (code, said.partition("digest differs from first's at ")[2]) == (1, where)


def test_a_run_that_continues_a_checkpoint_without_a_digest_has_none(
    first: RunResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "old"
    shutil.copytree(first.run_path, path)
    shutil.rmtree(path / "checkpoints" / "step_000003")
    # As an earlier version of jetrl wrote it.
    checkpoint = path / "checkpoints" / "step_000002"
    state = json.loads((checkpoint / "state.json").read_text())
    del state["extra"]["states"]["digest"], state["extra"]["metrics"]["digest/run"]
    (checkpoint / "state.json").write_text(json.dumps(state))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["state.json"] = fingerprint(checkpoint / "state.json")
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("digest", None), line.pop("digest/run", None)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    resumed = run(tmp_path, "old", resume=True)
    assert "the checkpoint has no digest" in capsys.readouterr().out
    assert resumed.digest == ""
    found, uncut = lines_of(path)["rl", 3], lines_of(first.run_path)["rl", 3]
    assert not {"digest", "digest/run"} & found.keys()
    assert found["policy/loss"] == uncut["policy/loss"], "its bits are still the same"
    code, said = compared(capsys, first.run_path, path)
    assert (code, "no digest of supervised step 1 in old" in said) == (1, True)
    # The next resume knows that as well.
    assert run(tmp_path, "old", "loop.steps=4", resume=True).digest == ""


def test_a_line_that_only_a_checkpoint_has_reaches_trackers(
    first: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(first.run_path, tmp_path / "cut")
    metrics = tmp_path / "cut" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    sent: list[tuple[Any, ...]] = []
    writer = SimpleNamespace(
        add_scalar=lambda *values: sent.append(values), flush=lambda: None, close=lambda: None
    )
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    module = SimpleNamespace(Writer=lambda _: writer)
    monkeypatch.setitem(sys.modules, "tensorboard.summary", module)
    run(tmp_path, "cut", "trackers.names=tensorboard", resume=True)
    line = lines_of(first.run_path)["rl", 3]
    assert ("reward/mean", line["reward/mean"], 3) in sent
