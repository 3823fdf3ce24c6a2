"""The GPU's kernels compile for a Hopper GPU under the Triton that is installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jetrl.errors import UserError

pytest.importorskip("triton", reason="it is there on Linux alone")

COMPILE = Path(__file__).with_name("compile_kernels.py")
SOURCE = Path(__file__).parents[2] / "src" / "jetrl"


@pytest.mark.timeout(300)
def test_every_kernel_compiles(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(COMPILE), str(out)], capture_output=True, text=True
    )
    assert out.exists(), done.stderr
    found = json.loads(out.read_text())
    assert found["failed"] == {}
    assert found["broken"] == {}
    launched = {
        name
        for file in SOURCE.rglob("*.py")
        for name in re.findall(r"^ +(?:\w+ = )?(\w*kernel)\[", file.read_text(), re.MULTILINE)
    }
    assert len(launched) > 20
    assert launched - {name.rpartition(".")[2] for name in found["compiled"]} == set()


@pytest.mark.parametrize(
    ("home", "said"), [("/none", "there is no /none/bin/nvcc"), (None, "there is no CUDA toolkit")]
)
def test_deep_gemm_without_a_toolkit_says_so(
    home: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jetrl.precision.hopper import gemm

    def imported(name: str) -> SimpleNamespace:
        assert name == "deep_gemm"
        if home is None:
            raise AssertionError  # as the package does, without a word
        return SimpleNamespace(find_cuda_home=lambda: home)

    monkeypatch.setattr(gemm, "deep_gemm_installed", lambda: True)
    monkeypatch.setattr(gemm.importlib, "import_module", imported)
    with pytest.raises(UserError, match=f"{said}.*set CUDA_HOME.*pip uninstall sgl-deep-gemm"):
        gemm._load_deep_gemm()
