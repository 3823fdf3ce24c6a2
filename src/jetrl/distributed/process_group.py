"""Multi-process world on torch.distributed.

Tensors use NCCL between GPUs (gloo between CPUs); host values use gloo, so that decisions do not
wait for kernels. If a rank does not respond within the timeout, the process ends with an error that
names the operation.

Ranks trust each other: values are pickled, as in torch.distributed. The network between machines
must be private.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from jetrl.distributed.board import Board, RankStatus, Trouble
from jetrl.distributed.meeting import Meeting, has_agent_store, meet
from jetrl.distributed.peers import NOBODY, OtherRanks, Peers, peers
from jetrl.distributed.world import (
    ONE_PROCESS,
    World,
    named,
    ranks_that_differ,
    set_world,
    started_by_torchrun,
)
from jetrl.errors import RankLost, RanksDiffer, RunStopped, UserError

Item = TypeVar("Item")

TIMEOUT_S = 1800.0

# torch's flight recorder keeps the last collectives of a process.
_KEPT = "2000"  # collectives
TIMEOUT_FILES, FILES = "nccl_timeout_rank_", "collectives_rank_"


@dataclass(frozen=True)
class ProcessGroupWorld(World):
    """A multi-process run; `hosts` is the gloo group for host values."""

    hosts: Any = None
    timeout_s: float = TIMEOUT_S
    waits: list[float] = field(default_factory=lambda: [0.0], compare=False)

    @property
    def waited_s(self) -> float:
        return self.waits[0]

    def gather(self, what: str, value: Item) -> list[Item]:
        values: list[Any] = [None] * self.size
        with self.awaiting(what):
            dist.all_gather_object(values, value, group=self.hosts)
        return values

    def from_first(self, what: str, make: Callable[[], Item]) -> Item:
        told: list[Any] = [None, None]
        if self.is_first:
            try:
                told[0] = make()
            except Exception as error:
                told[1] = error
        with self.awaiting(what):
            dist.broadcast_object_list(told, src=0, group=self.hosts)
        if told[1] is not None:
            raise told[1]
        return told[0]

    def together(self, what: str, work: Callable[[], Item]) -> Item:
        failure: Exception | None = None
        try:
            made = work()
        except Exception as raised:
            failure = raised
        for rank, error in enumerate(self.gather(what, failure)):
            if isinstance(error, OSError):  # file errors must name the rank
                raise OSError(
                    error.errno, f"{error.strerror or error} (rank {rank})", error.filename
                ) from None
            if error is not None:
                raise error from None
        return made

    def channel(self) -> ProcessGroupWorld:
        timeout = timedelta(seconds=self.timeout_s)
        with self.awaiting("another group of processes"):
            hosts = dist.new_group(backend="gloo", timeout=timeout)
        return dataclasses.replace(self, hosts=hosts, waits=[0.0])

    def same(self, what: str, value: Any) -> None:
        values = self.gather(what, value)
        ranks = ranks_that_differ(values)
        if ranks:
            usual = next(rank for rank in range(self.size) if rank not in ranks)
            raise RanksDiffer(
                f"{named(ranks)} differ{'s' * (len(ranks) == 1)} from rank {usual} in {what}: "
                f"{values[ranks[0]]!r} there, {values[usual]!r} on rank {usual}"
            )

    @contextlib.contextmanager
    def awaiting(self, what: str) -> Iterator[None]:
        """Convert process-group errors to RankLost naming the operation."""
        began = time.monotonic()
        with peers().awaiting(what):
            try:
                yield
                self.waits[0] += time.monotonic() - began
            except (RuntimeError, ValueError) as error:
                if isinstance(error, RunStopped):
                    raise
                reason = str(error).strip() or "no reason given"
                raise peers().lost(what, reason.splitlines()[0]) from None


@contextlib.contextmanager
def open_world(
    device: str = "cpu",
    timeout_s: float = TIMEOUT_S,
    init_method: str = "env://",
    facts: Mapping[str, str] | None = None,
    problem: str = "",
    leave: Callable[[Trouble], None] | None = None,
) -> Iterator[World]:
    """Join the processes that torchrun has started, within the block.

    `facts` must be the same on all ranks. Every rank raises a UserError if one has a `problem` or
    too few GPUs, or if rank 0 cannot be reached. `leave` ends this process if another rank is lost
    and the main thread cannot; with None the other ranks are not monitored.
    """
    if not started_by_torchrun():
        yield ONE_PROCESS
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device == "cuda" and local_size > torch.cuda.device_count():
        problem = problem or (
            f"{local_size} processes and {torch.cuda.device_count()} GPUs on "
            f"{socket.gethostname()}: start at most one process per GPU (--nproc-per-node)"
        )
    if dist.is_initialized():
        own = "this program has opened a process group itself (torch.distributed): "
        problem = problem or own + "leave that to jetrl, or end it before (destroy_process_group)"
    meeting = meet(init_method)
    watch = _watched(meeting, local_rank, local_size, leave)
    meeting.compare({"the device": device, **(facts or {})}, problem)
    limit = timedelta(seconds=timeout_s)
    group: dict[str, Any] = {"rank": meeting.rank, "world_size": meeting.size, "timeout": limit}
    group["store"] = meeting.group_store()
    try:
        if device == "cuda":
            gpu = torch.device("cuda", local_rank)
            torch.cuda.set_device(gpu)
            dist.init_process_group("nccl", device_id=gpu, **group)
        else:
            dist.init_process_group("gloo", **group)
        hosts = dist.new_group(backend="gloo", timeout=limit)
    except (RuntimeError, ValueError) as error:
        trouble = watch.trouble()
        if trouble is not None:
            raise RankLost(trouble.reason, trouble.code) from None
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"the {meeting.size} processes have met, but not joined: {reason}"
        ) from None
    world = ProcessGroupWorld(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_rank=local_rank,
        local_size=local_size,
        node=socket.gethostname(),
        hosts=hosts,
        timeout_s=timeout_s,
    )
    set_world(world)
    try:
        yield world
        if watch is not NOBODY:  # a normal exit must not look like a loss
            world.barrier("the end")
    finally:
        set_world(ONE_PROCESS)
    watch.close()
    # Not while handling an error: NCCL would block forever.
    dist.destroy_process_group()
    meeting.end_run()


def _watched(
    meeting: Meeting, local_rank: int, local_size: int, leave: Callable[[Trouble], None] | None
) -> Peers:
    """Return the other ranks, and start monitoring if `leave` is given."""
    if leave is None or meeting.size == 1:
        return NOBODY
    first = meeting.rank - local_rank  # torchrun numbers local ranks consecutively
    on_machine = range(first, min(first + local_size, meeting.size))
    status = RankStatus(meeting.rank, socket.gethostname(), os.getpid())
    others = OtherRanks(
        Board(meeting.own_store("board"), status, meeting.size),
        neighbors=on_machine,
        leave=leave,
        write_collectives=write_collectives,
        store_host=os.getppid() if has_agent_store() else 0,
    )
    others.open()
    return others


def record_collectives(folder: Path) -> None:
    """Enable the flight recorder before a process group is opened; user settings are kept."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _KEPT)
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str((folder / TIMEOUT_FILES).absolute()))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    # torchrun's default, 1, makes NCCL clean up first, which may block on what hangs.
    if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1") == "1":
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"


def write_collectives(folder: Path, rank: int) -> None:
    """Write the collectives that this process remembers into a folder, as JSON."""
    other = getattr(c10d, "_dump_fr_trace_json", None)
    dump = getattr(c10d, "_dump_nccl_trace_json", None) or other
    if dump is None:
        return
    with contextlib.suppress(RuntimeError, OSError):  # a full disk may be the trouble
        (folder / f"{FILES}{rank}.json").write_bytes(dump())
