"""Ranks of a multi-GPU run: joining, comparing and ending them.

Commands join the ranks themselves; `jetrl.train` joins them in a user's script. An error on all
ranks is printed once, by rank 0; a rank that fails alone is named. Each step compares hashes of
prompts, samples and weights across ranks; a difference ends the run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from jetrl.distributed.board import Trouble
from jetrl.distributed.console import exit_now, tell_once
from jetrl.distributed.meeting import NoMeeting, meet
from jetrl.distributed.peers import peers
from jetrl.distributed.process_group import TIMEOUT_S, open_world, record_collectives
from jetrl.distributed.world import (
    ONE_PROCESS,
    launched_rank,
    launched_size,
    named,
    ranks_that_differ,
    started_by_torchrun,
    world,
)
from jetrl.errors import (
    RankLost,
    RanksDiffer,
    RunStopped,
    Terminated,
    TimeLimitReached,
    UserError,
    ending,
)
from jetrl.models.model import Model
from jetrl.precision.backend import kept_backend
from jetrl.precision.plan import PrecisionPlan
from jetrl.runs.attempts import read_attempts, versions
from jetrl.runs.format import visible
from jetrl.session.building import choose_device, device_of
from jetrl.session.sampling import EncodedPrompt
from jetrl.settings.loading import Settings
from jetrl.types import Sample


@contextlib.contextmanager
def joined_in_script(settings: Settings, resume: bool) -> Iterator[bool]:
    """Join the ranks of a run started by a script; yield True if the run is resumed.

    Joins none if a command has joined them or torchrun started no ranks. On error, all ranks exit
    with its exit code and one message. A run restarted by torchrun is resumed. The backend that the
    run selects is selected until its end.
    """
    if not started_by_torchrun() or world() is not ONE_PROCESS:
        with kept_backend():
            yield resume
        return
    try:
        resume = resume or is_restart(settings)
        with kept_backend(), joined(settings, resume):
            yield resume
    except (Exception, KeyboardInterrupt, Terminated) as error:
        if launched_size() == 1:
            raise
        message, code = ending(error)
        end(visible(message, newlines=True), code, error)


@contextlib.contextmanager
def joined(settings: Settings, resume: bool = False) -> Iterator[None]:
    """Join the processes started by torchrun for a run, within the block."""
    problem = problem_of(settings, launched_size())
    facts = {
        f"{section}.{key}": repr(value)
        for section, values in settings.model_dump(mode="json").items()
        for key, value in values.items()
    }
    record_collectives(Path(settings.run.dir) / str(settings.run.name) / "ranks")
    facts["what is done with the run"] = "resume it" if resume else "begin it"
    with joined_on(device_of(settings), settings.distributed.timeout_s, facts, problem):
        yield


def problem_of(settings: Settings, count: int) -> str:
    """Return why a run cannot use this many processes, or ""."""
    if count == 1 or not PrecisionPlan.preset(settings.precision.preset).reads_masters:
        return ""
    return (
        f"precision.preset = fp32 cannot use {count} processes: its layers read full master "
        "weights, which are sharded; use unified, jet, mixed or bf16, or one process"
    )


@contextlib.contextmanager
def joined_on(
    device: str,
    timeout_s: float | None = None,
    facts: Mapping[str, str] | None = None,
    problem: str = "",
) -> Iterator[None]:
    """Join the processes started by torchrun for a command, within the block.

    `facts` must be equal on all ranks, in addition to versions and command line. `problem` is the
    reason why the command cannot use several processes, or "".
    """
    chosen = choose_device(device)
    # Everything that affects bits must be equal on all ranks.
    alike = {"the command line": shlex.join(sys.argv[1:]), **(facts or {})}
    alike |= {f"the version of {n}": v for n, v in versions().items() if n != "system"}
    if chosen == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        there = local_rank < torch.cuda.device_count()
        alike["the GPU"] = torch.cuda.get_device_name(local_rank) if there else ""
    with open_world(chosen, timeout_s or TIMEOUT_S, facts=alike, problem=problem, leave=leave):
        yield


def is_restart(settings: Settings) -> bool:
    """Return True if torchrun restarts the ranks of its own run (--max-restarts)."""
    # Do not use the restart count, which may differ between machines.
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) == 0:
        return False
    path = Path(settings.run.dir) / str(settings.run.name)
    attempts = read_attempts(path) if (path / "config.toml").is_file() else []
    # Do not resume the run of an earlier torchrun unless asked to.
    if not attempts or not _started_before(os.getppid(), attempts[-1].started):
        return False
    # A run that was asked to stop stays stopped.
    last = attempts[-1]
    if last.state == "interrupted":
        raise Terminated
    if last.state == "stopped" and last.reason.startswith("run.max_hours"):
        raise TimeLimitReached(f"{last.reason}; continue with --resume")
    return True


def _started_before(process: int, moment: float) -> bool | None:
    """Return True if a local process started before a given time; None if unknown."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        lines = Path("/proc/stat").read_text().splitlines()
        boot = next(int(line.split()[1]) for line in lines if line.startswith("btime"))
    except (OSError, IndexError, StopIteration, ValueError):
        return None
    return boot + int(fields[19]) / os.sysconf("SC_CLK_TCK") < moment


