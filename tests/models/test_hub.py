"""Models by their names on the hub, from a cache that the test makes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, errors

from jetrl import Policy
from jetrl.cli.main import main
from jetrl.cli.opening import open_policy
from jetrl.errors import UserError
from jetrl.models import hf_files
from jetrl.models.hf import read_config
from jetrl.models.tiny import make_tiny
from jetrl.precision import PrecisionPlan

NAME = "someone/tiny-qwen3"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FP32 = PrecisionPlan.preset("fp32")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a model in a cache of its own, with links from a commit to its blobs."""
    folder = tmp_path / "cache" / "models--someone--tiny-qwen3"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    make_tiny(folder / "blobs", hidden_size=32, num_heads=2, num_kv_heads=1)
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    for blob in (folder / "blobs").iterdir():
        (folder / "snapshots" / COMMIT / blob.name).symlink_to(f"../../blobs/{blob.name}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    hf_files.snapshot.cache_clear()
    yield folder
    hf_files.snapshot.cache_clear()


def downloads(monkeypatch: pytest.MonkeyPatch, answer: object) -> list[str]:
    """Make downloads answer with a folder or an error, and return the names that were asked for."""
    asked, real = [], huggingface_hub.snapshot_download

    def download(repository: str, local_files_only: bool = False, **options: object) -> object:
        if local_files_only:
            return real(repository, local_files_only=True, **options)
        asked.append(f"{repository}@{options['revision']}")
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


@pytest.mark.parametrize("revision", ["", "@main", f"@{COMMIT}"])
def test_a_cached_model_is_read_without_asking_the_network(
    cache: Path, revision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = downloads(monkeypatch, AssertionError("asked"))
    policy = Policy.from_pretrained(NAME + revision, FP32)
    local = Policy.from_pretrained(cache / "snapshots" / COMMIT, FP32)
    assert asked == []
    assert policy.tokenizer is not None
    for name, master in policy.master_weights().items():
        assert torch.equal(master, local.master_weights()[name])
    assert open_policy(NAME + revision, "fp32", "cpu").config == policy.config


def test_what_the_cache_lacks_is_downloaded_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The small files come first: a config is read before any weights are there."""
    whole = shutil.copytree(cache / "snapshots" / COMMIT, cache.parent / "whole")
    (cache / "snapshots" / COMMIT / "model.safetensors").unlink()
    asked = downloads(monkeypatch, whole)
    assert read_config(NAME)["model_type"] == "qwen3"
    assert asked == []
    Policy.from_pretrained(NAME, FP32)
    Policy.from_pretrained(NAME, FP32)
    assert asked == [f"{NAME}@None"]


def test_half_of_the_shards_is_not_the_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = cache / "snapshots" / COMMIT
    (snapshot / "model.safetensors").rename(snapshot / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    asked = downloads(monkeypatch, errors.LocalEntryNotFoundError("no network"))
    with pytest.raises(UserError, match="LocalEntryNotFoundError: no network"):
        Policy.from_pretrained(NAME, FP32)
    assert asked == [f"{NAME}@None"]


def http_error(kind: type[errors.HfHubHTTPError]) -> errors.HfHubHTTPError:
    response = SimpleNamespace(headers={}, request=None)  # what the errors read of a response
    return kind("refused", response=response)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error, message",
    [
        (http_error(errors.GatedRepoError), "GatedRepoError: refused; set HF_TOKEN"),
        (http_error(errors.RevisionNotFoundError), "RevisionNotFoundError"),
        (ConnectionError("name not known"), "ConnectionError: name not known"),
        (errors.LocalEntryNotFoundError("no\nnetwork"), "no; .*hf download some/model.*dry run"),
    ],
    ids=["gated", "revision", "connection", "network"],
)
def test_what_cannot_be_downloaded_says_why(
    cache: Path, error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads(monkeypatch, error)
    with pytest.raises(UserError, match=f"some/model@v2: no such directory here, .*{message}"):
        Policy.from_pretrained("some/model@v2", FP32)


def test_a_dry_run_is_content_with_the_files_that_the_error_names(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    downloads(monkeypatch, errors.LocalEntryNotFoundError("no network"))
    (cache / "blobs" / "model.safetensors").unlink()
    words = ["train", "demo", "--dry-run", "precision.preset=bf16", "task.workers=0"]
    assert main([*words, "model.path=some/model"]) == 2
    named = capsys.readouterr().err.partition(", and set ")[2]
    assert main([*words, *named.replace("DIR", str(cache / "blobs")).split()]) == 0
    assert "# memory plan" in capsys.readouterr().out


@pytest.mark.parametrize(
    "path",
    ["models/none", "./some/model", "/some/model", "model", "a/b/c", "../some", "some/", "~/m"],
)
def test_paths_are_no_names(path: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path into a folder that is here, such as models/, is a mistyped path."""
    (cache.parents[1] / "models").mkdir()
    asked = downloads(monkeypatch, AssertionError("asked"))
    with pytest.raises(UserError, match="no such directory"):
        Policy.from_pretrained(path, FP32)
    assert asked == []


def test_a_gguf_is_refused_with_a_way_to_read_it(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(UserError, match=r"model.gguf: is a file.*smollm2.py writes one as a dir"):
        hf_files.model_directory(file)
