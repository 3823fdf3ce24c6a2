"""Check this machine, or report how a run ended and how to resume it.

For example:

    jetrl doctor
    jetrl doctor --json        for a bug report
    jetrl doctor runs/demo     how the run ended, which checkpoints are intact, how to resume it

Each line is OK, WARN (worth a look), FAIL (broken) or -- (optional, not installed); next steps
follow. Nothing is written, so it is safe during a run. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import platform
import sys
from collections.abc import Callable
from pathlib import Path

from jetrl.cli.arguments import print_json, table
from jetrl.cli.run_checks import Finding, check_disk, run_checks
from jetrl.errors import UserError
from jetrl.settings.presets import DEFAULT_PRESET

CORE = ("transformers", "safetensors", "numpy", "pydantic", "rich", "matplotlib", "math-verify")
OPTIONAL = {
    "datasets": "data sets by name: pip install 'jetrl[data]'",
    "reasoning-gym": "tasks of reasoning-gym: pip install 'jetrl[reasoning-gym]'",
    **dict.fromkeys(("starlette", "uvicorn"), "jetrl serve: pip install 'jetrl[serve]'"),
    "sgl-deep-gemm": "faster decode on a GPU: pip install 'jetrl[deep-gemm]'",
    "cuda-bindings": "KV pages on a GPU; it comes with a CUDA build of torch",
    **dict.fromkeys(("wandb", "trackio", "tensorboard"), "tracking: install it with pip"),
}
# Kernels compile with this range of versions (tests/kernels/test_triton.py).
FIRST_TRITON, LAST_TRITON = "3.6", "3.9"
REPORT = "please report this with `jetrl doctor --json`"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", nargs="?", metavar="RUN", help="a run's name or directory (default: this machine)")
    add("--dir", default="runs", help="parent folder of run directories")
    add("--json", action="store_true", help="print the checks as a JSON list")


def run(args: argparse.Namespace) -> int:
    from jetrl.cli.runs import find_run
    from jetrl.runs.format import visible

    findings = (
        _machine_checks() if args.run is None else run_checks(find_run(args.run, Path(args.dir)))
    )
    if args.json:
        print_json([finding._asdict() for finding in findings])
    else:
        lines = [table([finding[:3] for finding in findings])]
        steps = [f"  {each.name}: {each.next_step}" for each in findings if each.next_step]
        lines += ["", "next steps:", *steps] if steps else []
        print(visible("\n".join(lines), newlines=True))  # the end of a run may quote model output
    return 1 if any(finding.status == "FAIL" for finding in findings) else 0


def _machine_checks() -> list[Finding]:
    self_checks = {"FP8 cast": _check_fp8_cast, "exactness": _check_exactness}
    self_checks |= {
        f"standard run, {where}": _standard_run_check(where, device, backend)
        for where, device, backend in _places()
    }
    if installed("math-verify"):
        self_checks["math-verify"] = _check_answers
    return [
        *(_check_python(), _check_torch(), _check_device()),
        *(_check_package(name) for name in CORE),
        _check_triton(),
        *(_check_package(name, use) for name, use in OPTIONAL.items()),
        check_disk(Path.cwd()),
        *(finding for name, check in self_checks.items() for finding in _guarded(name, check)),
    ]


def _guarded(name: str, self_check: Callable[[], list[Finding]]) -> list[Finding]:
    """Return the findings of a check, or a FAIL if it raises."""
    try:
        return self_check()
    except UserError as error:  # the message says what to do
        return [Finding("FAIL", name, str(error))]
    except Exception as error:  # the other checks still run
        return [Finding("FAIL", name, f"{type(error).__name__}: {error}", REPORT)]


def _check_python() -> Finding:
    good, detail = (3, 11) <= sys.version_info[:2] <= (3, 13), platform.python_version()
    step = "use Python 3.11 to 3.13, the tested versions"
    return Finding.of(good, "python", f"{detail}, {platform.platform()}", step, "WARN")


def _check_torch() -> Finding:
    import torch

    detail = f"{torch.__version__}, {torch.get_num_threads()} threads"
    good = _minor(torch.__version__) >= (2, 11)
    return Finding.of(good, "torch", detail, "pip install 'torch>=2.11'")


def _check_device() -> Finding:
    import torch

    from jetrl.precision.backend import HOPPER, SUPPORTED, accelerator

    if not torch.cuda.is_available():
        detail = "no GPU: CPU references, enough for the demo, the tests and tiny models"
        return Finding("OK", "device", detail)
    major, minor = torch.cuda.get_device_capability()
    detail = f"{torch.cuda.get_device_name()}, sm_{major}{minor}, CUDA {torch.version.cuda}"
    if (backend := accelerator()) is not None:
        if backend is not HOPPER:
            return Finding("OK", "device", f"{detail}; kernels of run.backend=triton")
        gemm = "DeepGEMM and cuBLAS" if importlib.util.find_spec("deep_gemm") else "cuBLAS"
        return Finding("OK", "device", f"{detail}; FP8 GEMM: {gemm}, and Triton for few rows")
    step = f"jetrl supports {SUPPORTED}; on others set run.device=cpu"
    return Finding("WARN", "device", detail, step)


def _check_package(name: str, use: str = "") -> Finding:
    """Report if a package is installed; it is optional if `use` is given."""
    version = installed(name)
    if use and version is None:
        return Finding("--", name, f"not installed (optional; for {use})")
    if name == "sgl-deep-gemm" and installed("vllm"):
        step = "vLLM would pick it up and give wrong FP8 results: use separate environments"
        return Finding("WARN", name, f"{version}, but vLLM is also installed", step)
    return Finding.of(version is not None, name, version or "not installed", f"pip install {name}")


def _check_triton() -> Finding:
    version = installed("triton")
    if version is None or _minor(FIRST_TRITON) <= _minor(version) <= _minor(LAST_TRITON):
        return _check_package("triton", "GPU kernels; it comes with a CUDA build of torch")
    step = f"install a torch with Triton {FIRST_TRITON} (torch 2.11) to {LAST_TRITON} (torch 2.15)"
    return Finding("WARN", "triton", version, step)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def installed(name: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_fp8_cast() -> list[Finding]:
    """Check that the quantizer keeps E4M3 values exact and rounds ties to even."""
    import torch

    from jetrl.precision import dequantize, quantize

    # By definition of the format: 4 exponent bits with bias 7 (0: subnormal), 3 mantissa bits. Each
    # group contains the largest value, so its scale is 1 and only the cast is tested.
    codes = ((code >> 3, code & 7) for code in range(0x7F))
    values = [2.0 ** (max(e, 1) - 7) * ((e > 0) + mantissa / 8) for e, mantissa in codes]
    halfway = [(low + high) / 2 for low, high in itertools.pairwise(values)]
    even = [values[code + code % 2] for code in range(len(halfway))]
    ends, wrong = [values[-1], -values[-1]], 0
    for given, expected in ((values, values), (halfway, even)):
        found = dequantize(quantize(torch.tensor([[*given, *ends]])))
        wrong += int((found != torch.tensor([[*expected, *ends]])).sum())
    detail = f"{wrong} of 256 values wrong" if wrong else "256 values: exact, ties to even"
    step = "this torch rounds E4M3 differently, so results are not exact: use another version"
    return [Finding.of(not wrong, "FP8 cast", detail, step)]


def _check_exactness() -> list[Finding]:
    """Check that every operation is batch-invariant: a row's result depends on no other row."""
    from jetrl.precision.backend import accelerator
    from jetrl.session.parity import PROVING, check_policy, default_plan, self_check

    properties = [("exact", checked) for checked in self_check()]
    if accelerator() is not None:
        import torch

        from jetrl.models.policy import Policy
        from jetrl.runs.console import announced_if_slow

        # Also check at the shapes of a real model, as a run does at its start.
        shape = {
            "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
            "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8,
            "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
            "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        }  # fmt: skip
        with announced_if_slow(PROVING):
            properties += [("exact on the GPU", checked) for checked in self_check("cuda")]
            plan = default_plan(torch.device("cuda"))
            policy = Policy.from_config(shape, plan, 0, "cuda")
            where = f"{DEFAULT_PRESET} at qwen3-0.6b's shapes"
            properties += [(where, checked) for checked in check_policy(policy)]
    step = f"runs with an exact plan will stop: {REPORT}"
    return [Finding.of(c.ok, f"{where}: {c.operation}", c.detail, step) for where, c in properties]


def _places() -> list[tuple[str, str, str]]:
    """Return the places of the standard run: in words, its device and its backend."""
    from jetrl.precision.backend import accelerator, selected_backend

    with selected_backend(defined=True):
        fastest = accelerator()
    names = [] if fastest is None else list(dict.fromkeys([fastest.name, "triton"]))
    return [("CPU", "cpu", "auto"), *((f"GPU, run.backend={n}", "cuda", n) for n in names)]


def _standard_run_check(where: str, device: str, backend: str) -> Callable[[], list[Finding]]:
    """Return the check that the plan `integer` has the bits of other machines in one place."""

    def check() -> list[Finding]:
        from jetrl.session.standard_run import DIGEST, standard_digest

        found = standard_digest(device, backend)
        same = "the bits of every machine" if found == DIGEST else "other bits than elsewhere"
        detail = f"{same} under precision.preset=integer, digest {found[:16]}"
        return [Finding.of(found == DIGEST, f"standard run, {where}", detail, REPORT)]

    return check


def _check_answers() -> list[Finding]:
    """Check that a scoring process starts and scores known answers correctly."""
    from jetrl.tasks import Scorer

    with Scorer("gsm8k", path="openai/gsm8k", workers=1):  # the name reads no data
        return [Finding("OK", "math-verify", "a scoring process scores known answers correctly")]
