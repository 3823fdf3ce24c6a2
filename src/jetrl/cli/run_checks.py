"""The checks of `jetrl doctor RUN`: how a run ended, what is damaged, and how to resume it.

Nothing is written, and the run may be running.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path

from jetrl.cli.checks import Finding, Severity, check_disk
from jetrl.errors import UserError
from jetrl.files import checked, read_bytes
from jetrl.runs import Attempt, RunDirectory
from jetrl.runs.format import duration
from jetrl.runs.schemas import BOARD
from jetrl.runs.status import Status, read_status
from jetrl.training import Checkpoints

_RECORDED = re.compile(r"collectives_rank_\d+\.json|nccl_timeout_rank_\d+")


def run_checks(path: Path) -> list[Finding]:
    """Return the findings about a run directory, in the order in which they are shown.

    Raises:
        UserError: The path is not a run directory.
    """
    run = RunDirectory.open(path)
    checks: dict[str, Callable[[RunDirectory], list[Finding]]] = {
        "end": lambda run: [check_end(run)],
        "progress": lambda run: [check_progress(run)],
        "checkpoints": check_checkpoints,
        "hang": check_hang,
        "ranks": check_ranks,
        "numbers": check_numbers,
        "not finite": check_nonfinite,
        "disk": lambda _: [check_disk(path)],
        "to go on": how_to_go_on,
    }
    findings: list[Finding] = []
    for name, check in checks.items():
        try:
            findings += check(run)
        except UserError as error:  # a damaged file hides nothing of the others
            findings.append(Finding("FAIL", name, str(error), "repair or delete what is named"))
    return findings


def check_end(run: RunDirectory) -> Finding:
    """Return how the last start of the program ended, and in which phase."""
    attempts = run.attempts()
    if not attempts:
        step = "start it again: an attempt that did nothing leaves the name free"
        detail = "the program was started and killed before its first line"
        return Finding("WARN", "end", detail, step)
    last, status, state = attempts[-1], read_status(run.path), run.state()
    count = f"attempt {len(attempts)}, started {_date(last.started)}"
    where = _where(status, last)
    if state == "running":
        return Finding("OK", "end", f"running: {where}; {count}")
    if state == "finished":
        return Finding("OK", "end", f"finished {_date(last.ended)}; {count}")
    if last.ended is None:
        step = (
            "nothing of it could say why: look for a terminal that was closed (nohup and tmux keep "
            "a run), SIGKILL from outside, the out-of-memory killer (dmesg), a power cut"
        )
        return Finding("FAIL", "end", f"killed {where}; {count}", step)
    took = duration(last.ended - last.started)
    level: Severity = "FAIL" if state == "failed" else "WARN"
    detail = f"{state} after {took}, {where}: {last.reason}; {count}"
    step = "log.txt has the traceback" if state == "failed" and "hang" not in last.reason else ""
    return Finding(level, "end", detail, step)


def check_progress(run: RunDirectory) -> Finding:
    """Return how many steps the run has made, its rewards, and the time that it took."""
    total = run.config().get("loop", {}).get("steps", "?")
    try:
        history = run.history()
    except UserError as error:
        return Finding("FAIL", "progress", str(error), "repair or delete that line")
    facts = [f"{history.num_sft_steps} supervised updates"] if history.num_sft_steps else []
    if _command(run) == "train":
        facts.append(f"{max(history.last_step, 0)} of {total} steps")
    reward = history.reward
    if reward is not None:
        facts.append(f"reward {reward.first:.3f} to {reward.last:.3f}")
    facts.append(f"{duration(history.elapsed_s)} in all")
    return Finding("OK", "progress", ", ".join(facts))


def check_checkpoints(run: RunDirectory) -> list[Finding]:
    """Return which checkpoints are whole or damaged, and how many steps a resume would repeat."""
    damaged: list[Finding] = []
    whole: list[str] = []
    for name, folder in (("", run.checkpoints_dir), ("sft ", run.checkpoints_dir / "sft")):
        checkpoints = Checkpoints(folder)
        for step in checkpoints.steps():
            try:
                Checkpoints.check(checkpoints.path(step))
            except UserError as error:
                advice = "a resume skips it; delete it, or put it back from a copy"
                damaged.append(Finding("FAIL", f"checkpoint {name}{step}", str(error), advice))
            else:
                whole.append(f"{name}{step}")
    if not whole:
        if damaged:
            return [*damaged, Finding("FAIL", "checkpoints", "none that is whole")]
        if run.had_checkpoint(int(run.config().get("checkpoint", {}).get("every", 0))):
            gone = "none, where there has been one"
            return [Finding("FAIL", "checkpoints", gone, "put it back from a copy")]
        return [Finding("WARN", "checkpoints", "none yet", "a resume begins anew")]
    last = whole[-1]
    steps = run.metrics("rl")
    ahead = (steps[-1]["step"] if steps else 0) - int(last) if last.isdigit() else 0
    again = f"; {ahead} steps after it would be done again" if ahead > 0 else ""
    return [*damaged, Finding("OK", "checkpoints", f"whole: {', '.join(whole)}{again}")]


def check_hang(run: RunDirectory) -> list[Finding]:
    """Return the last hang, if hang.txt tells of one."""
    try:
        text = read_bytes(run.path / "hang.txt").decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    headers = re.findall(r"(?m)^==== (.*)$", text)
    if not text.strip():
        return []
    frames = re.findall(
        r'(?m)^  File "(.+)", line (\d+) in (.+)$', text.rpartition("most recent")[2]
    )
    where = (
        f"; the main thread was in {frames[0][2]} ({frames[0][0]}, line {frames[0][1]})"
        if frames
        else ""
    )
    last = headers[-1] if headers else "the interpreter's lock was held, faulthandler wrote it"
    step = "hang.txt has the stacks, the sequences and the memory; watchdog.* sets the limits"
    return [Finding("WARN", "hang", f"{last}{where}", step)]


def check_ranks(run: RunDirectory) -> list[Finding]:
    """Return where the ranks were when one rank ended the last attempt, with their records.

    Raises:
        UserError: The file board.json is damaged.
    """
    folder, attempts = run.path / "ranks", run.attempts()
    try:
        text = read_bytes(folder / "board.json")
    except FileNotFoundError:
        return []
    try:
        record = checked(BOARD, json.loads(text), str(folder / "board.json"))
    except (RecursionError, ValueError) as error:
        raise UserError(f"{folder / 'board.json'}: {error}") from None
    if not attempts or record.time < attempts[-1].started:  # it tells of an earlier attempt
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
        step = (
            "the collectives that each rank remembers; torch's torchfrtrace reads nccl_timeout_*, "
            "and trusts what it reads"
        )
        findings.append(Finding("OK", "collectives", f"{folder}: {', '.join(files)}", step))
    return findings


def check_numbers(run: RunDirectory) -> list[Finding]:
    """Return a finding for each number that should be 0 over the run and is not."""
    skipped, operation = "were not finite and were skipped", "log.txt names operation and layer"
    warnings = {
        "policy/skipped_updates": (f"updates {skipped}", operation),
        "critic/skipped_updates": (f"updates of the critic {skipped}", operation),
        "reward_model/skipped_updates": (
            f"updates of the reward model {skipped}",
            "log.txt names the parameters",
        ),
        "reward/failures": (
            "completions could not be judged and got reward 0",
            "log.txt says why, for the first of each step",
        ),
    }
    lines = run.metrics()
    totals = {
        name: sum(float(line.get(name, 0)) for line in lines)
        for name in ("mismatch/num_different", *warnings)
    }
    findings = [
        Finding("WARN", name, f"{totals[name]:g} {words}", step)
        for name, (words, step) in warnings.items()
        if totals[name]
    ]
    different = totals["mismatch/num_different"]
    if different and _promises_equal_bits(run):
        detail = f"{different:g} tokens differ between sampler and trainer"
        findings.insert(0, Finding("FAIL", "mismatch/num_different", detail))
    return findings


def _promises_equal_bits(run: RunDirectory) -> bool:
    """Return whether the run's precision plan is exact."""
    from jetrl.precision.plan import PrecisionPlan

    return PrecisionPlan.from_dict(run.plan(), str(run.path / "plan.json")).exact


