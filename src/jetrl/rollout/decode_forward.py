"""A decode forward over device state: embed, layers, logits, draw, next token.

On a Hopper GPU, which reads the cache's pages in place, the forward is a captured CUDA graph, one
for each size of batch and of context that comes up: `GraphForwards`. Elsewhere each forward is
called from Python: `EagerForwards`. A row computes the same bits in both, and in every size.
"""

from __future__ import annotations

import bisect
import functools
import logging
import time
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from jetrl.kernels.decode import next_inputs, take_draws
from jetrl.kernels.decode_state import DecodeState, Drawn
from jetrl.kernels.logit_noise import with_noise
from jetrl.kernels.sampling import sample
from jetrl.memory.device import DeviceBytes
from jetrl.models.policy import Policy
from jetrl.rollout.kv_cache import PagedCache
from jetrl.rollout.paged_attention import DecodeWork, Span

logger = logging.getLogger(__name__)

_ROWS = [8, 16, 32, 64, 96, 128, 192, 256, *range(384, 4097, 128)]  # Batch sizes of graphs.
_SPLIT_TOKENS = 1024  # Contexts are rounded up to this times a power of two.
_LOGITS_AT_ONCE = 2**23  # Sampling makes several arrays of the logits that it handles at once.


@dataclass(frozen=True)
class DecodeBuffers:
    """The tensors that forwards read and write, always at the same addresses.

    Attributes:
        state: The state of every slot.
        rows: int64 [R], the slot of each row.
        tables: int32 [R, W], the page table of each row.
        temperature: float32 [R].
        top_p: float32 [R].
        top_k: int64 [R].
        out: The draws of the forwards of one step.
        idle_slot: A slot that never holds a sequence, for rows that fill up a size.
    """

    state: DecodeState
    rows: Tensor
    tables: Tensor
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    out: Drawn
    idle_slot: int

    @staticmethod
    def empty(slots: int, repeats: int, width: int, device: torch.device) -> DecodeBuffers:
        """Return buffers without a sequence.

        Args:
            slots: The most sequences.
            repeats: The most forwards of a step.
            width: The most pages of a sequence.
            device: The device.
        """
        rows = padded_batch(slots)
        return DecodeBuffers(
            state=DecodeState.empty(slots + 1, width, device),
            rows=torch.full((rows,), slots, device=device),
            tables=torch.zeros(rows, width, dtype=torch.int32, device=device),
            temperature=torch.ones(rows, device=device),
            top_p=torch.ones(rows, device=device),
            top_k=torch.zeros(rows, dtype=torch.int64, device=device),
            out=Drawn(
                torch.zeros(repeats, rows, dtype=torch.int32, device=device),
                torch.zeros(repeats, rows, device=device),
                torch.zeros(1, dtype=torch.int32, device=device),
            ),
            idle_slot=slots,
        )


def padded_batch(count: int) -> int:
    """Return the batch size of the graph that runs `count` rows."""
    at = bisect.bisect_left(_ROWS, count)
    return _ROWS[at] if at < len(_ROWS) else count


def padded_context(tokens: int) -> int:
    """Return the context size of the graph that runs contexts of up to so many tokens."""
    size = _SPLIT_TOKENS
    while size < tokens:
        size *= 2
    return size


