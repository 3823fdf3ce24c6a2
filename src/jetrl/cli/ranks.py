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
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NoReturn

from jetrl.cli.arguments import tell
from jetrl.distributed.world import launched_rank, launched_size, started_by_torchrun
from jetrl.errors import UserError

if TYPE_CHECKING:
    from jetrl.settings.loading import Settings

_STDOUT, _STDERR = 1, 2
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
def joined(settings: Settings) -> Iterator[None]:
    """Join the processes that torchrun has started for a run, within the block.

    A process that torchrun did not start stays alone, without a process group.

    Args:
        settings: The settings of the run.

    Raises:
        UserError: The ranks were started differently, or settings that need one process.
    """
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
    with open_world(chosen, timeout_s or TIMEOUT_S, facts=alike, problem=problem):
        yield


def _gpu_name() -> str:
    """Return the name of this rank's GPU; empty where there are fewer GPUs than ranks."""
    import torch

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    there = local_rank < torch.cuda.device_count()
    return torch.cuda.get_device_name(local_rank) if there else ""


def end(words: str, code: int, printed: bool = False) -> NoReturn:
    """End this rank with an exit code, after an error of any kind.

    Args:
        words: This rank's message about its end.
        code: The exit code.
        printed: Whether rank 0 has printed its message already.
    """
    from jetrl.distributed.meeting import NoMeeting, meet

    first = launched_rank() == 0
    try:
        meeting = meet()
        if not (printed or meeting.compared):  # the others may still be about to begin
            try:
                meeting.compare({}, problem=words.removeprefix("error: "))
            except UserError as error:
                words = f"error: {error}"
        to_print = meeting.end(words)
        if first and not printed:
            tell(to_print or words)
        elif to_print is not None:
            _say(to_print)
        if first:
            meeting.told()
    except (NoMeeting, RuntimeError) as error:  # there is no store, or no longer
        reason = f" ({error})" if isinstance(error, NoMeeting) and str(error) not in words else ""
        _say(words + reason if first else f"rank {launched_rank()}: {words}{reason}")
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    # At once: Python's end would wait for threads of NCCL, which wait for the other ranks.
    os._exit(code)


def _say(text: str) -> None:
    """Print a line on the console that a silent rank has left."""
    with contextlib.suppress(OSError):
        os.write(_console, f"{text}\n".encode())
