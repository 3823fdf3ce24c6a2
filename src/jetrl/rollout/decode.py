"""Decode on the device: several forwards in a row, whose tokens Python sees only afterwards.

`DecodeBatch` keeps the last tokens, positions and page tables of running sequences on the device
(`kernels.decode`), a slot for each. A step writes changes, runs the forwards, and copies draws to
the host without waiting. The scheduler drops draws past a sequence's end.

`EagerForwards` runs forwards from Python over gathered pages; `GraphForwards`, on a Hopper GPU, as
CUDA graphs that read pages in place, one per batch and context size. The bits are the same.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from jetrl.kernels.attention.layout import SequenceQueries
from jetrl.kernels.decode import next_inputs, take_draws, take_verified, verify_inputs
from jetrl.kernels.decode_state import (
    MAX_QUERIES,
    MAX_STOP_IDS,
    DecodeInputs,
    DecodeState,
    Drawn,
    Verified,
    VerifyInputs,
)
from jetrl.memory.device import DeviceBytes
from jetrl.models.packed import ForwardInputs
from jetrl.models.policy import Policy
from jetrl.rollout.draft_widths import Width
from jetrl.rollout.kv_cache import DecodeWork, PagedCache, Span
from jetrl.rollout.launched_step import LaunchedStep, mark, to_device, to_host
from jetrl.rollout.sampler import Sampler, chunks_of_draws, filters
from jetrl.rollout.scheduler import ScheduledStep
from jetrl.rollout.sequence import RunningSequence
from jetrl.rollout.sizes import padded_batch, padded_context
from jetrl.rollout.speculation import Speculation
from jetrl.types import SamplingParams


class GraphPool:
    """The CUDA graphs of one owner and their one memory pool, freed in the right order.

    Torch aborts the process if graphs outlive their pool, and Python collects cycles in any order.
    So the pool belongs to a finalizer, `close`, which waits and resets the graphs first.
    """

    def __init__(self) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.pools = [torch.cuda.MemPool()]
        self.close = weakref.finalize(self, _give_up, self.graphs, self.pools)


def _give_up(graphs: list[torch.cuda.CUDAGraph], pools: list[torch.cuda.MemPool]) -> None:
    """Wait for the device, reset all graphs, then free the pools."""
    # Graphs may still run where an error or Ctrl-C ended a call. Before torch gives their memory
    # back it waits only for the stream that they were captured in. Nothing can wait in a capture,
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
        idle_slot: A slot that never holds a sequence, for rows that pad a size.
    """

    state: DecodeState
    rows: Tensor
    tables: Tensor
    sampler: Sampler
    out: Drawn | Verified
    idle_slot: int

    @staticmethod
    def empty(
        slots: int, repeats: int, width: int, device: torch.device, drafts: bool = False
    ) -> DecodeBuffers:
        rows = padded_batch(slots)
        queries = rows * MAX_QUERIES if drafts else rows

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        logprobs = zeros(repeats, queries, dtype=torch.float32)
        out: Drawn | Verified = Drawn(zeros(repeats, queries), logprobs, zeros(1))
        if drafts:
            out = Verified(out.tokens, logprobs, zeros(repeats, rows), out.count)
        return DecodeBuffers(
            state=DecodeState.empty(slots + 1, width, device),
            rows=torch.full((rows,), slots, device=device),
            tables=zeros(rows, width),
            sampler=Sampler.of([SamplingParams()] * queries, device),
            out=out,
            idle_slot=slots,
        )


@dataclass(frozen=True)
class ForwardSize:
    """The size of a forward; `longest` is the tokens of the longest context after the step."""

    rows: int
    longest: int
    filtered: bool
    verify: Width | None = None


