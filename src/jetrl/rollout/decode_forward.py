"""A decode forward over device state: embed, layers, logits, draw, next token.

`forward` is written once, for one token per sequence and for drafts. Two runners call it:
`EagerForwards` from Python over gathered pages; `GraphForwards`, on a Hopper GPU, as CUDA graphs
that read pages in place, one per batch and context size. A row computes the same bits in both.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
import weakref
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from jetrl.kernels.attention.layout import SequenceQueries
from jetrl.kernels.decode import next_inputs, take_draws, take_verified, verify_inputs
from jetrl.kernels.decode_state import (
    MAX_QUERIES,
    DecodeInputs,
    DecodeState,
    Drawn,
    Verified,
    VerifyInputs,
)
from jetrl.memory.device import DeviceBytes
from jetrl.models.policy import Policy
from jetrl.rollout.draft_widths import Width
from jetrl.rollout.kv_cache import PagedCache
from jetrl.rollout.paged_attention import DecodeWork, Span
from jetrl.rollout.sampler import Sampler, chunks_of_draws
from jetrl.rollout.sizes import padded_batch, padded_context
from jetrl.rollout.speculation import Speculation

logger = logging.getLogger(__name__)


class GraphPool:
    """The CUDA graphs of one owner and their memory pool, freed in the right order.

    Torch counts the users of a pool and aborts the process if they outlive it. Python promises no
    order when it collects a cycle, and a traceback may keep a half-captured graph. So the pool
    belongs to a finalizer, which resets every graph first.

    Attributes:
        close: Waits for the device, resets all graphs, then frees the pool; once.
    """

    def __init__(self) -> None:
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._pools = [torch.cuda.MemPool()]
        self.close = weakref.finalize(self, _give_up, self._graphs, self._pools)

    @property
    def pool(self) -> torch.cuda.MemPool:
        return self._pools[0]

    def new_graph(self) -> torch.cuda.CUDAGraph:
        self._graphs.append(torch.cuda.CUDAGraph())
        return self._graphs[-1]


def _give_up(graphs: list[torch.cuda.CUDAGraph], pools: list[torch.cuda.MemPool]) -> None:
    """Wait for the device, reset all graphs, then free the pools."""
    # Graphs may still run where an error or Ctrl-C ended a call. Before torch gives their memory
    # back it waits for the stream alone that they were captured in. Nothing can wait in a capture,
    # where Python may collect an owner that has long ended.
    if graphs and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()
    while graphs:
        graphs.pop().reset()
    pools.clear()


@dataclass(frozen=True)
class DecodeBuffers:
    """The tensors that forwards read and write, always at the same addresses.

    Attributes:
        rows: int64 [R], the slot of each row.
        tables: int32 [R, W], the page table of each row.
        sampler: The parameters of R rows; of 8 R if drafts are verified.
        out: The draws of the forwards of one step, without drafts.
        verified: The same with drafts; None without.
        idle_slot: A slot that never holds a sequence, for rows that pad a size.
    """

    state: DecodeState
    rows: Tensor
    tables: Tensor
    sampler: Sampler
    out: Drawn
    verified: Verified | None
    idle_slot: int

    @staticmethod
    def empty(
        slots: int, repeats: int, width: int, device: torch.device, drafts: bool = False
    ) -> DecodeBuffers:
        rows = padded_batch(slots)
        queries = rows * MAX_QUERIES if drafts else rows

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        verified = None
        if drafts:
            logprobs = zeros(repeats, queries, dtype=torch.float32)
            draws, offers = zeros(repeats, queries), zeros(repeats, rows)
            verified = Verified(draws, logprobs, offers, zeros(1))
        return DecodeBuffers(
            state=DecodeState.empty(slots + 1, width, device),
            rows=torch.full((rows,), slots, device=device),
            tables=zeros(rows, width),
            sampler=Sampler.empty(queries, device),
            out=Drawn(zeros(repeats, rows), zeros(repeats, rows, dtype=torch.float32), zeros(1)),
            verified=verified,
            idle_slot=slots,
        )


@dataclass(frozen=True)
class ForwardSize:
    """The size of a forward.

    Attributes:
        longest: Tokens of the longest context at the end of the step.
        verify: What the forward verifies; None without drafts.
    """

    rows: int
    longest: int
    filtered: bool
    verify: Width | None = None


class EagerForwards:
    """Decode forwards called from Python over gathered pages, for the active rows only."""

    num_graphs = 0
    capture_s = 0.0

    def __init__(
        self,
        policy: Policy,
        cache: PagedCache,
        buffers: DecodeBuffers,
        speculation: Speculation | None = None,
    ) -> None:
        self._policy, self._cache, self._buffers = policy, cache, buffers
        self._speculation = speculation
        self.page_size = cache.page_size

    def close(self) -> None:
        """Do nothing: an eager forward keeps nothing."""

    def prepare(self, size: ForwardSize) -> None:
        """Do nothing: an eager forward needs no preparation."""

    def run(self, size: ForwardSize) -> None:
        self.forward(size)

    def forward(self, size: ForwardSize) -> None:
        """Run one forward, with or without drafts: inputs, model, draws, new last tokens."""
        buffers, speculation, verify = self._buffers, self._speculation, size.verify
        state, rows = buffers.state, buffers.rows[: size.rows]
        if speculation is None:
            inputs = next_inputs(state, rows, self.page_size)
            draws, _ = self._draw(inputs, size)
            take_draws(state, rows, *draws, buffers.out)
            return
        assert verify is not None, "a forward without drafts"
        assert buffers.verified is not None, "no room for verifying drafts"
        drafts = speculation.drafts(state, rows, verify)
        known = (state, speculation.text, drafts)
        count = min(verify.rows, size.rows * verify.most)  # Only graphs pad the sequences.
        several = verify_inputs(*known, rows, self.page_size, verify.most, count)
        draws, hidden = self._draw(several, size)
        take_verified(*known, several, rows, *draws, buffers.verified, verify.most)
        speculation.keep(hidden, several, state, rows)

    def _draw(
        self, inputs: DecodeInputs | VerifyInputs, size: ForwardSize
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """Return the draws, log-probs and lse of a forward's queries, and their hidden states."""
        policy, sampler, count = self._policy, self._buffers.sampler, len(inputs.token_ids)
        device = inputs.token_ids.device
        tokens, logprobs = torch.zeros_like(inputs.token_ids), torch.zeros(count, device=device)
        lse = torch.zeros_like(logprobs)
        shape = (count, policy.config.hidden_size)
        all_hidden = torch.zeros(shape, dtype=policy.weights.dtype, device=device)
        live = (inputs.slots >= 0).nonzero().flatten()
        if len(live):
            kv = self._cache.key_values(self._spans(inputs, size))
            hidden = policy.rollout_forward(inputs.token_ids[live], inputs.positions[live], kv)
            all_hidden[live] = hidden
            logits = policy.rollout_logits(hidden)
            for part in chunks_of_draws(len(live), logits):
                rows = live[part]
                tokens[rows], logprobs[rows], lse[rows] = sampler.draw(
                    logits[part], inputs.bits[rows], rows, size.filtered, self._noise
                )
        return (tokens, logprobs, lse), all_hidden

    @property
    def _noise(self) -> float:
        return self._policy.plan.sampler_deviation.logit_noise

    def _spans(self, inputs: DecodeInputs | VerifyInputs, size: ForwardSize) -> list[Span]:
        """Return the spans of the active rows, one after the other."""
        queries = inputs.queries if isinstance(inputs, VerifyInputs) else (inputs.slots >= 0).int()
        spans: list[Span] = []
        columns = (inputs.lengths, queries, self._buffers.tables[: size.rows])
        at = 0
        for length, count, table in zip(*(x.tolist() for x in columns), strict=True):
            if count:
                spans.append(Span(at, length - count, count, table))
                at += count
        return spans


