"""The process of a command that torchrun has started as one of several ranks.

Rank 0 speaks to the user. The other ranks write nothing to the console: what they print goes
nowhere until the run directory has a log of theirs (runs/follower.py), and an error that all ranks
end with is printed once, by rank 0.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from jetrl.cli.arguments import tell
from jetrl.distributed.board import Trouble
from jetrl.distributed.peers import peers
from jetrl.distributed.world import launched_rank, launched_size, started_by_torchrun
from jetrl.errors import RankLost, RunStopped, Terminated, TimeLimitReached, UserError

if TYPE_CHECKING:
    from jetrl.settings.loading import Settings

_STDOUT, _STDERR = 1, 2
_said = threading.Lock()  # taken by the thread that prints how this process ends
_console = _STDERR  # where a rank other than the first prints what nobody prints for it


def be_silent() -> None:
    """Let this process print nothing, neither from Python nor from the libraries below it."""
    global _console
    sys.stdout.flush()
    sys.stderr.flush()
    _console = os.dup(_STDERR)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (_STDOUT, _STDERR):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


@contextlib.contextmanager
def joined(settings: Settings, resume: bool = False) -> Iterator[None]:
    """Join the processes that torchrun has started for a run, within the block.

    A process that torchrun did not start stays alone, without a process group.

    Args:
        settings: The settings of the run.
        resume: Whether the run goes on.

    Raises:
        UserError: The ranks were started differently, or settings that need one process.
    """
    if not started_by_torchrun():
        yield
        return
    from jetrl.distributed.flight_recorder import record_collectives

    problem = ""
    if settings.precision.preset == "fp32" and launched_size() > 1:
        problem = (
            f"precision.preset = fp32 and {launched_size()} processes: under fp32 layers read the "
            "master weights, of which each rank holds a part; take unified, jet, mixed or bf16, "
            "or one process"
        )
    facts = {
        f"{section}.{key}": repr(value)
        for section, values in settings.model_dump(mode="json").items()
        for key, value in values.items()
    }
    record_collectives(Path(settings.run.dir) / str(settings.run.name) / "ranks")
    facts["what is done with the run"] = "resume it" if resume else "begin it"
    with joined_on(settings.run.device, settings.distributed.timeout_s, facts, problem):
        yield


@contextlib.contextmanager
def joined_on(
    device: str,
    timeout_s: float | None = None,
    facts: Mapping[str, str] | None = None,
    problem: str = "",
) -> Iterator[None]:
    """Join the processes that torchrun has started for a command, within the block.

    Args:
        device: The device, as run.device names it.
        timeout_s: How long a rank waits for the others; None: the default of the settings.
        facts: What has to be the same on all ranks beside versions and command line, by name.
        problem: Why the command cannot run as several processes; empty where it can.

    Raises:
        UserError: The ranks were started differently, or there is a problem.
    """
    if not started_by_torchrun():
        yield
        return
    from jetrl.distributed.process_group import TIMEOUT_S, open_world
    from jetrl.runs.attempts import versions
    from jetrl.session.building import choose_device

    chosen = choose_device(device)
    alike = {"the command line": shlex.join(sys.argv[1:]), **(facts or {})}
    for name, version in versions().items():
        if name != "system":
            alike[f"the version of {name}"] = version
    if chosen == "cuda":
        alike["the GPU"] = _gpu_name()
    with open_world(chosen, timeout_s or TIMEOUT_S, facts=alike, problem=problem, leave=leave):
        yield


def _gpu_name() -> str:
    """Return the name of this rank's GPU; empty where there are fewer GPUs than ranks."""
    import torch

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    there = local_rank < torch.cuda.device_count()
    return torch.cuda.get_device_name(local_rank) if there else ""


