"""A decode forward over device state: embed, layers, logits, draw, next token.

On a Hopper GPU, which reads the cache's pages in place, the forward is a captured CUDA graph, one
for each size of batch and of context that comes up: `GraphForwards`. Elsewhere each forward is
called from Python: `EagerForwards`. A row computes the same bits in both, and in every size.
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
from jetrl.kernels.decode import Verified, next_inputs, take_draws, take_verified, verify_inputs
from jetrl.kernels.decode_state import (
    MAX_DRAFT,
    MAX_QUERIES,
    DecodeInputs,
    DecodeState,
    Drafts,
    Drawn,
    VerifyInputs,
)
from jetrl.kernels.sampling import sample, with_noise
from jetrl.memory.device import DeviceBytes
from jetrl.models.policy import Policy
from jetrl.rollout.draft_widths import Width
from jetrl.rollout.kv_cache import PagedCache
from jetrl.rollout.paged_attention import DecodeWork, Span
from jetrl.rollout.sizes import padded_batch, padded_context
from jetrl.rollout.speculation import Speculation


class GraphPool:
    """The graphs of one owner, and the memory that they work in, until `close` or until it is gone.

    Attributes:
        close: Waits for the device, resets all graphs, then gives the pool up; a second call does
            nothing.
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
    """Wait for the device, reset all graphs, then give the pools up, and keep neither."""
    # Graphs may still run where an error or Ctrl-C ended a call. Before torch gives their memory
    # back it waits for the stream alone that they were captured in. Nothing can wait in a capture,
    # where Python may collect an owner that has long ended.
    if graphs and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()
    while graphs:
        graphs.pop().reset()
    pools.clear()


logger = logging.getLogger(__name__)

_LOGITS_AT_ONCE = 2**23  # Sampling makes several arrays of the logits that it handles at once.


@dataclass(frozen=True)
class DecodeBuffers:
    """The tensors that forwards read and write, always at the same addresses.

    Attributes:
        rows: int64 [R], the slot of each row.
        tables: int32 [R, W], the page table of each row.
        temperature: float32 [R], or [8 R] with room for verifying drafts, as the next two.
        top_p: float32 [R].
        top_k: int64 [R].
        out: The draws of the forwards of one step, without drafts.
        verified: The draws of the forwards of one step that verify drafts; None without room.
        no_drafts: A draft without a token for each row; None without room.
        idle_slot: A slot that never holds a sequence, for rows that fill up a size.
    """

    state: DecodeState
    rows: Tensor
    tables: Tensor
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    out: Drawn
    verified: Verified | None
    no_drafts: Drafts | None
    idle_slot: int

    @staticmethod
    def empty(
        slots: int, repeats: int, width: int, device: torch.device, drafts: bool = False
    ) -> DecodeBuffers:
        """Return buffers without a sequence."""
        rows = padded_batch(slots)
        queries = rows * MAX_QUERIES if drafts else rows

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        verified, no_drafts = None, None
        if drafts:
            no_drafts = Drafts(zeros(rows, MAX_DRAFT), zeros(rows), zeros(rows))
            logprobs = zeros(repeats, queries, dtype=torch.float32)
            draws, offers = zeros(repeats, queries), zeros(repeats, rows)
            verified = Verified(draws, logprobs, offers, zeros(1))
        return DecodeBuffers(
            state=DecodeState.empty(slots + 1, width, device),
            rows=torch.full((rows,), slots, device=device),
            tables=zeros(rows, width),
            temperature=torch.ones(queries, device=device),
            top_p=torch.ones(queries, device=device),
            top_k=zeros(queries, dtype=torch.int64),
            out=Drawn(zeros(repeats, rows), zeros(repeats, rows, dtype=torch.float32), zeros(1)),
            verified=verified,
            no_drafts=no_drafts,
            idle_slot=slots,
        )


