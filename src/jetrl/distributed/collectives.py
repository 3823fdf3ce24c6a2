"""Collectives that move tensors between ranks, without arithmetic.

jetrl sums in its own fixed order, so results do not depend on the number of ranks or the network.
Tensors are sent as bytes: gloo supports neither FP8 nor int16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from jetrl.distributed.peers import peers
from jetrl.distributed.shards import Shard

# Renamed in torch 2.13; torch 2.11 has the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@contextlib.contextmanager
def _together(what: str) -> Iterator[None]:
    """Run a collective, and name the lost rank if it fails."""
    with peers().awaiting(what):
        try:
            yield
        except RuntimeError as error:
            # gloo raises plain RuntimeError.
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            raise peers().lost(what, str(error).strip().splitlines()[0]) from None


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor as uint8 [rows, bytes of a row], without a copy."""
    rows = tensor.reshape(len(tensor), -1) if tensor.dim() else tensor.reshape(1, 1)
    return rows.view(torch.uint8)


def gather_rows(tensor: Tensor, counts: Sequence[int]) -> None:
    """Fill a contiguous tensor [N, ...] in place, with `counts[rank]` rows from each rank."""
    pieces = list(_as_bytes(tensor).split(list(counts)))
    own = pieces[dist.get_rank()]
    with _together("rows of weights"):
        if len(set(counts)) == 1:
            _all_gather(_as_bytes(tensor), own)
        elif dist.get_backend() == "nccl":
            dist.all_gather(pieces, own)
        else:  # gloo only gathers equal sizes
            for rank, piece in enumerate(pieces):
                if len(piece):
                    dist.broadcast(piece, src=rank)


def whole_tensor(own: Tensor, shard: Shard) -> Tensor:
    """Return the whole tensor [N, ...] on every rank, from the contiguous rows of each."""
    whole = own.new_empty((shard.num_rows, *own.shape[1:]))
    whole[shard.own_rows] = own
    gather_rows(whole, shard.counts())
    return whole


def exchange(pieces: Sequence[Tensor] | None, received: Tensor) -> Work | None:
    """Send a contiguous piece to every rank, and receive this rank's pieces.

    The first ranks send, one per row of the contiguous `received`; the others pass None. On a GPU,
    wait for the returned work before reading `received`.
    """
    size, present = dist.get_world_size(), len(received)
    empty = torch.empty(0, dtype=torch.uint8, device=received.device)
    sent = [empty] * size if pieces is None else [_flat_bytes(piece) for piece in pieces]
    into = [_flat_bytes(piece) for piece in received] + [empty] * (size - present)
    if dist.get_backend() == "nccl":
        with _together("gradients"):
            return dist.all_to_all(into, sent, async_op=True)
    output = torch.empty(sum(map(len, into)), dtype=torch.uint8)
    sizes_in, sizes_out = [len(piece) for piece in into], [len(piece) for piece in sent]
    with _together("gradients"):
        dist.all_to_all_single(output, torch.cat(sent), sizes_in, sizes_out)
    for piece, values in zip(into, output.split(sizes_in), strict=True):
        piece.copy_(values)
    return None


def _flat_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor as uint8 [bytes], without a copy."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.view(-1).view(torch.uint8)


def gather_equal(tensor: Tensor) -> Tensor:
    """Return the tensors of all ranks, all of shape [...], as [size, ...]."""
    gathered = tensor.new_empty((dist.get_world_size(), *tensor.shape))
    with _together("sums"):
        _all_gather(_flat_bytes(gathered), _flat_bytes(tensor.contiguous()))
    return gathered