def goes_on(settings: Settings) -> bool:
    """Return whether torchrun starts the ranks again of a run that it has begun (--max-restarts).

    Args:
        settings: The settings of the run.

    Raises:
        Terminated, TimeLimitReached: The run was not lost, but asked to stop: it does not go on.
    """
    # Not by the number of restarts, which machines may count differently.
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) == 0:
        return False
    from jetrl.distributed.processes import started_before
    from jetrl.runs.attempts import read_attempts

    path = Path(settings.run.dir) / str(settings.run.name)
    attempts = read_attempts(path) if (path / "config.toml").is_file() else []
    # Not a run of an earlier torchrun, which would be continued without being asked to.
    if not attempts or not started_before(os.getppid(), attempts[-1].started):
        return False
    last = attempts[-1]
    if last.state == "interrupted":
        raise Terminated
    if last.state == "stopped" and last.reason.startswith("run.max_hours"):
        raise TimeLimitReached(f"{last.reason}; go on with --resume")
    return True


def end(
    words: str, code: int, error: BaseException | None = None, printed: bool = False
) -> NoReturn:
    """End this rank with an exit code, after an error of any kind; the other ranks end as well.

    Args:
        words: This rank's message about its end.
        code: The exit code.
        error: The error that ends it; None: one that is no other rank's.
        printed: Whether rank 0 has printed its message already.
    """
    from jetrl.distributed.meeting import NoMeeting, meet

    trouble = peers().trouble() if _may_follow(error) else None
    if trouble is not None and trouble.rank != launched_rank():
        leave(trouble)
    peers().failed(words, code)
    first = launched_rank() == 0
    try:
        meeting = meet()
        if not (printed or meeting.compared):  # the others may still be about to begin
            try:
                meeting.compare({}, problem=words.removeprefix("error: "))
            except UserError as common:
                words = f"error: {common}"
        # Where this rank was the first to fail, the others follow without words of their own.
        trouble = peers().trouble() if first else None
        heard = peers().is_well(0) or (trouble is not None and trouble.rank == 0)
        to_print = meeting.end(words, heard)
        if first and not printed:
            _say_once(to_print or words)
        elif to_print is not None:
            _say_once(to_print)
        if first:
            meeting.told()
    except (NoMeeting, RuntimeError) as lost:  # there is no store, or no longer
        reason = f" ({lost})" if isinstance(lost, NoMeeting) and str(lost) not in words else ""
        _say_once(words + reason if first else f"rank {launched_rank()}: {words}{reason}")
    exit_now(code)


def leave(trouble: Trouble) -> NoReturn:
    """End this rank because of another's trouble, which one rank prints.

    Args:
        trouble: What became of the other rank.
    """
    from jetrl.distributed.meeting import NoMeeting, meet
    from jetrl.runs.format import visible

    rank = launched_rank()
    if rank == int(trouble.rank == 0 and trouble.kind == "lost"):
        _say_once(visible(trouble.message, newlines=True))
    if trouble.rank < 0:  # the store itself is gone
        exit_now(trouble.code)
    with contextlib.suppress(NoMeeting, RuntimeError):
        meeting = meet().again()  # the main thread may be waiting on its connection
        meeting.end("", heard=True)
        if rank == 0:
            meeting.told()
    exit_now(trouble.code)


def _may_follow(error: BaseException | None) -> bool:
    """Return whether an error may be nothing but the consequence of another rank's end."""
    if isinstance(error, UserError | RunStopped):
        return isinstance(error, RankLost)
    return isinstance(error, Exception | Terminated)


def exit_now(code: int) -> NoReturn:
    """End the process at once, since Python's own end may wait for what never comes.

    Threads of NCCL wait for other ranks; threads that watch them would be killed within C++.

    Args:
        code: The exit code.
    """
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


def _say_once(text: str) -> None:
    """Print the message of this process's end, if no other thread has printed one."""
    if not _said.acquire(blocking=False):
        return
    if launched_rank() == 0:
        tell(text)
    else:
        _say(text)


def _say(text: str) -> None:
    """Print a line on the console that a silent rank has left."""
    with contextlib.suppress(OSError):
        os.write(_console, f"{text}\n".encode())
