from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from jetrl.cli.main import main


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-shaped model directory, made by `jetrl init`."""
    out = tmp_path_factory.mktemp("models") / "tiny"
    assert main(["init", str(out), "--num-heads", "2", "--num-layers", "1"]) == 0
    return out


class Outcome:
    """The exit code, standard output and standard error of a command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def jetrl(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs a command in this process."""

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call
