"""A model that several ranks export has the bytes of one process's export."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.distributed.ranks import run_ranks
from tests.distributed.test_checkpoints import same_bytes
from tests.distributed.tiny_policy import CONFIG, make_policy, update
from torch.multiprocessing.reductions import StorageWeakRef

from jetrl.cli.main import main
from jetrl.cli.opening import open_policy
from jetrl.distributed.collectives import whole_tensor
from jetrl.distributed.shards import Shard
from jetrl.distributed.world import world
from jetrl.errors import StorageError, UserError
from jetrl.models import hf
from jetrl.models.policy import Policy
from jetrl.models.scalar_model import ScalarModel
from jetrl.precision import PrecisionPlan
from jetrl.session.building import build_policy, build_reference
from jetrl.settings.loading import Settings, load_config, to_toml
from jetrl.tasks import get_task
from jetrl.training import Checkpoints, Optimizer

DTYPES = ("bfloat16", "float32", "fp8")
PLAN = PrecisionPlan.preset("unified")


def export(folder: Path) -> int:
    """Write a policy in each dtype, and in files that divide the parts of a parameter.

    Returns:
        How many whole tensors were gathered from ranks: one at a time is in memory.
    """
    policy, optimizer = make_policy(seed=1)
    update(policy, optimizer)
    gathered: list[StorageWeakRef] = []

    def counted(own: torch.Tensor, shard: Shard) -> torch.Tensor:
        for _ in range(10_000):  # gloo's thread lets go of a tensor a moment after its work
            if not gathered or gathered[-1].expired():
                break
            time.sleep(0.001)
        else:
            raise AssertionError("two whole tensors are in memory")
        whole = whole_tensor(own, shard)
        gathered.append(StorageWeakRef(whole.untyped_storage()))
        return whole

    with mock.patch("jetrl.models.weights.whole_tensor", counted):
        for dtype in DTYPES:
            policy.save_pretrained(folder / dtype, dtype=dtype)
        masters = policy.whole_masters()
        hf.save_model(folder / "split", policy.config, masters, "float32", max_shard_bytes=70_000)
    return len(gathered)


def fail(folder: Path) -> str:
    """Export where rank 0 meets a full disk; return the message."""
    policy, _ = make_policy(seed=1)

    def full_disk(*arguments: Any, **words: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        mock.patch("jetrl.models.hf_save.save_file", full_disk),
        pytest.raises(StorageError) as caught,
    ):
        policy.save_pretrained(folder / "model")
    world().barrier("all have failed")
    assert list(folder.iterdir()) == []
    return str(caught.value)


def export_and_fail(folder: Path, empty: Path) -> tuple[int, str]:
    return export(folder), fail(empty)


def test_an_export_is_one_directory_with_the_bytes_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert export(tmp_path / "alone") == 0
    results = run_ranks(3, export_and_fail, tmp_path / "ranks", tmp_path / "empty")
    for name in (*DTYPES, "split"):
        same_bytes(tmp_path / "alone" / name, tmp_path / "ranks" / name)
    assert len(list((tmp_path / "ranks" / "split").glob("*.safetensors"))) > 5
    num_gathered, message = results[0]
    assert num_gathered == 4 * 6  # of each export every matrix once, though it has parts in files
    assert "No space left on device" in message
    assert results == results[:1] * 3


# What else reads whole master weights


def numbers(folder: Path) -> dict[str, Any]:
    """Return numbers of a reference, a new critic, and BF16 weights."""
    settings = Settings.model_validate({"model": {"config": CONFIG}, "algorithm": {"kl": 0.1}})
    policy, optimizer = make_policy(seed=1)
    update(policy, optimizer)
    reference = build_reference(settings, policy, folder)
    assert reference is not None
    masters = policy.whole_masters()
    critic = ScalarModel.with_new_head(policy.config, masters, PLAN, "cpu", None)
    bf16 = Policy(policy.config, PrecisionPlan.preset("bf16"), masters, frozen=True)
    tokens = [[1, 2, 3, 299]]
    return {
        "reference": reference.logprobs(tokens)[0].tolist(),
        "critic": critic.packed_hidden(
            torch.tensor(tokens[0]), torch.tensor([0, 4]), torch.arange(4)
        ).tolist(),
        "bf16": bf16.logprobs(tokens)[0].tolist(),
        "rows": len(critic.weights.masters["embed.weight"]),
    }


def test_all_that_reads_whole_master_weights_gets_them(tmp_path: Path) -> None:
    alone = numbers(tmp_path / "alone")
    ranks = run_ranks(2, numbers, tmp_path / "ranks")
    assert [r.pop("rows") for r in (alone, *ranks)] == [300, 128, 172]
    assert ranks == [alone, alone]
    same_bytes(tmp_path / "alone" / "reference", tmp_path / "ranks" / "reference")


# A checkpoint of several ranks in commands


def save_run(run: Path) -> None:
    """Write a checkpoint of the demo's policy after an update."""
    settings = load_config("demo", ["run.seed=5"])
    policy = build_policy(settings, PLAN, get_task("arithmetic").alphabet)
    shards = policy.weights.shards
    optimizer = Optimizer(policy.master_weights(), settings.train, 9, shards)
    update(policy, optimizer)
    Checkpoints(run / "checkpoints").save(3, policy, optimizer, {})


def test_commands_read_a_checkpoint_of_several_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    for name in ("alone", "ranks"):
        run = tmp_path / name
        run.mkdir()
        (run / "config.toml").write_text(to_toml(load_config("demo")))
        (run / "plan.json").write_text(json.dumps(PLAN.to_dict()))
        save_run(run) if name == "alone" else run_ranks(2, save_run, run)
        checkpoint = str(run / "checkpoints" / "step_000003")
        capsys.readouterr()
        for command in (
            ["export", checkpoint, str(run / "out")],
            ["sample", str(run), "1+1=", "--max-tokens", "2", "--json"],
            ["eval", checkpoint, "--prompts", "2", "--max-tokens", "2", "--workers", "0", "--json"],
        ):
            assert main(command) == 0, capsys.readouterr().err
        outputs.append(capsys.readouterr().out.splitlines())
    assert (tmp_path / "ranks" / "checkpoints" / "step_000003" / "masters").is_dir()
    same_bytes(tmp_path / "alone" / "out", tmp_path / "ranks" / "out")
    timed = ('_s"', "seconds", "wrote")
    texts = [[line for line in lines if not any(t in line for t in timed)] for lines in outputs]
    assert texts[0] == texts[1]
    next((Path(checkpoint) / "masters").iterdir()).write_bytes(b"short")
    with pytest.raises(UserError, match=r"masters/shard-\S+ has \d+ bytes instead of"):
        open_policy(checkpoint, None, "cpu")
