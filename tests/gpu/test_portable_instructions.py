"""Kernels arranged for other NVIDIA GPUs have the same bits: mma.sync instead of wgmma.

Those of sm_103 multiply INT8 codes by BF16 tensor cores, which this GPU has, too.

Triton arranges data and picks instructions by architecture. TRITON_OVERRIDE_ARCH makes it do so for
another one, and the kernel still runs on the GPU that is there. This is not a run on that other
GPU, but of its code up to ptxas.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

HERE = Path(__file__).parent
ARCHITECTURES = ["sm80", "sm89", "sm120"]
PORTABLE = sorted(path.stem for path in set(HERE.glob("test_portable_*.py")) - {Path(__file__)})
BY_BF16 = (
    *("test_portable_attention_forward", "test_portable_attention_backward"),
    *("test_portable_attention_decode", "test_portable_gemm", "test_grouped_int8"),
)
# Seconds on one H200, compiling included.
SECONDS = {
    "test_portable_plans": 200,
    "test_portable_attention_backward": 170,
    "test_grouped_int8": 170,
    "test_portable_rows": 65,
    "test_portable_probs": 40,
}
OPTIONS = ("-m", "gpu", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")


def run(arch: str | None, *command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_OVERRIDE_ARCH"}
    environment["JETRL_TESTS_WITHIN"] = "1"
    if arch is not None:
        environment["TRITON_OVERRIDE_ARCH"] = arch
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True
    )


def product(arch: str | None) -> dict[str, Any]:
    done = run(arch, HERE / "portable_product.py")
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def by_wgmma() -> dict[str, Any]:
    return product(None)


def test_the_product_uses_wgmma(by_wgmma: dict[str, Any]) -> None:
    assert (by_wgmma["used"], by_wgmma["wrong"]) == (["wgmma.mma_async"], [])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_mma_sync_has_the_same_integers(arch: str, by_wgmma: dict[str, Any]) -> None:
    by_mma = product(arch)
    assert (by_mma["used"], by_mma["wrong"]) == (["mma.sync"], [])
    assert by_mma["digest"] == by_wgmma["digest"]


def by_file(files: Sequence[str]) -> pytest.MarkDecorator:
    """Return a test per file, since compiling one takes up to minutes."""
    cases = [pytest.param(file, marks=pytest.mark.long(SECONDS.get(file, 80))) for file in files]
    return pytest.mark.parametrize("file", cases)


@pytest.mark.parametrize("arch", ["sm80", "sm120"])
@by_file(PORTABLE)
def test_kernels_arranged_for_another_gpu_have_the_same_bits(file: str, arch: str) -> None:
    """Run the other tests of portable kernels, which compare with the references."""
    done = run(arch, "-m", "pytest", *OPTIONS, HERE / f"{file}.py")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("arch", [None, "sm80"])
@by_file(BY_BF16)
def test_bf16_tensor_cores_have_the_bits_of_int8(file: str, arch: str | None) -> None:
    """Run tests of attention, head and experts with the products of sm_103, by wgmma and mma.sync.

    They compare with the references. A plugin changes the capability before jetrl is imported.
    """
    plugin = ("-p", "tests.kernels.by_bf16")
    done = run(arch, "-m", "pytest", *plugin, *OPTIONS, HERE / f"{file}.py")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout.splitlines()[-1], done.stdout[-1000:]
