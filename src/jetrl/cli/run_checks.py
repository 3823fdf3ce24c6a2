"""The checks of `jetrl doctor RUN`: what a run was doing when it ended, what is whole, what is
damaged, and how it goes on. Read only; the run may be running."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path

from jetrl.cli.checks import Check, Status, check_disk
from jetrl.errors import UserError
from jetrl.runs import Attempt, RunDirectory
from jetrl.runs.format import duration
from jetrl.runs.status import Status as RunStatus
from jetrl.runs.status import read_status
from jetrl.settings.presets import is_exact
from jetrl.training import Checkpoints


def run_checks(path: Path) -> list[Check]:
    """What there is to say about a run directory, in the order it is shown.

    Raises:
        UserError: it is not a run directory.
    """
    run = RunDirectory.open(path)
    checks = [
        check_end(run),
        check_progress(run),
        *check_checkpoints(run),
        *check_hang(run),
        *check_numbers(run),
        *check_nonfinite(run),
        check_disk(path),
    ]
    if run.state() not in ("running", "finished"):
        checks.append(how_to_go_on(run))
    return checks


def check_end(run: RunDirectory) -> Check:
    """How the last start of the program ended, and where it was."""
    attempts = run.attempts()
    if not attempts:
        step = "start it again: an attempt that did nothing leaves the name free"
        return Check(
            "WARN", "end", "the program was started and killed before its first line", step
        )
    last, status, state = attempts[-1], read_status(run.path), run.state()
    count = f"attempt {len(attempts)}, started {_date(last.started)}"
    where = _where(status, last)
    if state == "running":
        return Check("OK", "end", f"running: {where}; {count}")
    if state == "finished":
        return Check("OK", "end", f"finished {_date(last.ended)}; {count}")
    if last.ended is None:
        step = (
            "nothing of it could say why: look for a terminal that was closed (nohup and tmux keep "
            "a run), SIGKILL from outside, the out-of-memory killer (dmesg), a power cut"
        )
        return Check("FAIL", "end", f"killed {where}; {count}", step)
    took = duration(last.ended - last.started)
    level: Status = "FAIL" if state == "failed" else "WARN"
    detail = f"{state} after {took}, {where}: {last.reason}; {count}"
    step = "log.txt has the traceback" if state == "failed" and "hang" not in last.reason else ""
    return Check(level, "end", detail, step)


def check_progress(run: RunDirectory) -> Check:
    """How far it came."""
    total = run.config().get("loop", {}).get("steps", "?")
    try:
        history = run.history()
    except UserError as error:
        return Check("FAIL", "progress", str(error), "repair or delete that line")
    parts = [f"{history.num_sft_steps} supervised updates"] if history.num_sft_steps else []
    if _command(run) == "train":
        parts.append(f"{max(history.last_step, 0)} of {total} steps")
    reward = history.reward
    if reward is not None:
        parts.append(f"reward {reward.first:.3f} to {reward.last:.3f}")
    parts.append(f"{duration(history.elapsed_s)} in all")
    return Check("OK", "progress", ", ".join(parts))


def check_checkpoints(run: RunDirectory) -> list[Check]:
    """Each checkpoint: whole or damaged. The steps that a resume would do again."""
    found = []
    good = []
    for name, folder in (("", run.checkpoints_dir), ("sft ", run.checkpoints_dir / "sft")):
        checkpoints = Checkpoints(folder)
        for step in checkpoints.steps():
            try:
                Checkpoints.check(checkpoints.path(step))
            except UserError as error:
                again = "a resume skips it; delete it, or put it back from a copy"
                found.append(Check("FAIL", f"checkpoint {name}{step}", str(error), again))
            else:
                good.append(f"{name}{step}")
    if not good:
        if found:
            return [*found, Check("FAIL", "checkpoints", "none that is whole")]
        if run.had_checkpoint(int(run.config().get("checkpoint", {}).get("every", 0))):
            gone = "none, where there has been one"
            return [Check("FAIL", "checkpoints", gone, "put it back from a copy")]
        return [Check("WARN", "checkpoints", "none yet", "a resume begins anew")]
    last = good[-1]
    steps = run.metrics("rl")
    ahead = (steps[-1]["step"] if steps else 0) - int(last) if last.isdigit() else 0
    again = f"; {ahead} steps after it would be done again" if ahead > 0 else ""
    return [*found, Check("OK", "checkpoints", f"whole: {', '.join(good)}{again}")]


def check_hang(run: RunDirectory) -> list[Check]:
    """The last hang, if hang.txt tells of one."""
    try:
        text = (run.path / "hang.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
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
    return [Check("WARN", "hang", f"{last}{where}", step)]


def check_numbers(run: RunDirectory) -> list[Check]:
    """Sums over the run that should be 0."""
    names: dict[str, tuple[Status, str, str]] = {
        "mismatch/num_different": ("FAIL", "tokens differ between sampler and trainer", ""),
        "policy/skipped_updates": (
            "WARN",
            "updates were not finite and were skipped",
            "log.txt names operation and layer",
        ),
        "critic/skipped_updates": (
            "WARN",
            "updates of the critic were not finite and were skipped",
            "log.txt names operation and layer",
        ),
        "reward_model/skipped_updates": (
            "WARN",
            "updates of the reward model were not finite and were skipped",
            "log.txt names the parameters",
        ),
        "reward/failures": (
            "WARN",
            "completions could not be judged and got reward 0",
            "log.txt says why, for the first of each step",
        ),
    }
    lines = run.metrics()
    plan = run.plan()
    exact = is_exact(plan.get("rollout_linear"), plan.get("train_linear"))
    found = []
    for name, (level, words, step) in names.items():
        total = sum(line.get(name, 0) for line in lines)
        if total and (name != "mismatch/num_different" or exact):
            found.append(Check(level, name, f"{total:g} {words}", step))
    return found


def check_nonfinite(run: RunDirectory) -> list[Check]:
    """What was kept of updates that were not finite."""
    folders = sorted((run.path / "nonfinite").glob("*step_*"))
    if not folders:
        return []
    again = shlex.join(["jetrl", "replay", str(folders[-1])])
    names = ", ".join(folder.name for folder in folders)
    return [Check("WARN", "not finite", f"kept to be run again: {names}", again)]


def how_to_go_on(run: RunDirectory) -> Check:
    """The command that resumes the run with its own settings."""
    command, *options = _command(run).split()
    again = shlex.join(["jetrl", command, str(run.path / "config.toml"), *options, "--resume"])
    return Check("OK", "to go on", again)


def _command(run: RunDirectory) -> str:
    """What it was started with: train, sft, or sft --task reward."""
    attempts = run.attempts()
    text = attempts[-1].command if attempts else ""
    if "sft" not in text.split()[:3]:
        return "train"
    return "sft --task reward" if re.search("--task[ =]reward", text) else "sft"


def _where(status: RunStatus | None, attempt: Attempt) -> str:
    """In which phase of which step; before its first phase, an attempt has not written any."""
    if status is None or status.time < attempt.started:
        return "while it was opened"
    step = f"step {status.step}" if status.step else "the time before step 1"
    phase = f"in {status.phase} of {step}" if status.phase else f"between phases of {step}"
    return f"{phase}, which began {_date(status.time)}" if status.phase else phase


def _date(seconds: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