@dataclass(frozen=True)
class ForwardSize:
    """The size of a forward.

    Attributes:
        longest: Tokens of the longest context at the end of the step.
        verify: What the forward verifies; None where decode has no drafts.
    """

    rows: int
    longest: int
    filtered: bool
    verify: Width | None = None


def drafts_of(size: ForwardSize, speculation: Speculation, buffers: DecodeBuffers) -> Drafts:
    """Return a draft for each row of a forward, empty ones where none are looked up."""
    assert size.verify is not None, "a forward without drafts"
    assert buffers.no_drafts is not None, "no room for drafts"
    if size.verify.drafts:
        rows = buffers.rows[: size.rows]
        return speculation.propose(buffers.state, rows, size.verify.most)
    none = buffers.no_drafts
    return Drafts(none.tokens[: size.rows], none.counts[: size.rows], none.sources[: size.rows])


class EagerForwards:
    """Forwards called from Python over gathered pages, for the active rows alone.

    Args:
        speculation: The drafts; None for forwards of one token a sequence.
    """

    num_graphs, capture_s = 0, 0.0

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
        if self._speculation is not None:
            self._verify(size, self._speculation)
            return
        buffers = self._buffers
        rows = buffers.rows[: size.rows]
        inputs = next_inputs(buffers.state, rows, self.page_size)
        live = (inputs.lengths > 0).nonzero().flatten()
        ones = torch.ones_like(inputs.lengths)
        draws, _ = self._draw(live, inputs, inputs.lengths, ones, size)
        take_draws(buffers.state, rows, *draws, buffers.out)

    def _verify(self, size: ForwardSize, speculation: Speculation) -> None:
        """Run one forward that verifies drafts."""
        buffers, verify = self._buffers, size.verify
        rows, out = buffers.rows[: size.rows], buffers.verified
        assert verify is not None, "a forward without drafts"
        assert out is not None, "no room for verifying drafts"
        drafts = drafts_of(size, speculation, buffers)
        count = min(verify.rows, size.rows * verify.most)  # no sequences fill up a size here
        known = (buffers.state, speculation.text, drafts)
        inputs = verify_inputs(*known, rows, self.page_size, verify.most, count)
        live = (inputs.slots >= 0).nonzero().flatten()
        draws, hidden = self._draw(live, inputs, inputs.lengths, inputs.queries, size)
        take_verified(*known, inputs, rows, *draws, out, verify.most)
        speculation.keep(hidden, inputs, buffers.state, rows)

    def _draw(
        self,
        live: Tensor,
        inputs: DecodeInputs | VerifyInputs,
        lengths: Tensor,
        queries: Tensor,
        size: ForwardSize,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """Return the draws, log-probs and lse of a forward's queries, and their hidden states."""
        buffers, policy, count = self._buffers, self._policy, len(inputs.token_ids)
        tokens, logprobs = torch.zeros_like(inputs.token_ids), buffers.temperature.new_zeros(count)
        lse = torch.zeros_like(logprobs)
        all_hidden = torch.zeros(
            len(tokens), policy.config.hidden_size, dtype=policy.weights.dtype, device=live.device
        )
        if len(live):
            spans: list[Span] = []
            at = 0
            tables = buffers.tables[: size.rows].tolist()
            for length, count, table in zip(
                lengths.tolist(), queries.tolist(), tables, strict=True
            ):
                if length:
                    spans.append(Span(at, length - count, count, table))
                    at += count
            hidden = policy.rollout_forward(
                inputs.token_ids[live], inputs.positions[live], self._cache.key_values(spans)
            )
            all_hidden[live] = hidden
            logits, noise = policy.rollout_logits(hidden), policy.plan.sampler_deviation.logit_noise
            for part in torch.arange(len(live), device=live.device).split(
                max(1, _LOGITS_AT_ONCE // logits.shape[1])
            ):
                drawn = live[part]
                tokens[drawn], logprobs[drawn], lse[drawn] = sample(
                    with_noise(logits[part], inputs.bits[drawn], noise),
                    inputs.bits[drawn],
                    buffers.temperature[drawn],
                    buffers.top_p[drawn],
                    buffers.top_k[drawn],
                    size.filtered,
                )
        return (tokens, logprobs, lse), all_hidden


class GraphForwards:
    """Forwards as CUDA graphs, captured when a size first comes up.

    A graph stays valid when weights change, which they do in place, and while the memory of the
    cache's pages is given back.

    Args:
        speculation: The drafts; None for forwards of one token a sequence.
    """

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
        self._longest = buffers.tables.shape[1] * cache.page_size
        self._graphs: dict[ForwardSize, torch.cuda.CUDAGraph] = {}
        self._pool = GraphPool()  # The memory that captured forwards work in.
        self._held = DeviceBytes(buffers.rows.device)
        self.capture_s = 0.0

    @property
    def num_graphs(self) -> int:
        """The number of graphs captured so far."""
        return len(self._graphs)

    def close(self) -> None:
        """Give the graphs up, and then their memory; no forward runs afterwards."""
        self._graphs.clear()
        self._pool.close()
        self._held.bytes = 0

    def prepare(self, size: ForwardSize) -> None:
        """Capture the graph of a size if it does not exist."""
        size = self._padded(size)
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)

    def run(self, size: ForwardSize) -> None:
        assert self._cache.ready, "the pages' memory has been given back"
        self._graphs[self._padded(size)].replay()

    def forward(self, size: ForwardSize) -> None:
        """Run the forward that is captured."""
        buffers, rows = self._buffers, self._buffers.rows[: size.rows]
        if self._speculation is None:
            inputs = next_inputs(buffers.state, rows, self.page_size)
            work = DecodeWork(buffers.tables[: size.rows], inputs.lengths, size.longest)
            draws, _ = self._draw(inputs, work, size)
            take_draws(buffers.state, rows, *draws, buffers.out)
            return
        verify, out = size.verify, buffers.verified
        assert verify is not None, "a forward without drafts"
        assert out is not None, "no room for verifying drafts"
        drafts = drafts_of(size, self._speculation, buffers)
        known = (buffers.state, self._speculation.text, drafts)
        several = verify_inputs(*known, rows, self.page_size, verify.most, verify.rows)
        queries = None
        if verify.most > 1:
            queries = SequenceQueries(several.queries, several.first, several.keys, verify.most)
        work = DecodeWork(buffers.tables[: size.rows], several.lengths, size.longest, queries)
        draws, hidden = self._draw(several, work, size)
        take_verified(*known, several, rows, *draws, out, verify.most)
        self._speculation.keep(hidden, several, buffers.state, rows)

    def _draw(
        self, inputs: DecodeInputs | VerifyInputs, work: DecodeWork, size: ForwardSize
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """Return the draws, log-probs and lse of a forward's queries, and their hidden states."""
        buffers, queries = self._buffers, len(inputs.token_ids)
        kv = self._cache.decode_key_values(inputs.slots, work)
        hidden = self._policy.rollout_forward(inputs.token_ids, inputs.positions, kv)
        noise = self._policy.plan.sampler_deviation.logit_noise
        draws = sample(
            with_noise(self._policy.rollout_logits(hidden), inputs.bits, noise),
            inputs.bits,
            buffers.temperature[:queries],
            buffers.top_p[:queries],
            buffers.top_k[:queries],
            size.filtered,
        )
        return draws, hidden

    def _padded(self, size: ForwardSize) -> ForwardSize:
        longest = min(padded_context(size.longest), self._longest)
        return dataclasses.replace(size, rows=padded_batch(size.rows), longest=longest)

    def _capture(self, size: ForwardSize) -> torch.cuda.CUDAGraph:
        """Capture one graph; the rows are idle meanwhile, so that no sequence changes."""
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
    """Return the stream of all captures: a pool's memory serves the stream that it was taken on."""
    return torch.cuda.Stream()


def _without_tensors(device: torch.device) -> int:
    """Return the bytes that torch has reserved of the device and that no tensor uses."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
