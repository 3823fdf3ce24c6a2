"""Checkpoints of several ranks: written by all or none, read by any number with the same bits."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.distributed.ranks import run_ranks
from tests.distributed.runs import files_of
from tests.distributed.tiny_policy import digest_of, make_policy, update

from jetrl.distributed.world import world
from jetrl.errors import StorageError, UserError
from jetrl.session.checkpoints import RunCheckpoints
from jetrl.settings.loading import Settings
from jetrl.training.checkpoint import Checkpoints
from jetrl.training.checkpoint_files import fingerprint

SETTINGS = Settings.model_validate({"checkpoint": {"keep_last": 9}})


def fake_run(folder: Path) -> Any:
    """Return as much of a run directory as checkpoints ask for."""
    return SimpleNamespace(
        path=folder,
        metrics_file=folder / "metrics.jsonl",
        rollouts_dir=folder / "rollouts",
        checkpoints_dir=folder / "checkpoints",
        checkpointed_file=folder / "checkpointed.txt",
        truncate_after=lambda step: [],
        metrics=lambda phase: [{"step": 99}],
    )


def begin(folder: Path) -> None:
    """Save a run after its first update, in the background."""
    policy, optimizer = make_policy(seed=1)
    update(policy, optimizer)
    checkpoints = RunCheckpoints(fake_run(folder), SETTINGS)
    checkpoints.save(1, SimpleNamespace(policy=policy, optimizer=optimizer), {"reward/mean": 0.5})
    update(policy, optimizer)  # while the first checkpoint is written
    checkpoints.wait()


def run_folder(path: Path) -> Path:
    (path / "rollouts").mkdir(parents=True)
    (path / "metrics.jsonl").touch()
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks."""
    folder = run_folder(tmp_path_factory.mktemp("written"))
    run_ranks(2, begin, folder)
    return folder / "checkpoints" / "step_000001"


def test_a_reader_of_safetensors_understands_a_rank_s_file(written: Path) -> None:
    state = json.loads((written / "state.json").read_text())
    assert (state["format"], state["ranks"]) == (3, 2)
    files = {name.split("/")[0] for name in files_of(written)}
    assert files == {"manifest.json", "masters", "optimizer", "state.json"}
    whole: dict[str, torch.Tensor] = {}
    for file in sorted((written / "masters").iterdir()):
        with safe_open(file, "pt") as handle:
            places = json.loads(handle.metadata()["DCP_SHARDING_INFO"])
            for name in handle.keys():  # noqa: SIM118
                rows = handle.get_tensor(name)
                first = places[name]["saved_offsets"][0]
                assert first == len(whole.get(name, ())), f"{name} begins where rank 0's rows end"
                whole[name] = torch.cat([whole[name], rows]) if name in whole else rows
    policy, optimizer = make_policy(seed=1)
    update(policy, optimizer)
    assert whole.keys() == policy.master_weights().keys()
    assert all(torch.equal(p, whole[name]) for name, p in policy.master_weights().items())


def failing(target: str, nth: int) -> Any:
    """Return a patch by which the nth call of a function finds the disk full."""
    calls = []

    def full_disk(*arguments: Any, **words: Any) -> Any:
        calls.append(1)
        if len(calls) == nth:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*arguments, **words)

    patch = mock.patch(target, full_disk)
    original = patch.get_original()[0]
    return patch


POINTS: list[tuple[int, str, int]] = [
    (1, "jetrl.training.checkpoint_files.write_tensors", 2),  # of its second part
    (2, "jetrl.training.checkpoint_files.fingerprint", 1),
    (0, "jetrl.training.checkpoint_files._flush", 1),
    (0, "jetrl.training.checkpoint_files.write_text", 2),  # of the manifest
    (0, "jetrl.session.checkpoints.sync", 1),  # of the run's lines
]


def check_forever(checkpoints: RunCheckpoints) -> None:
    while True:
        checkpoints.check()


def fail_everywhere(folder: Path) -> list[str]:
    """Save a run after two updates; a rank fails at each of the points, in the second one."""
    policy, optimizer = make_policy(seed=1)
    checkpoints = RunCheckpoints(fake_run(folder), SETTINGS)
    trainer = SimpleNamespace(policy=policy, optimizer=optimizer)
    checkpoints.save(1, trainer, {})
    checkpoints.wait()
    update(policy, optimizer)
    messages = []
    for rank, target, nth in POINTS:
        with failing(target, nth) if world().rank == rank else contextlib.nullcontext():
            checkpoints.save(2, trainer, {})
            with pytest.raises(StorageError) as caught:
                check_forever(checkpoints)
        messages.append(str(caught.value))
        checkpoints.wait()
        assert checkpoints.good_step == 1
        world().barrier("all have failed")
        assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step_000001"]
        world().barrier("all have looked")
    checkpoints.save(2, trainer, {})
    checkpoints.wait()
    return messages


def test_a_full_disk_of_one_rank_leaves_the_earlier_checkpoint_and_stops_all(
    tmp_path: Path,
) -> None:
    folder = run_folder(tmp_path)
    messages = run_ranks(3, fail_everywhere, folder)
    assert messages[0] == messages[1] == messages[2]
    for (rank, _, _), message in zip(POINTS[:3], messages[0], strict=False):
        assert f"No space left on device (rank {rank})" in message
        assert "step_000002 could not be written" in message
        assert "the last one before it is" in message
    assert all("No space left on device" in message for message in messages[0])
    assert Checkpoints(folder / "checkpoints").latest().path.name == "step_000002"


SHARD = "shard-00002-model-00001-of-00001.safetensors"


def forge(path: Path) -> None:
    """Write a manifest with right checksums for the files of a checkpoint."""
    files = [path / name for name in files_of(path) if name != "manifest.json"]
    manifest = {f.relative_to(path).as_posix(): fingerprint(f) for f in files}
    (path / "manifest.json").write_text(json.dumps(manifest))


def rewrite(file: Path, places: str) -> None:
    """Write a rank's file with other metadata, under a right checksum."""
    save_file(load_file(file), file, metadata={"DCP_SHARDING_INFO": places})
    forge(file.parents[1])


def twice(file: Path) -> None:
    shutil.copy(file, file.with_name("shard-00003.safetensors"))
    forge(file.parents[1])


DAMAGE: list[Any] = [
    (lambda f: os.truncate(f, f.stat().st_size - 1), r"masters/shard-00002\S* has \d+ bytes"),
    (
        lambda f: shutil.copy(f, f.with_name("other.safetensors")),
        r"masters/other.safetensors is not a file of this checkpoint",
    ),
    (twice, r"masters: .* every row of \S+ once"),
    (lambda f: rewrite(f, "{}"), r"shard-00002\S*: DCP_SHARDING_INFO does not say where"),
    (lambda f: rewrite(f, "[" * 9000), r"shard-00002\S*: missing or not a safetensors file"),
]


@pytest.mark.parametrize("damage, message", DAMAGE, ids=range(len(DAMAGE)))
def test_damage_is_named_by_file(
    written: Path, tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    path = tmp_path / written.name
    shutil.copytree(written, path)
    damage(path / "masters" / SHARD)
    policy, optimizer = make_policy(seed=5)
    before = digest_of(policy.master_weights())
    with pytest.raises(UserError, match=message):
        Checkpoints(tmp_path).load(path, policy, optimizer)
    assert digest_of(policy.master_weights()) == before
