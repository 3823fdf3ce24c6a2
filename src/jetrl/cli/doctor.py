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
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from jetrl.cli.arguments import print_json, table
from jetrl.errors import UserError
from jetrl.settings.presets import DEFAULT_PRESET

if TYPE_CHECKING:
    from jetrl.runs.attempts import Attempt
    from jetrl.runs.directory import RunDirectory
    from jetrl.runs.schemas import Status

Severity = Literal["OK", "WARN", "FAIL", "--"]

CORE = ("transformers", "safetensors", "numpy", "pydantic", "rich", "matplotlib", "math-verify")
OPTIONAL = {
    "datasets": "data sets by name: pip install 'jetrl[data]'",
    "reasoning-gym": "tasks of reasoning-gym: pip install 'jetrl[reasoning-gym]'",
    "sgl-deep-gemm": "faster decode on a GPU: pip install 'jetrl[deep-gemm]'",
    "cuda-bindings": "KV pages on a GPU; it comes with a CUDA build of torch",
    **dict.fromkeys(("wandb", "trackio", "tensorboard"), "tracking: install it with pip"),
}
# Kernels compile with this range of versions (tests/kernels/test_triton.py).
FIRST_TRITON, LAST_TRITON = "3.6", "3.9"
LOW_DISK_GIB, NO_DISK_GIB = 10.0, 1.0
REPORT = "please report this with `jetrl doctor --json`"
_RECORDED = re.compile(r"collectives_rank_\d+\.json|nccl_timeout_rank_\d+")


class Finding(NamedTuple):
    """Result of one check, printed as one line."""

    status: Severity
    name: str
    detail: str
    next_step: str = ""

    @classmethod
    def of(
        cls, good: bool, name: str, detail: str, next_step: str, otherwise: Severity = "FAIL"
    ) -> Finding:
        """Return OK if `good`, else `otherwise` with the next step."""
        return cls("OK", name, detail) if good else cls(otherwise, name, detail, next_step)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", nargs="?", metavar="RUN", help="a run's name or directory (default: this machine)")
    add("--dir", default="runs", help="parent folder of run directories")
    add("--json", action="store_true", help="print the checks as a JSON list")


def run(args: argparse.Namespace) -> int:
    from jetrl.cli.runs import find_run
    from jetrl.runs.format import visible

    findings = _all_checks() if args.run is None else run_checks(find_run(args.run, Path(args.dir)))
    if args.json:
        print_json([finding._asdict() for finding in findings])
    else:
        lines = [table([finding[:3] for finding in findings])]
        steps = [f"  {each.name}: {each.next_step}" for each in findings if each.next_step]
        lines += ["", "next steps:", *steps] if steps else []
        print(visible("\n".join(lines), newlines=True))  # the end of a run may quote model output
    return 1 if any(finding.status == "FAIL" for finding in findings) else 0


