"""The ranks that torchrun has started, joined around a run.

The command line joins them around its commands (cli/train.py). `jetrl.train`, called in a user's
own script, joins them by itself, and ends the script's processes as the command would.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from jetrl.distributed.process_group import TIMEOUT_S, open_world, record_collectives
from jetrl.distributed.world import ONE_PROCESS, launched_size, started_by_torchrun, world
from jetrl.errors import Terminated, TimeLimitReached, ending
from jetrl.runs.attempts import read_attempts, versions
from jetrl.runs.format import visible
from jetrl.session.building import choose_device
from jetrl.session.last_words import end, leave
from jetrl.settings.loading import Settings


@contextlib.contextmanager
def joined_in_script(settings: Settings, resume: bool) -> Iterator[bool]:
    """Join the ranks of a run that a script has begun, and yield whether the run is resumed.

    Where a command has joined them already, or torchrun started no ranks, nothing is done. Of
    several ranks none gets past an error: all end, with its exit code and one message, since what
    joined them is broken by then.

    Args:
        resume: Whether to go on with the run; one that torchrun starts again goes on in any case.
    """
    if not started_by_torchrun() or world() is not ONE_PROCESS:
        yield resume
        return
    try:
        resume = resume or goes_on(settings)
        with joined(settings, resume):
            yield resume
    except (Exception, KeyboardInterrupt, Terminated) as error:
        if launched_size() == 1:
            raise
        words, code = ending(error)
        end(visible(words, newlines=True), code, error)


@contextlib.contextmanager
def joined(settings: Settings, resume: bool = False) -> Iterator[None]:
    """Join the processes that torchrun has started for a run, within the block.

    The callers have asked whether torchrun started this process; one alone joins nothing.

    Raises:
        UserError: The ranks were started differently, or settings that need one process.
    """
    problem = problem_of(settings, launched_size())
    facts = {
        f"{section}.{key}": repr(value)
        for section, values in settings.model_dump(mode="json").items()
        for key, value in values.items()
    }
    record_collectives(Path(settings.run.dir) / str(settings.run.name) / "ranks")
    facts["what is done with the run"] = "resume it" if resume else "begin it"
    with joined_on(settings.run.device, settings.distributed.timeout_s, facts, problem):
        yield


def problem_of(settings: Settings, count: int) -> str:
    """Return why a run cannot be so many processes; "" if it can."""
    if settings.precision.preset != "fp32" or count == 1:
        return ""
    return (
        f"precision.preset = fp32 and {count} processes: under fp32 layers read the master "
        "weights, of which each rank holds a part; take unified, jet, mixed or bf16, or one process"
    )


@contextlib.contextmanager
def joined_on(
    device: str,
    timeout_s: float | None = None,
    facts: Mapping[str, str] | None = None,
    problem: str = "",
) -> Iterator[None]:
    """Join the processes that torchrun has started for a command, within the block.

    Args:
        timeout_s: How long a rank waits for the others; None: the default of the settings.
        facts: What has to be the same on all ranks beside versions and command line, by name.
        problem: Why the command cannot run as several processes; empty where it can.

    Raises:
        UserError: The ranks were started differently, or there is a problem.
    """
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
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    there = local_rank < torch.cuda.device_count()
    return torch.cuda.get_device_name(local_rank) if there else ""


def goes_on(settings: Settings) -> bool:
    """Return whether torchrun starts the ranks again of a run that it has begun (--max-restarts).

    Raises:
        Terminated, TimeLimitReached: The run was not lost, but asked to stop: it does not go on.
    """
    # Not by the number of restarts, which machines may count differently.
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) == 0:
        return False
    path = Path(settings.run.dir) / str(settings.run.name)
    attempts = read_attempts(path) if (path / "config.toml").is_file() else []
    # Not a run of an earlier torchrun, which would be continued without being asked to.
    if not attempts or not _started_before(os.getppid(), attempts[-1].started):
        return False
    last = attempts[-1]
    if last.state == "interrupted":
        raise Terminated
    if last.state == "stopped" and last.reason.startswith("run.max_hours"):
        raise TimeLimitReached(f"{last.reason}; go on with --resume")
    return True


def _started_before(process: int, moment: float) -> bool | None:
    """Return whether a process of this machine was started before a moment; None if unknown."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        lines = Path("/proc/stat").read_text().splitlines()
        boot = next(int(line.split()[1]) for line in lines if line.startswith("btime"))
    except (OSError, IndexError, StopIteration, ValueError):
        return None
    return boot + int(fields[19]) / os.sysconf("SC_CLK_TCK") < moment
