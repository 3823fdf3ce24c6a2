"""The checks of `jetrl doctor`: what works on this machine, and what to do about the rest.

Each check looks at one thing and returns a finding: OK, WARN or FAIL, the facts, and the next step
to take where there is one. FAIL means that jetrl does not work as promised on this machine.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from jetrl.errors import UserError
from jetrl.precision import PrecisionPlan, dequantize, quantize

Severity = Literal["OK", "WARN", "FAIL"]

CORE = ("transformers", "safetensors", "numpy", "pydantic", "rich", "matplotlib", "math-verify")
OPTIONAL = {
    "datasets": "data sets by name: pip install 'jetrl[data]'",
    "reasoning-gym": "tasks of reasoning-gym: pip install 'jetrl[reasoning-gym]'",
    "sgl-deep-gemm": "faster decode on a GPU: pip install 'jetrl[deep-gemm]'",
    "cuda-bindings": "pages of keys and values on a GPU; it comes with a CUDA build of torch",
    "wandb": "a tracker: pip install wandb",
    "trackio": "a tracker: pip install trackio",
    "tensorboard": "a tracker: pip install tensorboard",
}
# The kernels compile with these and those between (tests/kernels/test_triton.py).
FIRST_TRITON, LAST_TRITON = "3.6", "3.9"
LOW_DISK_GIB, NO_DISK_GIB = 10.0, 1.0


class Finding(NamedTuple):
    """The result of one check: a line of the doctor's report.

    Attributes:
        status: OK; WARN, for what deserves a look; FAIL, for what does not work as promised.
        next_step: The next step to take; empty where nothing is to be done.
    """

    status: Severity
    name: str
    detail: str
    next_step: str = ""


def all_checks() -> list[Finding]:
    """Return the findings of all checks, in the order in which they are shown."""
    findings = [
        check_python(),
        check_torch(),
        check_device(),
        *(check_core(name) for name in CORE),
        check_triton(),
        *(check_optional(name, use) for name, use in OPTIONAL.items()),
        check_disk(Path.cwd()),
    ]
    self_checks = {"FP8 cast": check_fp8_cast, "exactness": check_exactness}
    if installed("math-verify"):
        self_checks["math-verify"] = check_answers
    for name, self_check in self_checks.items():
        findings += guarded(name, self_check)
    return findings


def guarded(name: str, self_check: Callable[[], list[Finding]]) -> list[Finding]:
    """Return the findings of a check; a check that raises is a FAIL with the error's message."""
    try:
        return self_check()
    except UserError as error:  # says itself what to do
        return [Finding("FAIL", name, str(error))]
    except Exception as error:  # a report goes on: what broke is the finding
        detail = f"{type(error).__name__}: {error}"
        return [Finding("FAIL", name, detail, "please report this with `jetrl doctor --json`")]


def check_python() -> Finding:
    """Check that the tests run with this version of Python."""
    version = platform.python_version()
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Finding("OK", "python", f"{version}, {platform.platform()}")
    return Finding("WARN", "python", version, "use Python 3.11 to 3.13, which the tests run with")


def check_torch() -> Finding:
    version = torch.__version__
    if _minor(version) >= (2, 11):
        return Finding("OK", "torch", f"{version}, {torch.get_num_threads()} threads")
    return Finding("FAIL", "torch", version, "pip install 'torch>=2.11'")


def check_device() -> Finding:
    """Check that the GPU, if there is one, is a Hopper GPU."""
    if not torch.cuda.is_available():
        return Finding("OK", "device", "CPU references: right for the demo, tests and tiny models")
    major, minor = torch.cuda.get_device_capability()
    detail = f"{torch.cuda.get_device_name()}, sm_{major}{minor}, CUDA {torch.version.cuda}"
    if (major, minor) != (9, 0):
        step = "jetrl supports Hopper GPUs (H100, H200: sm_90); elsewhere use run.device=cpu"
        return Finding("WARN", "device", detail, step)
    gemm = "DeepGEMM and cuBLAS" if importlib.util.find_spec("deep_gemm") else "cuBLAS"
    return Finding("OK", "device", f"{detail}; FP8 GEMM by {gemm}, of few rows by Triton")


def check_core(name: str) -> Finding:
    """Check that a package without which jetrl does not work is installed."""
    version = installed(name)
    if version is None:
        return Finding("FAIL", name, "not installed", f"pip install {name}")
    return Finding("OK", name, version)


