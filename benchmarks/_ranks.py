"""Digests of a model, and the cost of exchanging gradients, in a benchmark of several GPUs.

A digest does not depend on how many ranks the model is divided among: it is a sum, modulo 2**64, of
a number for each element, made of the element's bits and its place in the whole tensor. Each rank
adds up the elements that it owns.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from benchmarks._timing import Row
from torch import Tensor

from jetrl.distributed.shards import Shard
from jetrl.distributed.world import world
from jetrl.models.policy import Policy
from jetrl.precision import gradients as ordered_gradients
from jetrl.training import Trainer

_AT_ONCE = 2**24  # elements
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd constants of 64 bits (SplitMix64's, Steele et al., OOPSLA 2014), as signed integers.
_PLACE, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_MODULUS = 2**64


def tensor_digest(name: str, tensor: Tensor, first_element: int = 0) -> int:
    """Return the digest of some consecutive elements of a tensor, below 2**64.

    Digests of the parts of a tensor add up, modulo 2**64, to the digest of the whole.

    Args:
        name: The tensor's name, which the digest depends on.
        tensor: The elements, of any shape and dtype.
        first_element: The place of the first element in the whole tensor.
    """
    bits = tensor.detach().contiguous().reshape(-1).view(_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    salt = zlib.crc32(name.encode()) << 20
    for start in range(0, len(bits), _AT_ONCE):
        part = bits[start : start + _AT_ONCE].long()
        begin = first_element + start
        place = torch.arange(begin, begin + len(part), device=tensor.device)
        part += place.mul_(_PLACE).add_(salt)
        part ^= part >> 30
        part *= _FIRST
        part ^= part >> 27
        part *= _SECOND
        part ^= part >> 31
        total += part.sum()
    return int(total) % _MODULUS


def digests(policy: Policy, trainer: Trainer) -> dict[str, str]:
    """Return digests of codes, master weights and moments, the same at any number of ranks.

    Args:
        policy: The policy, whose quantized weights are whole on every rank.
        trainer: The trainer, whose optimizer has the moments.

    Raises:
        RanksDiffer: The quantized weights of two ranks differ.
    """
    quantized = policy.weights.quantized_tensors()
    codes = sum(tensor_digest(name, tensor) for name, tensor in quantized.items()) % _MODULUS
    world().same("the quantized weights", codes)
    shards = policy.weights.shards
    masters = _of_all_ranks(dict(policy.master_weights()), shards)
    moments = trainer.optimizer.state_tensors()
    masters_of = {name: name.partition(".")[2] for name in moments}
    of_moments = {name: shards[m] for name, m in masters_of.items() if m in shards}
    return {
        "codes": f"{codes:016x}",
        "masters": f"{masters:016x}",
        "moments": f"{_of_all_ranks(moments, of_moments):016x}",
    }


def _of_all_ranks(tensors: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> int:
    """Return the digest of tensors of which each rank has its own rows, or which are whole.

    Args:
        tensors: This rank's tensors by name.
        shards: The division of the rows of those that are divided, by name.
    """
    own = 0
    for name, tensor in tensors.items():
        divided = name in shards and tensor.dim() > 1
        if divided:
            own += tensor_digest(name, tensor, shards[name].first_row * tensor[:1].numel())
        elif world().is_first:
            own += tensor_digest(name, tensor)
    return sum(world().gather("the digest of the model", own)) % _MODULUS


@dataclass
class Exchanged:
    """The products that an update has sent to the owners of their rows.

    Attributes:
        calls: For each exchange the shapes of the pieces for every rank (None: nothing to send),
            and the shape and dtype of what is received.
        bytes: The bytes that this rank has sent to others.
    """

    calls: list[tuple[list[torch.Size] | None, torch.Size, torch.dtype]] = field(
        default_factory=list
    )
    bytes: int = 0

    def seconds(self, device: torch.device) -> float:
        """Return the seconds of exchanging these products while the device does nothing else."""
        world().barrier("the exchange alone")
        began = time.perf_counter()
        for shapes, shape, dtype in self.calls:
            pieces: list[Tensor] | None = None
            if shapes is not None:
                pieces = [torch.zeros(size, dtype=dtype, device=device) for size in shapes]
            received = torch.empty(shape, dtype=dtype, device=device)
            work = ordered_gradients.exchange(pieces, received)
            if work is not None:
                work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began


@contextlib.contextmanager
def recorded_exchange() -> Iterator[Exchanged]:
    """Record the products that are exchanged within the block."""
    exchange, log = ordered_gradients.exchange, Exchanged()

    def recorded(pieces: Sequence[Tensor] | None, received: Tensor) -> Any:
        shapes = None if pieces is None else [piece.shape for piece in pieces]
        log.calls.append((shapes, received.shape, received.dtype))
        for rank, piece in enumerate(pieces or ()):
            log.bytes += piece.nbytes if rank != world().rank else 0
        return exchange(pieces, received)

    ordered_gradients.exchange = recorded
    try:
        yield log
    finally:
        ordered_gradients.exchange = exchange


class _Copied:
    """Stands for the work of an exchange whose results this rank has copied from its own."""

    def __init__(self) -> None:
        self._copied = torch.cuda.Event()
        self._copied.record()

    def wait(self) -> None:
        """Let the present stream wait for the copies."""
        torch.cuda.current_stream().wait_event(self._copied)


@contextlib.contextmanager
def without_exchange() -> Iterator[None]:
    """Let no product travel within the block: sums get the same work, and wrong numbers."""
    exchange = ordered_gradients.exchange

    def nothing(pieces: Sequence[Tensor] | None, received: Tensor) -> Any:
        if pieces is None:
            received.zero_()
        else:
            received.copy_(pieces[world().rank].expand_as(received))
        return _Copied() if received.is_cuda else None

    ordered_gradients.exchange = nothing
    try:
        yield
    finally:
        ordered_gradients.exchange = exchange


def slowest(what: str, numbers: Row) -> Row:
    """Return the largest value of each number over all ranks.

    Args:
        what: What is gathered, for messages.
        numbers: This rank's numbers by name, the same names on every rank.
    """
    of_ranks = world().gather(what, numbers)
    return {name: max(row[name] for row in of_ranks) for name in numbers}