def check_nonfinite(run: RunDirectory) -> list[Finding]:
    """Return the folders with updates that were not finite, which can be run again."""
    folders = sorted((run.path / "nonfinite").glob("*step_*"))
    if not folders:
        return []
    again = shlex.join(["jetrl", "replay", str(folders[-1])])
    names = ", ".join(folder.name for folder in folders)
    return [Finding("WARN", "not finite", f"kept to be run again: {names}", again)]


def how_to_go_on(run: RunDirectory) -> list[Finding]:
    """Return the command that resumes the run with its own settings, unless it runs or is done."""
    if run.state() in ("running", "finished"):
        return []
    command, *options = _command(run).split()
    again = shlex.join(["jetrl", command, str(run.path / "config.toml"), *options, "--resume"])
    return [Finding("OK", "to go on", again)]


def _command(run: RunDirectory) -> str:
    """Return the command that the run was started with: train, sft, or sft --task reward."""
    attempts = run.attempts()
    text = attempts[-1].command if attempts else ""
    if "sft" not in text.split()[:3]:
        return "train"
    return "sft --task reward" if re.search("--task[ =]reward", text) else "sft"


def _where(status: Status | None, attempt: Attempt) -> str:
    """Return in which phase of which step an attempt is, or was when it ended."""
    if status is None or status.time < attempt.started:  # no phase has been written
        return "while it was opened"
    step = f"step {status.step}" if status.step else "the time before step 1"
    phase = f"in {status.phase} of {step}" if status.phase else f"between phases of {step}"
    return f"{phase}, which began {_date(status.time)}" if status.phase else phase


def _date(seconds: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
