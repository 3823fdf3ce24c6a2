"""The GPU's kernels compile for a Hopper GPU under the Triton that is installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from jetrl.errors import UserError

pytest.importorskip("triton", reason="it is there on Linux alone")

sys.path.insert(0, str(Path(__file__).parent))
import compile_kernels
from portable_rules import PLANS, PORTABLE

# Rarer plans and shapes with JETRL_ALL_CARDS=1: Triton and ptxas take minutes.
PIECES = compile_kernels.PIECES if "JETRL_ALL_CARDS" in os.environ else compile_kernels.USUAL
SOURCE = Path(__file__).parents[2] / "src" / "jetrl"


class Compiler:
    """A process that compiles each piece of compile_kernels.py at most once."""

    def __init__(self, errors: IO[str]) -> None:
        program = [sys.executable, "-W", "ignore", compile_kernels.__file__, "--serve"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(program, stdin=pipe, stdout=pipe, stderr=errors, text=True)
        self.pieces: dict[str, dict[str, Any]] = {}
        self._errors = errors

    def piece(self, name: str) -> dict[str, Any]:
        if name not in self.pieces:
            print(name, file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
            self._errors.seek(0)
            assert answer, self._errors.read()
            self.pieces[name] = json.loads(answer)
        return self.pieces[name]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiler]:
    with open(tmp_path_factory.mktemp("compiler") / "errors.txt", "w+") as errors:
        compiler = Compiler(errors)
        with compiler.process:
            yield compiler


@pytest.mark.parametrize("name", PIECES)
def test_kernels_compile(name: str, compiler: Compiler) -> None:
    piece = compiler.piece(name)
    assert piece["failed"] == {}
    assert piece["broken"] == ""


def test_every_kernel_is_in_a_piece(compiler: Compiler) -> None:
    compiled = {name for piece in PIECES for name in compiler.piece(piece)["compiled"]}
    portable = {file for pattern in PLANS + PORTABLE for file in SOURCE.glob(pattern)}
    launched = {
        name
        for file in {*SOURCE.rglob("*.py")} - portable
        for name in re.findall(r"^ +(?:\w+ = )?(\w*kernel)\[", file.read_text(), re.MULTILINE)
    }
    assert len(launched) > 20
    assert launched - {name.rpartition(".")[2] for name in compiled} == set()


@pytest.mark.parametrize("home", ["/none", None])
def test_deep_gemm_without_a_toolkit_says_so(
    home: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jetrl.precision.hopper import gemm

    def imported(_: str) -> SimpleNamespace:
        if home is None:
            raise AssertionError  # as the package does, without a word
        return SimpleNamespace(find_cuda_home=lambda: home)

    monkeypatch.setattr(gemm, "deep_gemm_installed", lambda: True)
    monkeypatch.setattr(gemm.importlib, "import_module", imported)
    said = "there is no (/none/bin/nvcc|CUDA toolkit).*set CUDA_HOME.*pip uninstall sgl-deep-gemm"
    with pytest.raises(UserError, match=said):
        gemm._load_deep_gemm()