@dataclass(eq=False)
class EagerForwards:
    """Decode forwards called from Python over gathered pages, only for the active rows.

    `num_graphs` counts the graphs captured in this call, in `capture_s` seconds.
    """

    policy: Policy
    cache: PagedCache
    buffers: DecodeBuffers
    speculation: Speculation | None = None
    num_graphs: int = field(default=0, init=False)
    capture_s: float = field(default=0.0, init=False)

    def prepare(self, size: ForwardSize) -> None:
        """Make a forward of this size ready to run; it changes no sequence."""

    def run(self, size: ForwardSize) -> None:
        self.forward(size)

    def close(self) -> None:
        """Free all graphs; no forward runs afterwards."""

    def forward(self, size: ForwardSize) -> None:
        """Run one forward, with or without drafts: inputs, model, draws, new last tokens."""
        speculation, verify, out = self.speculation, size.verify, self.buffers.out
        state, rows = self.buffers.state, self.buffers.rows[: size.rows]
        page_size = self.cache.page_size
        if speculation is None:
            assert isinstance(out, Drawn), "room for drafts that nothing proposes"
            (tokens, logprobs, lse), _ = self._draw(next_inputs(state, rows, page_size), size)
            take_draws(state, rows, tokens=tokens, logprobs=logprobs, lse=lse, out=out)
            return
        assert verify is not None, "a forward without drafts"
        assert isinstance(out, Verified), "no room for verifying drafts"
        # A draft per sequence; the forward draws behind every token of it.
        drafts = speculation.drafts(state, rows, verify)
        inputs = verify_inputs(
            state,
            speculation.text,
            drafts,
            rows,
            page_size=page_size,
            width=verify.most,
            size=min(verify.rows, size.rows * verify.most),  # Only graphs pad the sequences.
        )
        (tokens, logprobs, lse), hidden = self._draw(inputs, size)
        # The draws up to the first that differs from its draft are the sequence's next tokens.
        take_verified(
            state,
            speculation.text,
            drafts,
            inputs,
            rows,
            tokens=tokens,
            logprobs=logprobs,
            lse=lse,
            out=out,
            width=verify.most,
        )
        if speculation.head is not None:
            speculation.head.keep(hidden, inputs, state, rows)

    def _draw(
        self, inputs: DecodeInputs | VerifyInputs, size: ForwardSize
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """Return the draws, log-probs and lse of a forward's queries, and their hidden states."""
        policy, sampler, count = self.policy, self.buffers.sampler, len(inputs.token_ids)
        tokens = torch.zeros_like(inputs.token_ids)
        logprobs, lse = torch.zeros(2, count, device=tokens.device)
        shape = (count, policy.config.hidden_size)
        all_hidden = torch.zeros(shape, dtype=policy.weights.dtype, device=tokens.device)
        live = (inputs.slots >= 0).nonzero().flatten()
        if len(live):
            # Rows of sequences that have ended are left out.
            kv = self.cache.key_values(self._spans(inputs, size))
            read = ForwardInputs(inputs.token_ids, inputs.positions)
            hidden = policy.rollout_forward(read[live], kv)
            all_hidden[live] = hidden
            logits = policy.rollout_logits(hidden)
            for part in chunks_of_draws(len(live), logits):
                rows = live[part]
                tokens[rows], logprobs[rows], lse[rows] = sampler.draw(
                    logits[part], inputs.bits[rows], rows, size.filtered, policy.plan
                )
        return (tokens, logprobs, lse), all_hidden

    def _spans(self, inputs: DecodeInputs | VerifyInputs, size: ForwardSize) -> list[Span]:
        """Return the spans of the active rows, one after the other."""
        # Each span is a sequence's newest tokens: one, or those that verify its draft.
        queries = inputs.queries if isinstance(inputs, VerifyInputs) else (inputs.slots >= 0).int()
        spans: list[Span] = []
        columns = (inputs.lengths, queries, self.buffers.tables[: size.rows])
        at = 0
        for length, count, table in zip(*(x.tolist() for x in columns), strict=True):
            if count:
                spans.append(Span(at, length - count, count, table))
                at += count
        return spans


@dataclass(eq=False)
class GraphForwards(EagerForwards):
    """The same forwards as CUDA graphs, each captured when its size first comes up.

    Graphs stay valid when weights change in place and while the pages' memory is given back.
    """

    def __post_init__(self) -> None:
        self._graphs: dict[ForwardSize, torch.cuda.CUDAGraph] = {}
        self._pool = GraphPool()  # The memory that captured forwards work in.
        self._held = DeviceBytes(self.buffers.rows.device)

    def close(self) -> None:
        self._graphs.clear()
        self._pool.close()
        self._held.bytes = 0

    def prepare(self, size: ForwardSize) -> None:
        # A graph serves all batches and contexts that pad to its size.
        size = self._padded(size)
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)

    def run(self, size: ForwardSize) -> None:
        assert self.cache.ready, "the pages' memory has been given back"
        self._graphs[self._padded(size)].replay()

    def _draw(
        self, inputs: DecodeInputs | VerifyInputs, size: ForwardSize
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """Return the draws of a forward and its hidden states, for all rows, active or not."""
        # Nothing here touches the host: all sizes are known, and idle rows take part.
        several = None
        if isinstance(inputs, VerifyInputs) and size.verify is not None and size.verify.most > 1:
            several = SequenceQueries(inputs.queries, inputs.first, inputs.keys, size.verify.most)
        work = DecodeWork(self.buffers.tables[: size.rows], inputs.lengths, size.longest, several)
        kv = self.cache.decode_key_values(inputs.slots, work)
        read = ForwardInputs(inputs.token_ids, inputs.positions)
        hidden = self.policy.rollout_forward(read, kv)
        logits, rows = self.policy.rollout_logits(hidden), slice(0, len(inputs.token_ids))
        drawn = self.buffers.sampler.draw(
            logits, inputs.bits, rows, size.filtered, self.policy.plan
        )
        return drawn, hidden

    def _padded(self, size: ForwardSize) -> ForwardSize:
        limit = self.buffers.tables.shape[1] * self.cache.page_size
        longest = min(padded_context(size.longest), limit)
        return dataclasses.replace(size, rows=padded_batch(size.rows), longest=longest)

    def _capture(self, size: ForwardSize) -> torch.cuda.CUDAGraph:
        """Capture one graph; its rows are idle, so that no sequence changes."""
        buffers = self.buffers
        rows_before = buffers.rows.clone()
        buffers.rows.fill_(buffers.idle_slot)
        buffers.out.count.zero_()
        torch.cuda.synchronize()
        began = time.perf_counter()  # Steps launched before do not count.
        torch.cuda.empty_cache()
        stream, before = _capture_stream(), _without_tensors(buffers.rows.device)
        # A first run compiles the kernels of this size and takes the pool's memory: a capture that
        # runs out of memory half way would leave torch's allocator unusable.
        with torch.cuda.stream(stream), torch.cuda.use_mem_pool(self._pool.pools[0]):
            self.forward(size)
        graph = torch.cuda.CUDAGraph()
        self._pool.graphs.append(graph)
        # Other threads may call the driver meanwhile: the watchdog, the writer of a checkpoint.
        mode = "thread_local"
        pool = cast(Any, self._pool.pools[0].id)
        with torch.cuda.graph(graph, pool, stream, capture_error_mode=mode):
            self.forward(size)
        self._held.bytes += _without_tensors(buffers.rows.device) - before
        buffers.rows.copy_(rows_before)
        self.num_graphs += 1
        self.capture_s += time.perf_counter() - began
        return graph


@functools.cache
def _capture_stream() -> torch.cuda.Stream:
    """Return the stream of all captures: a pool's memory serves the stream it was taken on."""
    return torch.cuda.Stream()


def _without_tensors(device: torch.device) -> int:
    """Return the bytes that torch has reserved and that no tensor uses."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


MAX_REPEATS = 16  # The most forwards of one decode step.


@dataclass
class _Resident:
    """A sequence on the device; `position` is its next token's, with drafts a lower bound."""

    slot: int
    position: int
    pages: list[int]


@dataclass(eq=False)
class DecodeBatch:
    """The device's side of decode over one cache; `speculation` is None without drafts."""

    policy: Policy
    cache: PagedCache
    max_batch_size: int
    max_model_len: int
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        policy, cache = self.policy, self.cache
        self._device, self._width = policy.device, -(-self.max_model_len // cache.page_size)
        self._buffers = DecodeBuffers.empty(
            self.max_batch_size,
            repeats=MAX_REPEATS,
            width=self._width,
            device=policy.device,
            drafts=self.speculation is not None,
        )
        # A traced forward runs eagerly, since the replay of a graph calls no Python.
        captured = cache.reads_pages_in_place and policy.decoder.trace is None
        forwards = GraphForwards if captured else EagerForwards
        self.forwards = forwards(policy, cache, self._buffers, self.speculation)
        self._free = list(range(self.max_batch_size))
        self._resident: dict[int, _Resident] = {}
        self._rows: list[int] = []
        self._params: list[SamplingParams] = []  # Those in the buffers: one for all rows, or each.
        self._stop_ids: frozenset[int] | None = None  # Those in the buffers.

    def begin(self) -> None:
        """Forget all sequences, and count graphs from 0."""
        self.forwards.num_graphs, self.forwards.capture_s = 0, 0.0
        self._free += [resident.slot for resident in self._resident.values()]
        self._resident.clear()
        self._rows, self._params, self._stop_ids = [], [], None
        self._buffers.state.active.zero_()

    def forget(self, step: ScheduledStep) -> None:
        """Forget sequences that a step prefills or that lost their pages, before the step runs."""
        prefilled = [] if step.decodes else [chunk.sequence for chunk in step.chunks]
        for index in (*step.preempted, *prefilled):
            resident = self._resident.pop(index, None)
            if resident is not None:
                self._free.append(resident.slot)

    def launch(
        self, step: ScheduledStep, sequences: Sequence[RunningSequence], verify: Width | None = None
    ) -> LaunchedStep:
        """Start a decode step, after its page copies, without waiting for the device."""
        running = [sequences[chunk.sequence] for chunk in step.chunks]
        # The size decides which graph runs.
        longest = max(chunk.reach for chunk in step.chunks)
        if verify is not None and step.width == 1:  # Pages may have been too few for drafts.
            verify = Width(1, padded_batch(len(running)), verify.drafts)
        filtered = filters(sequence.params for sequence in running)
        size = ForwardSize(len(running), longest, filtered, verify)
        # A capture comes first: it runs the forward with idle rows.
        self.forwards.prepare(size)
        self._place(step, running)
        out = self._buffers.out
        out.count.zero_()
        began, called = mark(self._device), time.perf_counter()
        # Each forward continues from the draws of the one before, on the device.
        for _ in range(step.repeats):
            self.forwards.run(size)
        # Copy the draws to the host, which waits for `ready` only when it needs them.
        used = slice(0, step.repeats), slice(0, size.rows * step.width)
        tokens, logprobs = (to_host(x[used].contiguous()) for x in (out.tokens, out.logprobs))
        offers = None
        if isinstance(out, Verified):
            offers = to_host(out.offers[: step.repeats, : size.rows].contiguous())
        ready = mark(self._device)
        host_s = time.perf_counter() - called
        return LaunchedStep(step, tokens, logprobs, began, ready, offers, verify, host_s)

    def _place(self, step: ScheduledStep, running: Sequence[RunningSequence]) -> None:
        """Make the running sequences the rows 0 to B, and write what changed to the device."""
        # Sequences that do not run in this step leave their slots.
        indices = {chunk.sequence for chunk in step.chunks}
        for index in [index for index in self._resident if index not in indices]:
            self._free.append(self._resident.pop(index).slot)
        rows: list[int] = []
        # New sequences bring their state, all others at most new pages.
        arrived: list[tuple[int, RunningSequence, int]] = []
        pages: list[tuple[int, int]] = []
        for chunk, sequence in zip(step.chunks, running, strict=True):
            resident = self._resident.get(chunk.sequence)
            if resident is None:
                slot = self._free.pop()
                resident = _Resident(slot, chunk.start, [])
                self._resident[chunk.sequence] = resident
                arrived.append((slot, sequence, chunk.start))
            # The device may be further on: the host learns later how many drafts were right.
            assert resident.position <= chunk.start, f"{chunk} follows {resident.position}"
            pages += self._new_pages(resident, sequence.pages, chunk.start)
            resident.position = chunk.start + chunk.length
            rows.append(resident.slot)
        # One copy to the device for all of a kind.
        state = self._buffers.state
        if arrived or rows != self._rows:
            self._take_rules(running)
        if arrived:
            # The last position is that of the last token that may be drawn.
            arrivals = [
                (slot, new.generated[-1], start, new.max_cached_tokens, new.key)
                for slot, new, start in arrived
            ]
            slots, token_ids, positions, limits, keys = to_device(arrivals, self._device).unbind(1)
            state.token[slots] = token_ids.int()
            state.position[slots] = positions.int()
            state.limit[slots] = limits.int()
            state.key[slots] = keys
            state.active[slots] = 1
        if arrived and self.speculation is not None:
            self.speculation.arrive([(slot, new) for slot, new, _ in arrived])
        if pages:
            entries, numbers = to_device(pages, self._device).unbind(1)
            state.tables.view(-1)[entries] = numbers.int()
        # Rows that pad a size stay idle.
        if rows != self._rows:
            self._buffers.rows.fill_(self._buffers.idle_slot)
            self._buffers.rows[: len(rows)] = to_device(rows, self._device)
        if pages or rows != self._rows:
            torch.index_select(state.tables, 0, self._buffers.rows, out=self._buffers.tables)
        self._rows = rows

    def _take_rules(self, running: Sequence[RunningSequence]) -> None:
        """Write the rows' sampling parameters, and up to MAX_STOP_IDS stop ids that all share."""
        # Usually one object for all: then one value per tensor is written, once per call.
        params = list({id(sequence.params): sequence.params for sequence in running}.values())
        if len(params) > 1:
            params = [sequence.params for sequence in running]
        if params != self._params:
            self._buffers.state.seed.fill_(params[0].seed)
            self._buffers.sampler.fill(params)
            self._params = params
        # An id that only some rows stop at must not end the others.
        stop_ids = frozenset.intersection(*{sequence.rules.token_ids for sequence in running})
        if stop_ids != self._stop_ids:
            stops = sorted(stop_ids)[:MAX_STOP_IDS]
            counted = to_device([len(stops), *stops], self._device)
            self._buffers.state.stops[: len(counted)] = counted
            self._stop_ids = stop_ids

    def _new_pages(
        self, resident: _Resident, pages: list[int], start: int
    ) -> list[tuple[int, int]]:
        """Return (entry of the tables, page) for each page that changed since the last step."""
        known = resident.pages
        # Pages before the first one that is written next cannot have changed.
        first = min(start // self.cache.page_size, len(known))
        if known[first:] == pages[first:]:
            return []
        resident.pages = list(pages)
        base = resident.slot * self._width
        return [(base + at, pages[at]) for at in range(first, len(pages))]