def check_optional(name: str, use: str) -> Finding:
    """Return the version of an optional package, or what the package is for."""
    version = installed(name)
    return Finding("OK", name, version or f"not installed (optional; for {use})")


def check_triton() -> Finding:
    """Check that Triton, if it is installed, is of a version that the kernels compile with."""
    version = installed("triton")
    if version is None or _minor(FIRST_TRITON) <= _minor(version) <= _minor(LAST_TRITON):
        return check_optional("triton", "GPU kernels; it comes with a CUDA build of torch")
    step = (
        f"the GPU's kernels are for Triton {FIRST_TRITON} (torch 2.11) to {LAST_TRITON} (torch "
        "2.15); install one of these torches"
    )
    return Finding("WARN", "triton", version, step)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def installed(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_disk(folder: Path) -> Finding:
    """Check that the disk of a folder has room for a checkpoint."""
    free = shutil.disk_usage(folder).free / 2**30
    detail = f"{free:.1f} GiB free in {folder}"
    step = (
        "a checkpoint holds weights and optimizer: 12 bytes a parameter, 7 with "
        "train.optimizer_states=compact; make room, or set run.dir"
    )
    if free < LOW_DISK_GIB:
        return Finding("FAIL" if free < NO_DISK_GIB else "WARN", "disk", detail, step)
    return Finding("OK", "disk", detail)


def e4m3_values() -> list[float]:
    """Return the 127 finite non-negative values of E4M3, by the definition of the format.

    A code has 4 bits of exponent with bias 7 and 3 of mantissa; exponent 0 is subnormal, and all
    ones is NaN.
    """
    codes = ((code >> 3, code & 7) for code in range(0x7F))
    return [
        mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        for exponent, mantissa in codes
    ]


def check_fp8_cast() -> list[Finding]:
    """Check that E4M3 values survive the quantizer and that ties round to the even code.

    The largest value is in each group, so the scale is 1 and the cast alone is seen.
    """
    values = e4m3_values()
    exact = torch.tensor([[*values, -values[-1]]])
    halfway = [(low + high) / 2 for low, high in itertools.pairwise(values)]
    even = [values[code + code % 2] for code in range(len(halfway))]
    rounded = torch.tensor([[*halfway, values[-1], -values[-1]]])
    expected = torch.tensor([[*even, values[-1], -values[-1]]])
    wrong = int((dequantize(quantize(exact)) != exact).sum())
    wrong += int((dequantize(quantize(rounded)) != expected).sum())
    if wrong:
        step = "this torch rounds E4M3 differently: results would not be exact; use another version"
        return [Finding("FAIL", "FP8 cast", f"{wrong} of 256 values wrong", step)]
    return [Finding("OK", "FP8 cast", "256 values: exact, ties to even")]


def check_exactness() -> list[Finding]:
    """Check that each operation gives a row the same bits whatever else is in the batch.

    On a GPU the promise is also tested at a real model's shapes, as a run proves it at its start.
    """
    from jetrl.parity import check_policy, said_when_slow, self_check

    properties = [("exact", checked) for checked in self_check()]
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        from jetrl.models.policy import Policy
        from jetrl.models.shapes import SHAPES

        shape = {**SHAPES["qwen3-0.6b"], "num_hidden_layers": 2}
        with said_when_slow():
            properties += [("exact on the GPU", checked) for checked in self_check("cuda")]
            policy = Policy.from_config(shape, PrecisionPlan.preset("unified"), 0, "cuda")
            shapes = "exact at qwen3-0.6b's shapes"
            properties += [(shapes, checked) for checked in check_policy(policy)]
    step = "exact plans will stop; report it with `jetrl doctor --json`"
    return [
        Finding("OK", f"{where}: {checked.operation}", checked.detail)
        if checked.ok
        else Finding("FAIL", f"{where}: {checked.operation}", checked.detail, step)
        for where, checked in properties
    ]


def check_answers() -> list[Finding]:
    """Check that a scoring process starts and judges known answers rightly."""
    from jetrl.tasks import Scorer

    with Scorer("gsm8k", path="openai/gsm8k", workers=1):  # a name: no data is read to judge
        return [Finding("OK", "math-verify", "a scoring process judges known answers rightly")]
