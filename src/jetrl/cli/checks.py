"""The checks of `jetrl doctor`. Each looks at one thing and says OK, WARN or FAIL, what it found,
and the next step to take where there is one. FAIL: jetrl does not work as promised on this machine.
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

Status = Literal["OK", "WARN", "FAIL"]

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


class Check(NamedTuple):
    """One line of the doctor's report."""

    status: Status
    name: str
    detail: str
    next_step: str = ""


def all_checks() -> list[Check]:
    """All checks, in the order they are shown. A check that raises is a FAIL with its message."""
    checks = [
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
        checks += guarded(name, self_check)
    return checks


def guarded(name: str, self_check: Callable[[], list[Check]]) -> list[Check]:
    try:
        return self_check()
    except UserError as error:  # says itself what to do
        return [Check("FAIL", name, str(error))]
    except Exception as error:  # a report goes on: what broke is the finding
        detail = f"{type(error).__name__}: {error}"
        return [Check("FAIL", name, detail, "please report this with `jetrl doctor --json`")]


def check_python() -> Check:
    version = platform.python_version()
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Check("OK", "python", f"{version}, {platform.platform()}")
    return Check("WARN", "python", version, "use Python 3.11 to 3.13, which the tests run with")


def check_torch() -> Check:
    version = torch.__version__
    if _minor(version) >= (2, 11):
        return Check("OK", "torch", f"{version}, {torch.get_num_threads()} threads")
    return Check("FAIL", "torch", version, "pip install 'torch>=2.11'")


def check_device() -> Check:
    if not torch.cuda.is_available():
        return Check("OK", "device", "CPU references: right for the demo, tests and tiny models")
    major, minor = torch.cuda.get_device_capability()
    detail = f"{torch.cuda.get_device_name()}, sm_{major}{minor}, CUDA {torch.version.cuda}"
    if (major, minor) != (9, 0):
        step = "jetrl supports Hopper GPUs (H100, H200: sm_90); elsewhere use run.device=cpu"
        return Check("WARN", "device", detail, step)
    gemm = "DeepGEMM and cuBLAS" if importlib.util.find_spec("deep_gemm") else "cuBLAS"
    return Check("OK", "device", f"{detail}; FP8 GEMM by {gemm}, of few rows by Triton")


def check_core(name: str) -> Check:
    version = installed(name)
    if version is None:
        return Check("FAIL", name, "not installed", f"pip install {name}")
    return Check("OK", name, version)


def check_optional(name: str, use: str) -> Check:
    version = installed(name)
    return Check("OK", name, version or f"not installed (optional; for {use})")


def check_triton() -> Check:
    version = installed("triton")
    if version is None or _minor(FIRST_TRITON) <= _minor(version) <= _minor(LAST_TRITON):
        return check_optional("triton", "GPU kernels; it comes with a CUDA build of torch")
    step = (
        f"the GPU's kernels are for Triton {FIRST_TRITON} (torch 2.11) to {LAST_TRITON} (torch "
        "2.15); install one of these torches"
    )
    return Check("WARN", "triton", version, step)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def installed(name: str) -> str | None:
    """The version of an installed distribution; None if there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_disk(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free / 2**30
    detail = f"{free:.1f} GiB free in {folder}"
    step = (
        "a checkpoint holds weights and optimizer: 12 bytes a parameter, 7 with "
        "train.optimizer_states=compact; make room, or set run.dir"
    )
    if free < NO_DISK_GIB:
        return Check("FAIL", "disk", detail, step)
    if free < LOW_DISK_GIB:
        return Check("WARN", "disk", detail, step)
    return Check("OK", "disk", detail)


def e4m3_values() -> list[float]:
    """The 127 finite non-negative values of E4M3, from its definition: 4 bits of exponent with bias
    7, 3 of mantissa; exponent 0 is subnormal; all ones is NaN."""
    values = []
    for code in range(0x7F):
        exponent, mantissa = code >> 3, code & 7
        values.append(
            mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        )
    return values


def check_fp8_cast() -> list[Check]:
    """Every E4M3 value survives, and a value halfway between two rounds to the even code.

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
        return [Check("FAIL", "FP8 cast", f"{wrong} of 256 values wrong", step)]
    return [Check("OK", "FP8 cast", "256 values: exact, ties to even")]


def check_exactness() -> list[Check]:
    """Each operation gives a row the same bits whatever else is in the batch; on a GPU also the
    promise at a real model's shapes, as a run proves it at its start."""
    from jetrl.parity import check_policy, said_when_slow, self_check

    found = [("exact", check) for check in self_check()]
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        from jetrl.bench.shapes import SHAPES
        from jetrl.models.policy import Policy

        shape = {**SHAPES["qwen3-0.6b"], "num_hidden_layers": 2}
        with said_when_slow():
            found += [("exact on the GPU", check) for check in self_check("cuda")]
            policy = Policy.from_config(shape, PrecisionPlan.preset("unified"), 0, "cuda")
            found += [("exact at qwen3-0.6b's shapes", check) for check in check_policy(policy)]
    step = "exact plans will stop; report it with `jetrl doctor --json`"
    return [
        Check("OK", f"{where}: {check.operation}", check.detail)
        if check.ok
        else Check("FAIL", f"{where}: {check.operation}", check.detail, step)
        for where, check in found
    ]


def check_answers() -> list[Check]:
    """Starts one scoring process and lets it judge known answers."""
    from jetrl.tasks import Scorer

    with Scorer("gsm8k", path="openai/gsm8k", workers=1):  # a name: no data is read to judge
        return [Check("OK", "math-verify", "a scoring process judges known answers rightly")]
