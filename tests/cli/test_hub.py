"""`jetrl export --push-to-hub` against a local stand-in of huggingface_hub's `HfApi`.

The stand-in has the parameters of the real methods, checked against their signatures; the hub
itself was never asked.
"""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from tests.e2e.small import SMALL

from jetrl import load_config, train
from jetrl.cli import hub
from jetrl.cli.main import main
from jetrl.models.policy import Policy


class Hub:
    """Repositories in a folder: what is uploaded is copied there."""

    folder: Path
    private: dict[str, bool]
    fails = ""

    def whoami(self) -> dict[str, str]:
        if self.fails == "login":
            raise OSError("401 Client Error\nRequest ID: 1")
        return {"name": "me"}

    def create_repo(self, repo_id: str, *, private: Any, repo_type: Any, exist_ok: bool) -> str:
        assert exist_ok
        type(self).private.setdefault(repo_id, private)
        return f"https://hub/{repo_id}"

    def upload_folder(
        self, *, repo_id: str, folder_path: Path, repo_type: Any, commit_message: str
    ) -> None:
        if self.fails == "upload":
            raise OSError("connection reset")
        shutil.copytree(folder_path, self.folder / repo_id, dirs_exist_ok=True)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    Hub.folder, Hub.private, Hub.fails = tmp_path / "hub", {}, ""
    monkeypatch.setattr(hub, "HfApi", Hub)
    return Hub


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = [
        *SMALL,
        "sft.steps=1",
        "sft.until=none",
        "loop.steps=1",
        "eval.every=1",
        "eval.prompts=4",
    ]
    folder = tmp_path_factory.mktemp("runs")
    return train(load_config("demo", [*words, f"run.dir={folder}", "run.name=mine"])).run_path


def test_the_stand_in_takes_what_the_real_interface_takes() -> None:
    for name in ("whoami", "create_repo", "upload_folder"):
        own = inspect.signature(getattr(Hub, name)).parameters
        real = inspect.signature(getattr(huggingface_hub.HfApi, name)).parameters
        assert own.keys() <= real.keys(), name


def test_a_run_is_uploaded_with_a_card_without_paths(
    run: Path, tmp_path: Path, stand_in: type[Hub], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(run), str(tmp_path / "out"), "--push-to-hub", "me/mine", "--private"]
    assert main(["export", *words]) == 0
    assert "uploaded to https://hub/me/mine" in capsys.readouterr().out
    assert stand_in.private == {"me/mine": True}
    uploaded = stand_in.folder / "me" / "mine"
    assert Policy.from_pretrained(uploaded, "bf16").config.num_layers == 1
    card = (uploaded / "README.md").read_text()
    data = huggingface_hub.ModelCard(card).data
    assert data.library_name == "transformers"
    assert data.tags == ["jetrl", "reinforcement-learning"]
    assert "| algorithm.name |" in card
    assert "eval/arithmetic/mean after step 1" in card
    assert "digest of the run" in card
    assert str(tmp_path) not in card
    assert str(run.parent) not in card
    # A card of one's own stays.
    (tmp_path / "out" / "README.md").write_text("mine")
    hub.write_card(tmp_path / "out", str(run), "bfloat16")
    assert (tmp_path / "out" / "README.md").read_text() == "mine"


@pytest.mark.parametrize(
    "words, fails, message",
    [
        (["--push-to-hub", "me/mine"], "login", "not logged in to the hub (401 Client Error); run"),
        (["--push-to-hub", "a/b/c"], "", "--push-to-hub a/b/c: Repo id must"),
        (["--private"], "", "--private is for --push-to-hub"),
    ],
)
def test_what_cannot_be_uploaded_is_refused_before_the_export(
    words: list[str],
    fails: str,
    message: str,
    run: Path,
    tmp_path: Path,
    stand_in: type[Hub],
    capsys: pytest.CaptureFixture[str],
) -> None:
    stand_in.fails = fails
    assert main(["export", str(run), str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_failed_upload_leaves_the_model_and_says_how_to_go_on(
    run: Path, tmp_path: Path, stand_in: type[Hub], capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in.fails = "upload"
    out = tmp_path / "out"
    assert main(["export", str(run), str(out), "--push-to-hub", "me/mine"]) == 2
    said = capsys.readouterr().err
    assert f"{out} is written, but was not uploaded to me/mine: connection reset" in said
    assert (out / "model.safetensors").is_file()
