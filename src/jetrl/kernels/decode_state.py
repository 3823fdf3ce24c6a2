"""The records of decode on the device: the running sequences, one forward's inputs, its draws.

`kernels.decode` (the reference) and `kernels.decode_hopper` (its Hopper form) read and write them.
The device keeps what decides when a sequence ends, so that no forward waits for the host: the stop
token ids and each sequence's last position. That is the device's form of the rule in
`rollout.stopping`; stop strings, which need the text, and turns of an environment are the host's.

Legend: S slots, W pages a table, B rows of a forward, K forwards whose draws a `Drawn` holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NOT_DRAWN = -1  # in `Drawn.tokens`: the sequence had ended before this forward
BROKEN = -2  # in `Drawn.tokens`: the logits have no finite softmax
MAX_STOP_IDS = 256
MAX_ROWS = 4096  # of a forward on a GPU, where a single program takes in the draws of all rows


@dataclass(frozen=True)
class DecodeState:
    """Holds the running sequences on the device, each in a slot that it keeps until it ends.

    Attributes:
        token: int32 [S], the last token drawn, whose key and value are not yet in the cache.
        position: int32 [S], the position of that token in its sequence.
        limit: int32 [S], the position of the last token that may be drawn.
        key: int64 [S], the sequence's key of random numbers.
        active: int32 [S], 1 while the sequence runs, 0 in a free slot or once it has ended.
        tables: int32 [S, W], the sequence's KV pages in order of position.
        seed: int64 [1], the seed of the call's random numbers.
        stops: int32 [1 + MAX_STOP_IDS], the number of stop ids, then the ids.
    """

    token: Tensor
    position: Tensor
    limit: Tensor
    key: Tensor
    active: Tensor
    tables: Tensor
    seed: Tensor
    stops: Tensor

    @staticmethod
    def empty(slots: int, width: int, device: torch.device) -> DecodeState:
        """Return a state without running sequences."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return DecodeState(
            token=zeros(slots),
            position=zeros(slots),
            limit=zeros(slots),
            key=zeros(slots, dtype=torch.int64),
            active=zeros(slots),
            tables=zeros(slots, width),
            seed=zeros(1, dtype=torch.int64),
            stops=zeros(1 + MAX_STOP_IDS),
        )


@dataclass(frozen=True)
class DecodeInputs:
    """The inputs of model, cache and sampler in one forward of decode.

    A row whose sequence is not active has length 0, slot -1 and bits -1: it takes part in every
    kernel and changes nothing.

    Attributes:
        token_ids: int64 [B].
        positions: int64 [B].
        slots: int64 [B], where in the cache the new keys and values go: page * page_size + offset.
        lengths: int32 [B], the number of keys that the row's query sees.
        bits: int64 [B], the random bits of the draw (`kernels.sampling.random_bits`).
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    lengths: Tensor
    bits: Tensor


@dataclass(frozen=True)
class Drawn:
    """The draws of up to K forwards, which the host reads together.

    Attributes:
        tokens: int32 [K, B], token ids, NOT_DRAWN or BROKEN.
        logprobs: float32 [K, B].
        count: int32 [1], the number of forwards taken in so far: the row that the next one writes.
    """

    tokens: Tensor
    logprobs: Tensor
    count: Tensor