def end(
    message: str, code: int, error: BaseException | None = None, printed: bool = False
) -> NoReturn:
    """End this rank with an exit code after an error; the other ranks end too.

    Without `error`, no other rank can be the cause. `printed`: rank 0 has already printed its
    message.
    """
    # If this rank failed because of another rank, name that one.
    own = isinstance(error, UserError | RunStopped) and not isinstance(error, RankLost)
    may_follow = isinstance(error, Exception | Terminated) and not own
    trouble = peers().trouble() if may_follow else None
    if trouble is not None and trouble.rank != launched_rank():
        leave(trouble)
    # From here on, the others see this rank's failure.
    peers().failed(message, code)
    first = launched_rank() == 0
    try:
        meeting = meet()
        if not meeting.compared:  # the others may not have begun yet
            try:
                problem = message.removeprefix("error: ") or "its command line is wrong"
                meeting.compare({}, problem=problem)
            except UserError as common:
                message = message and f"error: {common}"
        # If this rank failed first, the other ranks print nothing.
        trouble = peers().trouble() if first else None
        rank_0_prints = peers().is_well(0) or (trouble is not None and trouble.rank == 0)
        # Rank 0 prints a common message once; other ranks print only what nobody else will.
        common_message = meeting.end(message, rank_0_prints)
        if common_message:
            tell_once(common_message)
        elif first and not printed:
            tell_once(message)
        if first:
            meeting.confirm_printed()
    except (NoMeeting, RuntimeError) as lost:  # no store, or not any more
        reason = f" ({lost})" if isinstance(lost, NoMeeting) and str(lost) not in message else ""
        tell_once(message + reason if first else f"rank {launched_rank()}: {message}{reason}")
    exit_now(code)


def leave(trouble: Trouble) -> NoReturn:
    """End this rank because another one failed; only one rank reports the failure."""
    rank = launched_rank()
    if rank == trouble.printed_by:
        tell_once(visible(trouble.message, newlines=True))
    if trouble.rank < 0:  # the store, or an unknown rank
        exit_now(trouble.code)
    with contextlib.suppress(NoMeeting, RuntimeError):
        meeting = meet().reconnected()  # the main thread may be blocked on its connection
        meeting.end("", rank_0_prints=True)
        if rank == 0:
            meeting.confirm_printed()
    exit_now(trouble.code)


_BLOCK = 2**22  # words per block: 32 MiB of products
_FACTOR = -0x61C8864680B583EB  # odd, as an int64: 2**64 over the golden ratio


def compare_prompts(step: int, prompts: Sequence[EncodedPrompt]) -> None:
    """Check that all ranks drew the same prompts for a step."""
    if world().size == 1:
        return
    own = [(p.prompt.id, p.prompt.task, p.prompt.answer, p.inputs.key(), p.stop) for p in prompts]
    world().same(
        f"the prompts of step {step}, which must be equal on all ranks",
        hashlib.blake2b(repr(own).encode(), digest_size=8).hexdigest(),
    )


def compare_samples(step: int, samples: Sequence[Sample]) -> None:
    """Check that all ranks train on the same samples."""
    if world().size > 1:
        world().same(f"the samples of step {step}", samples_digest(samples))


def samples_digest(samples: Sequence[Sample]) -> str:
    """Return a hash of all training data in the samples, equal across processes."""
    digest = hashlib.blake2b(digest_size=8)
    for sample in samples:  # bytes, not decimal text
        digest.update(sample.inputs.content())
        digest.update(array("i", sample.completion.token_ids))
        digest.update(array("f", sample.completion.logprobs))
    sizes = [(s.group, len(s.completion.token_ids), s.score.reward) for s in samples]
    digest.update(repr(sizes).encode())
    return digest.hexdigest()


def compare_weights(when: str, *models: Model, beside: Mapping[str, Tensor] | None = None) -> None:
    """Check that all ranks have the same quantized weights and unsharded master weights."""
    if world().size == 1:
        return
    device = models[0].device
    tensors = {f"draft head: {name}": t.to(device) for name, t in (beside or {}).items()}
    for number, model in enumerate(models):
        weights, prefix = model.weights, f"model {number + 1}: " if number else ""
        whole = {n: m.detach() for n, m in weights.masters.items() if n not in weights.shards}
        if model.decoder.exponents is not None:
            whole["key exponents"] = model.decoder.exponents
        tensors |= {prefix + n: t for n, t in (weights.quantized_tensors() | whole).items()}
    # One hash per tensor, computed on its device: copying to the host would take seconds.
    mixed = torch.arange(1, _BLOCK + 1, device=device) * _FACTOR  # modulo 2**64
    factors = (mixed ^ (mixed >> 29)) * _FACTOR | 1
    digests = torch.stack([_in_order(tensor, factors) for tensor in tensors.values()]).tolist()
    all_digests = world().gather("digests of the weights", digests)
    ranks = ranks_that_differ(all_digests)
    if not ranks:
        return
    usual = next(digests for rank, digests in enumerate(all_digests) if rank not in ranks)
    places = zip(tensors, all_digests[ranks[0]], usual, strict=True)
    differing = [name for name, there, here in places if there != here]
    raise RanksDiffer(
        f"{named(ranks)} differ{'s' * (len(ranks) == 1)} from the other ranks in "
        f"{len(differing)} of {len(tensors)} weights {when}, first in {differing[0]}: a GPU "
        "fault or a bug; continue with --resume"
    )


def _in_order(tensor: Tensor, factors: Tensor) -> Tensor:
    """Return an order-sensitive hash of a tensor's bytes: int64 [], modulo 2**64."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 4:
        data = data.clone()
    # Words are weighted by position, so that swaps change the hash.
    words = len(data) // 4 * 4
    digest = factors.new_zeros(())
    for part in (data[:words].view(torch.int32), data[words:]):
        for block in part.split(len(factors)):
            digest = digest * _FACTOR + (block * factors[: len(block)]).sum()
    return digest
