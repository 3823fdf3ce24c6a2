"""Checks of a run directory for `jetrl doctor RUN`: how the run ended, and how to resume it."""

from __future__ import annotations

import re
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from jetrl.errors import UserError

if TYPE_CHECKING:
    from jetrl.runs.attempts import Attempt
    from jetrl.runs.directory import RunDirectory
    from jetrl.runs.schemas import Status

Severity = Literal["OK", "WARN", "FAIL", "--"]

LOW_DISK_GIB, NO_DISK_GIB = 10.0, 1.0
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


def check_disk(folder: Path) -> Finding:
    """Report the free space of a folder's disk."""
    free = shutil.disk_usage(folder).free / 2**30
    detail = f"{free:.1f} GiB free in {folder}"
    step = "a checkpoint takes up to 12 bytes per parameter: free some space, or set run.dir"
    level: Severity = "FAIL" if free < NO_DISK_GIB else "WARN"
    return Finding.of(free >= LOW_DISK_GIB, "disk", detail, step, level)


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
        "disk": lambda _: [check_disk(path)],
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
    steps = run.metrics("rl")  # first: an active run takes steps during the imports and reads

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
    """Return the command that started the run: train, sft, or sft --task reward or dpo."""
    attempts = run.attempts()
    text = attempts[-1].command if attempts else ""
    if "sft" not in text.split()[:3]:
        return "train"
    task = re.search("--task[ =](reward|dpo)", text)
    return f"sft --task {task[1]}" if task else "sft"


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