def _all_checks() -> list[Finding]:
    self_checks = {"FP8 cast": _check_fp8_cast, "exactness": _check_exactness}
    if installed("math-verify"):
        self_checks["math-verify"] = _check_answers
    return [
        *(_check_python(), _check_torch(), _check_device()),
        *(_check_package(name) for name in CORE),
        _check_triton(),
        *(_check_package(name, use) for name, use in OPTIONAL.items()),
        _check_disk(Path.cwd()),
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

    from jetrl.precision.backend import SUPPORTED, accelerator

    if not torch.cuda.is_available():
        detail = "no GPU: CPU references, enough for the demo, the tests and tiny models"
        return Finding("OK", "device", detail)
    major, minor = torch.cuda.get_device_capability()
    detail = f"{torch.cuda.get_device_name()}, sm_{major}{minor}, CUDA {torch.version.cuda}"
    gemm = "DeepGEMM and cuBLAS" if importlib.util.find_spec("deep_gemm") else "cuBLAS"
    detail += f"; FP8 GEMM: {gemm}, and Triton for few rows"
    step = f"jetrl supports {SUPPORTED}; on others set run.device=cpu"
    return Finding.of(accelerator() is not None, "device", detail, step, "WARN")


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


def _check_disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free / 2**30
    detail = f"{free:.1f} GiB free in {folder}"
    step = "a checkpoint takes up to 12 bytes per parameter: free some space, or set run.dir"
    level: Severity = "FAIL" if free < NO_DISK_GIB else "WARN"
    return Finding.of(free >= LOW_DISK_GIB, "disk", detail, step, level)


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
    from jetrl.session.parity import PROVING, check_policy, self_check

    properties = [("exact", checked) for checked in self_check()]
    if accelerator() is not None:
        from jetrl.models.policy import Policy
        from jetrl.precision import PrecisionPlan
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
            policy = Policy.from_config(shape, PrecisionPlan.preset(DEFAULT_PRESET), 0, "cuda")
            where = f"{DEFAULT_PRESET} at qwen3-0.6b's shapes"
            properties += [(where, checked) for checked in check_policy(policy)]
    step = f"runs with an exact plan will stop: {REPORT}"
    return [Finding.of(c.ok, f"{where}: {c.operation}", c.detail, step) for where, c in properties]


def _check_answers() -> list[Finding]:
    """Check that a scoring process starts and scores known answers correctly."""
    from jetrl.tasks import Scorer

    with Scorer("gsm8k", path="openai/gsm8k", workers=1):  # the name reads no data
        return [Finding("OK", "math-verify", "a scoring process scores known answers correctly")]


def run_checks(path: Path) -> list[Finding]:
    """Return findings about a run directory, in output order."""
    from jetrl.runs.directory import RunDirectory

    run = RunDirectory.open(path)
    checks: dict[str, Callable[[RunDirectory], list[Finding]]] = {
        "end": _check_end,
        "progress": _check_progress,
        "checkpoints": _check_checkpoints,
        "hang": _check_hang,
        "ranks": _check_ranks,
        "numbers": _check_numbers,
        "disk": lambda _: [_check_disk(path)],
        "to continue": _how_to_continue,
    }
    findings: list[Finding] = []
    for name, check in checks.items():
        try:
            findings += check(run)
        except UserError as error:  # one damaged file must not hide other findings
            findings.append(Finding("FAIL", name, str(error), "repair or delete that file or line"))
    return findings


def _check_end(run: RunDirectory) -> list[Finding]:
    from jetrl.runs.attempts import read_status
    from jetrl.runs.format import duration

    attempts = run.attempts()
    if not attempts:
        step = "start it again; the name is still free"
        return [Finding("WARN", "end", "killed before the run began", step)]
    last, state = attempts[-1], run.state()
    count = f"attempt {len(attempts)}, started {_date(last.started)}"
    where = _where(read_status(run.path), last)
    if state == "running":
        return [Finding("OK", "end", f"running: {where}; {count}")]
    if state == "finished":
        return [Finding("OK", "end", f"finished {_date(last.ended)}; {count}")]
    if last.ended is None:
        step = "look for a closed terminal (use nohup or tmux), SIGKILL, the out-of-memory killer"
        return [Finding("FAIL", "end", f"killed {where}; {count}", step)]
    failed = state == "failed"
    detail = f"{state} after {duration(last.ended - last.started)}, {where}: {last.reason}; {count}"
    step = "log.txt has the traceback" if failed and "hang" not in last.reason else ""
    return [Finding("FAIL" if failed else "WARN", "end", detail, step)]


def _check_progress(run: RunDirectory) -> list[Finding]:
    from jetrl.runs.format import duration

    history = run.history()
    facts = [f"{history.num_sft_steps} supervised updates"] if history.num_sft_steps else []
    if _command(run) == "train":
        total = run.config().get("loop", {}).get("steps", "?")
        facts.append(f"{max(history.last_step, 0)} of {total} steps")
    if (reward := history.reward) is not None:
        facts.append(f"reward {reward.first:.3f} to {reward.last:.3f}")
    facts.append(f"{duration(history.elapsed_s)} in total")
    return [Finding("OK", "progress", ", ".join(facts))]


def _check_checkpoints(run: RunDirectory) -> list[Finding]:
    """Report intact and damaged checkpoints, and how many steps a resume would repeat."""
    from jetrl.training.checkpoint import CheckpointFolder
    from jetrl.training.checkpoint_files import check_intact

    damaged, whole = list[Finding](), list[str]()
    for name, folder in (("", run.checkpoints_dir), ("sft ", run.checkpoints_dir / "sft")):
        checkpoints = CheckpointFolder(folder)
        for step in checkpoints.steps():
            try:
                check_intact(checkpoints.path(step))
            except UserError as error:
                advice = "a resume skips it; delete it, or restore it from a backup"
                if checkpoints.path(step).exists():  # an active run removes older checkpoints
                    damaged.append(Finding("FAIL", f"checkpoint {name}{step}", str(error), advice))
            else:
                whole.append(f"{name}{step}")
    if not whole and damaged:
        return [*damaged, Finding("FAIL", "checkpoints", "all damaged")]
    if not whole and run.had_checkpoint():
        gone = "all were deleted"
        return [Finding("FAIL", "checkpoints", gone, "restore one from a backup")]
    if not whole:
        return [Finding("WARN", "checkpoints", "none yet", "a resume starts from the beginning")]
    last = whole[-1]
    steps = run.metrics("rl")
    ahead = (steps[-1]["step"] if steps else 0) - int(last) if last.isdigit() else 0
    again = f"; a resume repeats {ahead} step{'s' * (ahead > 1)}" if ahead > 0 else ""
    return [*damaged, Finding("OK", "checkpoints", f"intact: {', '.join(whole)}{again}")]


def _check_hang(run: RunDirectory) -> list[Finding]:
    from jetrl.files import read_bytes

    try:
        text = read_bytes(run.path / "hang.txt").decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    if not text.strip():
        return []
    last = "written by faulthandler: the GIL was held"
    last = [last, *re.findall(r"(?m)^==== (.*)$", text)][-1]
    stack = text.rpartition("most recent")[2]
    frame = re.search(r'(?m)^  File "(.+)", line (\d+) in (.+)$', stack)
    where = f"; the main thread was in {frame[3]} ({frame[1]}, line {frame[2]})" if frame else ""
    step = "hang.txt has the stacks, the sequences and the memory; watchdog.* sets the limits"
    return [Finding("WARN", "hang", f"{last}{where}", step)]


def _check_ranks(run: RunDirectory) -> list[Finding]:
    """Report where each rank was when a rank ended the last attempt, and which records exist."""
    from jetrl.files import read_stored
    from jetrl.runs.schemas import BOARD

    folder, attempts = run.path / "ranks", run.attempts()
    try:
        record = read_stored(folder / "board.json", BOARD)
    except FileNotFoundError:
        return []
    if not attempts or record.time < attempts[-1].started:  # from an earlier attempt
        return []
    findings = [Finding("WARN", "ranks", record.words)]
    counts = [line.collectives for line in record.ranks]
    for line in record.ranks:
        detail = f"{line.place}; {line.collectives} collectives begun"
        if line.collectives == min(counts) < max(counts):
            detail += ", the fewest: others waited for it"
        findings.append(Finding("OK", f"rank {line.rank}", f"{detail}; process {line.pid}"))
    files = sorted(file.name for file in folder.glob("*") if _RECORDED.fullmatch(file.name))
    if files:
        step = "torch's torchfrtrace reads nccl_timeout_* (only open files you trust with it)"
        findings.append(Finding("OK", "collectives", f"{folder}: {', '.join(files)}", step))
    return findings


def _check_numbers(run: RunDirectory) -> list[Finding]:
    """Return a finding per metric that should be 0 throughout the run but is not."""
    from jetrl.precision.plan import PrecisionPlan

    skipped = "were not finite and were skipped"
    replay = shlex.join(["jetrl", "replay", str(run.path)])
    operation = f"log.txt names operation and layer; to run it again: {replay}"
    first = "log.txt has the reason for the first one of each step"
    warnings = {
        "policy/skipped_updates": (f"updates {skipped}", operation),
        "critic/skipped_updates": (f"updates of the critic {skipped}", operation),
        "reward_model/skipped_updates": (f"updates of the reward model {skipped}", ""),
        "reward/failures": ("completions could not be scored and got reward 0", first),
    }
    lines, names = run.metrics(), ("mismatch/num_different", *warnings)
    totals = {name: sum(float(line.get(name, 0)) for line in lines) for name in names}
    findings = []
    different = totals["mismatch/num_different"]
    if different and PrecisionPlan.from_dict(run.plan(), str(run.path / "plan.json")).exact:
        detail = f"{different:g} tokens differ between sampler and trainer"
        findings = [Finding("FAIL", "mismatch/num_different", detail)]
    return findings + [
        Finding("WARN", name, f"{totals[name]:g} {words}", step)
        for name, (words, step) in warnings.items()
        if totals[name]
    ]


def _how_to_continue(run: RunDirectory) -> list[Finding]:
    if run.state() in ("running", "finished"):
        return []
    command, *options = _command(run).split()
    again = shlex.join(["jetrl", command, str(run.path / "config.toml"), *options, "--resume"])
    return [Finding("OK", "to continue", again)]


def _command(run: RunDirectory) -> str:
    """Return the command that started the run: train, sft, or sft --task reward."""
    attempts = run.attempts()
    text = attempts[-1].command if attempts else ""
    if "sft" not in text.split()[:3]:
        return "train"
    return "sft --task reward" if re.search("--task[ =]reward", text) else "sft"


def _where(status: Status | None, attempt: Attempt) -> str:
    """Return the current or last phase and step of an attempt."""
    if status is None or status.time < attempt.started:  # no phase has been written
        return "while the run was opened"
    step = f"step {status.step}" if status.step else "the time before step 1"
    if not status.phase:
        return f"between phases of {step}"
    return f"in {status.phase} of {step}, which began {_date(status.time)}"


def _date(seconds: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