class EagerForwards:
    """Forwards called from Python over gathered pages, for the active rows alone.

    Args:
        policy: The policy.
        cache: The KV pages.
        buffers: The tensors that forwards read and write.
    """

    num_graphs, capture_s = 0, 0.0

    def __init__(self, policy: Policy, cache: PagedCache, buffers: DecodeBuffers) -> None:
        self._policy, self._cache, self._buffers = policy, cache, buffers
        self.page_size = cache.page_size

    def prepare(self, count: int, longest: int, filtered: bool) -> None:
        """Do nothing: an eager forward needs no preparation.

        Args:
            count: Unused.
            longest: Unused.
            filtered: Unused.
        """

    def run(self, count: int, longest: int, filtered: bool) -> None:
        """Run one forward.

        Args:
            count: The number of rows.
            longest: Unused here.
            filtered: Whether top_p or top_k restrict the draws.
        """
        buffers, policy = self._buffers, self._policy
        rows = buffers.rows[:count]
        inputs = next_inputs(buffers.state, rows, self.page_size)
        live = (inputs.lengths > 0).nonzero().flatten()
        tokens, logprobs = torch.zeros_like(inputs.token_ids), buffers.temperature.new_zeros(count)
        lse = torch.zeros_like(logprobs)
        if len(live):
            lengths, tables = inputs.lengths[live].tolist(), buffers.tables[:count][live].tolist()
            spans = [
                Span(row, length - 1, 1, table)
                for row, (length, table) in enumerate(zip(lengths, tables, strict=True))
            ]
            hidden = policy.rollout_forward(
                inputs.token_ids[live], inputs.positions[live], self._cache.key_values(spans)
            )
            logits, noise = policy.rollout_logits(hidden), policy.plan.sampler_deviation.logit_noise
            for part in torch.arange(len(live), device=live.device).split(
                max(1, _LOGITS_AT_ONCE // logits.shape[1])
            ):
                at = live[part]
                tokens[at], logprobs[at], lse[at] = sample(
                    with_noise(logits[part], inputs.bits[at], noise),
                    inputs.bits[at],
                    buffers.temperature[at],
                    buffers.top_p[at],
                    buffers.top_k[at],
                    filtered,
                )
        take_draws(buffers.state, rows, tokens, logprobs, lse, buffers.out)


class GraphForwards:
    """Forwards as CUDA graphs, captured when a size first comes up.

    A graph stays valid when weights change, which they do in place, and while the memory of the
    cache's pages is given back.

    Args:
        policy: The policy.
        cache: The KV pages.
        buffers: The tensors that forwards read and write.
    """

    def __init__(self, policy: Policy, cache: PagedCache, buffers: DecodeBuffers) -> None:
        self._policy, self._cache, self._buffers = policy, cache, buffers
        self.page_size = cache.page_size
        self._longest = buffers.tables.shape[1] * cache.page_size
        self._graphs: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.MemPool()  # The memory that captured forwards work in.
        self._held = DeviceBytes(buffers.rows.device)
        self.capture_s = 0.0

    @property
    def num_graphs(self) -> int:
        """The number of graphs captured so far."""
        return len(self._graphs)

    def prepare(self, count: int, longest: int, filtered: bool) -> None:
        """Capture the graph of a size if it does not exist.

        Args:
            count: The number of rows.
            longest: Tokens of the longest context at the end of the step.
            filtered: Whether top_p or top_k restrict the draws.
        """
        size = self._size(count, longest, filtered)
        if size not in self._graphs:
            self._graphs[size] = self._capture(*size)

    def run(self, count: int, longest: int, filtered: bool) -> None:
        """Run one forward.

        Args:
            count: The number of rows.
            longest: Tokens of the longest context at the end of the step.
            filtered: Whether top_p or top_k restrict the draws.
        """
        assert self._cache.ready, "the pages' memory has been given back"
        self._graphs[self._size(count, longest, filtered)].replay()

    def forward(self, count: int, longest: int, filtered: bool) -> None:
        """Run the forward that is captured.

        Args:
            count: The number of rows.
            longest: Tokens of the longest context.
            filtered: Whether top_p or top_k restrict the draws.
        """
        buffers = self._buffers
        rows = buffers.rows[:count]
        inputs = next_inputs(buffers.state, rows, self.page_size)
        work = DecodeWork(buffers.tables[:count], inputs.lengths, longest)
        kv = self._cache.decode_key_values(inputs.slots, work)
        hidden = self._policy.rollout_forward(inputs.token_ids, inputs.positions, kv)
        noise = self._policy.plan.sampler_deviation.logit_noise
        tokens, logprobs, lse = sample(
            with_noise(self._policy.rollout_logits(hidden), inputs.bits, noise),
            inputs.bits,
            buffers.temperature[:count],
            buffers.top_p[:count],
            buffers.top_k[:count],
            filtered,
        )
        take_draws(buffers.state, rows, tokens, logprobs, lse, buffers.out)

    def _size(self, count: int, longest: int, filtered: bool) -> tuple[int, int, bool]:
        return padded_batch(count), min(padded_context(longest), self._longest), filtered

    def _capture(self, count: int, longest: int, filtered: bool) -> torch.cuda.CUDAGraph:
        """Capture one graph; the rows are idle meanwhile, so that no sequence changes."""
        began = time.perf_counter()
        buffers = self._buffers
        rows_before = buffers.rows.clone()
        buffers.rows.fill_(buffers.idle_slot)
        buffers.out.count.zero_()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        stream, before = _capture_stream(), _without_tensors(buffers.rows.device)
        # A first run compiles the kernels of this size and takes the pool's memory: a capture that
        # runs out of memory half way would leave torch's allocator unusable.
        with torch.cuda.stream(stream), torch.cuda.use_mem_pool(self._pool):
            self.forward(count, longest, filtered)
        graph, pool = torch.cuda.CUDAGraph(), cast(Any, self._pool.id)
        # Other threads may call the driver meanwhile: the watchdog, the writer of a checkpoint.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool, stream, capture_error_mode=mode):
            self.forward(count, longest, filtered)
        self._held.bytes += _without_tensors(buffers.rows.device) - before
        buffers.rows.copy_(rows_before)
        seconds = time.perf_counter() - began
        self.capture_s += seconds
        logger.debug(
            "decode graph: %d rows, contexts to %d tokens, %.2f s", count, longest, seconds
        )
        return graph


@functools.cache
def _capture_stream() -> torch.cuda.Stream:
    """Return the stream of all captures: a pool's memory serves the stream that it was taken on."""
    return torch.cuda.Stream()


def _without_tensors(device: torch.device) -> int:
    """Return the bytes that torch has reserved of the device and that no tensor uses."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