class GraphForwards(EagerForwards):
    """The same forwards as CUDA graphs, each captured when its size first comes up.

    A graph stays valid when weights change, which they do in place, and while the memory of the
    cache's pages is given back.
    """

    def __init__(
        self,
        policy: Policy,
        cache: PagedCache,
        buffers: DecodeBuffers,
        speculation: Speculation | None = None,
    ) -> None:
        super().__init__(policy, cache, buffers, speculation)
        self._longest = buffers.tables.shape[1] * cache.page_size
        self._graphs: dict[ForwardSize, torch.cuda.CUDAGraph] = {}
        self._pool = GraphPool()  # The memory that captured forwards work in.
        self._held = DeviceBytes(buffers.rows.device)

    def close(self) -> None:
        """Free the graphs, and then their memory; no forward runs afterwards."""
        self._graphs.clear()
        self._pool.close()
        self._held.bytes = 0

    def prepare(self, size: ForwardSize) -> None:
        size = self._padded(size)
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)
            self.num_graphs += 1

    def run(self, size: ForwardSize) -> None:
        assert self._cache.ready, "the pages' memory has been given back"
        self._graphs[self._padded(size)].replay()

    def _draw(
        self, inputs: DecodeInputs | VerifyInputs, size: ForwardSize
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """Return the draws of a forward and its hidden states, for all rows, active or not."""
        several = None
        if isinstance(inputs, VerifyInputs) and size.verify is not None and size.verify.most > 1:
            most = size.verify.most
            several = SequenceQueries(inputs.queries, inputs.first, inputs.keys, most)
        tables = self._buffers.tables[: size.rows]
        work = DecodeWork(tables, inputs.lengths, size.longest, several)
        kv = self._cache.decode_key_values(inputs.slots, work)
        hidden = self._policy.rollout_forward(inputs.token_ids, inputs.positions, kv)
        logits, rows = self._policy.rollout_logits(hidden), slice(0, len(inputs.token_ids))
        sampler = self._buffers.sampler
        return sampler.draw(logits, inputs.bits, rows, size.filtered, self._noise), hidden

    def _padded(self, size: ForwardSize) -> ForwardSize:
        longest = min(padded_context(size.longest), self._longest)
        return dataclasses.replace(size, rows=padded_batch(size.rows), longest=longest)

    def _capture(self, size: ForwardSize) -> torch.cuda.CUDAGraph:
        """Capture one graph; its rows are idle, so that no sequence changes."""
        buffers = self._buffers
        rows_before = buffers.rows.clone()
        buffers.rows.fill_(buffers.idle_slot)
        self._forget_counts()
        torch.cuda.synchronize()
        began = time.perf_counter()  # The steps in front, which had been launched, are no part.
        torch.cuda.empty_cache()
        stream, before = _capture_stream(), _without_tensors(buffers.rows.device)
        # A first run compiles the kernels of this size and takes the pool's memory: a capture that
        # runs out of memory half way would leave torch's allocator unusable.
        with torch.cuda.stream(stream), torch.cuda.use_mem_pool(self._pool.pool):
            self.forward(size)
        graph, pool = self._pool.new_graph(), cast(Any, self._pool.pool.id)
        # Other threads may call the driver meanwhile: the watchdog, the writer of a checkpoint.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool, stream, capture_error_mode=mode):
            self.forward(size)
        self._held.bytes += _without_tensors(buffers.rows.device) - before
        if self._speculation is not None:
            seconds = self._seconds_of(graph)
            assert size.verify is not None, "no width of a forward over drafts"
            width = size.verify
            self._speculation.widths.captured(size.rows, width.most, width.rows, seconds)
        buffers.rows.copy_(rows_before)
        seconds = time.perf_counter() - began
        self.capture_s += seconds
        logger.debug(
            "decode graph: %d sequences, %s, contexts to %d tokens, %.2f s",
            *(size.rows, size.verify or "no drafts", size.longest, seconds),
        )
        return graph

    def _forget_counts(self) -> None:
        """Let the next forward write the first line of the draws."""
        self._buffers.out.count.zero_()
        if self._buffers.verified is not None:
            self._buffers.verified.count.zero_()

    def _seconds_of(self, graph: torch.cuda.CUDAGraph) -> float:
        """Return the seconds of a forward in which no sequence runs, the least of three."""
        times = []
        for _ in range(3):
            self._forget_counts()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return min(times)


@functools.cache
def _capture_stream() -> torch.cuda.Stream:
    """Return the stream of all captures: a pool's memory serves the stream it was taken on."""
    return torch.cuda.Stream()


def _without_tensors(device: torch.device) -> int:
    """Return the bytes that torch has reserved and that no tensor uses."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
