"""Decode steps: several forwards in a row, without a wait for the host in between.

`DecodeBatch` keeps the last tokens, positions and page tables of running sequences on the device
(`kernels.decode`), one slot each. A step writes changes, runs the forwards and copies draws to the
host without waiting. The scheduler drops draws past the end of a sequence.

`EagerForwards` runs forwards from Python over gathered pages. `GraphForwards`, on a GPU, replays
CUDA graphs that read pages in place, one per batch and context size. The bits are the same.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

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
from jetrl.memory.graphs import GraphCapture, Replay
from jetrl.models.packed import ForwardInputs
from jetrl.models.policy import Policy
from jetrl.rollout.draft_widths import Width
from jetrl.rollout.kv_cache import DecodeWork, PagedCache, Span
from jetrl.rollout.launched_step import LaunchedStep, mark, to_device, to_host
from jetrl.rollout.sampler import Filtering, Sampler, chunks_of_draws, filtering_of
from jetrl.rollout.scheduler import ScheduledStep
from jetrl.rollout.sequence import RunningSequence
from jetrl.rollout.sizes import padded_batch, padded_context
from jetrl.rollout.speculation import Speculation
from jetrl.types import SamplingParams


@dataclass(frozen=True)
class DecodeBuffers:
    """The tensors that forwards read and write, at fixed addresses.

    Attributes:
        rows: int64 [R], slot of each row.
        tables: int32 [R, W], page table of each row.
        sampler: Parameters of R rows; of 8 R if drafts are verified.
        idle_slot: A slot that never holds a sequence, for padding rows.
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
    """The size of a forward; `longest` is the longest context after the step, in tokens."""

    rows: int
    longest: int
    filtering: Filtering
    verify: Width | None = None


@dataclass(eq=False)
class EagerForwards:
    """Decode forwards run from Python over gathered pages, for active rows only.

    `num_graphs` counts the graphs captured in this call, in `capture_s` seconds.
    """

    policy: Policy
    cache: PagedCache
    buffers: DecodeBuffers
    speculation: Speculation | None = None
    num_graphs: int = field(default=0, init=False)
    capture_s: float = field(default=0.0, init=False)

    def prepare(self, size: ForwardSize) -> None:
        """Prepare to run forwards of this size, without changing a sequence."""

    def run(self, size: ForwardSize) -> None:
        self.forward(size)

    def close(self) -> None:
        """Free all graphs; no forward may run afterwards."""

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
        # One draft per sequence; the forward draws after each of its tokens.
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
        # Draws are accepted up to the first that differs from its draft.
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
        """Return the draws, log-probs and lse of all queries, and their hidden states."""
        policy, sampler, count = self.policy, self.buffers.sampler, len(inputs.token_ids)
        tokens = torch.zeros_like(inputs.token_ids)
        logprobs, lse = torch.zeros(2, count, device=tokens.device)
        shape = (count, policy.config.hidden_size)
        all_hidden = torch.zeros(shape, dtype=policy.weights.dtype, device=tokens.device)
        live = (inputs.slots >= 0).nonzero().flatten()
        if len(live):
            # Skip the rows of ended sequences.
            kv = self.cache.key_values(self._spans(inputs, size))
            read = ForwardInputs(inputs.token_ids, inputs.positions)
            hidden = policy.rollout_forward(read[live], kv)
            all_hidden[live] = hidden
            logits = policy.rollout_logits(hidden)
            for part in chunks_of_draws(len(live), logits):
                rows = live[part]
                tokens[rows], logprobs[rows], lse[rows] = sampler.draw(
                    logits[part],
                    bits=inputs.bits[rows],
                    rows=rows,
                    filtering=size.filtering,
                    plan=policy.plan,
                )
        return (tokens, logprobs, lse), all_hidden

    def _spans(self, inputs: DecodeInputs | VerifyInputs, size: ForwardSize) -> list[Span]:
        """Return the spans of the active rows, in order."""
        # A span is the last token of a sequence, followed by draft tokens.
        queries = inputs.queries if isinstance(inputs, VerifyInputs) else (inputs.slots >= 0).int()
        spans: list[Span] = []
        columns = (inputs.lengths, queries, self.buffers.tables[: size.rows])
        at = 0
        for length, count, table in zip(*(x.tolist() for x in columns), strict=True):
            if count:
                spans.append(Span(row=at, start=length - count, length=count, pages=table))
                at += count
        return spans


@dataclass(eq=False)
class GraphForwards(EagerForwards):
    """The same forwards as CUDA graphs, captured on the first use of each size.

    Graphs stay valid when weights change in place and while the memory of the pages is unmapped.
    """

    def __post_init__(self) -> None:
        self._graphs: dict[ForwardSize, Replay] = {}
        self._captures = GraphCapture(self.buffers.rows.device)

    def close(self) -> None:
        self._graphs.clear()
        self._captures.close()

    def prepare(self, size: ForwardSize) -> None:
        # One graph serves all batches and contexts that are padded to its size.
        size = self._padded(size)
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)

    def run(self, size: ForwardSize) -> None:
        assert self.cache.ready, "the memory of the pages is unmapped"
        self._graphs[self._padded(size)]()

    def _draw(
        self, inputs: DecodeInputs | VerifyInputs, size: ForwardSize
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """Return the draws of a forward and its hidden states, for idle rows too."""
        # A capture must not touch the host: all sizes are known, and idle rows are computed.
        several = None
        if isinstance(inputs, VerifyInputs) and size.verify is not None and size.verify.most > 1:
            several = SequenceQueries(inputs.queries, inputs.first, inputs.keys, size.verify.most)
        work = DecodeWork(self.buffers.tables[: size.rows], inputs.lengths, size.longest, several)
        kv = self.cache.decode_key_values(inputs.slots, work)
        read = ForwardInputs(inputs.token_ids, inputs.positions)
        hidden = self.policy.rollout_forward(read, kv)
        drawn = self.buffers.sampler.draw(
            self.policy.rollout_logits(hidden),
            bits=inputs.bits,
            rows=slice(0, len(inputs.token_ids)),
            filtering=size.filtering,
            plan=self.policy.plan,
        )
        return drawn, hidden

    def _padded(self, size: ForwardSize) -> ForwardSize:
        limit = self.buffers.tables.shape[1] * self.cache.page_size
        longest = min(padded_context(size.longest), limit)
        return dataclasses.replace(size, rows=padded_batch(size.rows), longest=longest)

    def _capture(self, size: ForwardSize) -> Replay:
        """Capture one graph, with idle rows so that no sequence changes."""
        buffers = self.buffers
        rows_before = buffers.rows.clone()
        buffers.rows.fill_(buffers.idle_slot)
        buffers.out.count.zero_()
        torch.cuda.synchronize()
        began = time.perf_counter()  # excludes steps launched before
        self._captures.begin()
        forward = functools.partial(self.forward, size)
        self._captures.warm_up(forward)
        replay = self._captures.capture(forward)
        self._captures.end()
        buffers.rows.copy_(rows_before)
        self.num_graphs += 1
        self.capture_s += time.perf_counter() - began
        return replay


MAX_REPEATS = 16  # maximum forwards per decode step


@dataclass
class _Resident:
    """A sequence on the device; `position` of its next token is a lower bound with drafts."""

    slot: int
    position: int
    pages: list[int]


@dataclass(frozen=True)
class _Arrival:
    """A sequence that joins the batch in a slot, with its next token at `start`."""

    slot: int
    sequence: RunningSequence
    start: int


@dataclass(eq=False)
class DecodeBatch:
    """The running sequences on the device over one cache; `speculation` is None without drafts."""

    policy: Policy
    cache: PagedCache
    max_batch_size: int
    max_model_len: int
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        policy, cache = self.policy, self.cache
        self._device = policy.device
        self._width = -(-self.max_model_len // cache.page_size)  # pages per table
        self._buffers = DecodeBuffers.empty(
            self.max_batch_size,
            repeats=MAX_REPEATS,
            width=self._width,
            device=policy.device,
            drafts=self.speculation is not None,
        )
        # A traced forward runs eagerly, since replaying a graph calls no Python.
        captured = cache.reads_pages_in_place and policy.decoder.trace is None
        forwards = GraphForwards if captured else EagerForwards
        self.forwards = forwards(policy, cache, self._buffers, self.speculation)
        self._free = list(range(self.max_batch_size))
        self._resident: dict[int, _Resident] = {}
        self._rows: list[int] = []
        self._params: list[SamplingParams] = []  # in the buffers: one for all rows, or one per row
        self._stop_ids: frozenset[int] | None = None  # in the buffers

    def begin(self) -> None:
        """Forget all sequences, and reset the counts of graphs."""
        self.forwards.num_graphs = 0
        self.forwards.capture_s = 0.0
        self._free += [resident.slot for resident in self._resident.values()]
        self._resident.clear()
        self._rows = []
        self._params = []
        self._stop_ids = None
        self._buffers.state.active.zero_()

    def forget(self, step: ScheduledStep) -> None:
        """Forget sequences that a step prefills or that were pre-empted, before the step runs."""
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
        # The size selects the graph.
        longest = max(chunk.reach for chunk in step.chunks)
        if verify is not None and step.width == 1:  # too few pages for drafts
            verify = Width(1, padded_batch(len(running)), verify.drafts)
        filtering = filtering_of(sequence.params for sequence in running)
        size = ForwardSize(len(running), longest, filtering, verify)
        # Capture the graph before the rows are set.
        self.forwards.prepare(size)
        self._place(step, running)
        out = self._buffers.out
        out.count.zero_()
        began, called = mark(self._device), time.perf_counter()
        # Each forward continues from the draws of the previous one, on the device.
        for _ in range(step.repeats):
            self.forwards.run(size)
        # Copy the draws to the host, which waits for `ready` when it needs them.
        columns = size.rows * step.width
        tokens = to_host(out.tokens[: step.repeats, :columns].contiguous())
        logprobs = to_host(out.logprobs[: step.repeats, :columns].contiguous())
        offers = None
        if isinstance(out, Verified):
            offers = to_host(out.offers[: step.repeats, : size.rows].contiguous())
        ready = mark(self._device)
        host_s = time.perf_counter() - called
        return LaunchedStep(
            step,
            tokens=tokens,
            logprobs=logprobs,
            began=began,
            ready=ready,
            offers=offers,
            verify=verify,
            host_s=host_s,
        )

    def _place(self, step: ScheduledStep, running: Sequence[RunningSequence]) -> None:
        """Assign rows 0 to B to the running sequences, and write changes to the device."""
        # Free the slots of sequences that do not run in this step.
        indices = {chunk.sequence for chunk in step.chunks}
        for index in [index for index in self._resident if index not in indices]:
            self._free.append(self._resident.pop(index).slot)
        rows: list[int] = []
        # Collect new sequences to initialize, and newly allocated pages for every sequence.
        arrived: list[_Arrival] = []
        pages: list[tuple[int, int]] = []
        for chunk, sequence in zip(step.chunks, running, strict=True):
            resident = self._resident.get(chunk.sequence)
            if resident is None:
                slot = self._free.pop()
                resident = _Resident(slot, chunk.start, [])
                self._resident[chunk.sequence] = resident
                arrived.append(_Arrival(slot, sequence, chunk.start))
            # The device may be ahead: the host does not know yet how many drafts were accepted.
            assert resident.position <= chunk.start, f"{chunk} follows {resident.position}"
            pages += self._new_pages(resident, sequence.pages, chunk.start)
            resident.position = chunk.start + chunk.length
            rows.append(resident.slot)
        # One copy per kind of change.
        state = self._buffers.state
        if arrived or rows != self._rows:
            self._write_rules(running)
        if arrived:
            self._admit(arrived)
        if pages:
            entries, numbers = to_device(pages, self._device).unbind(1)
            state.tables.view(-1)[entries] = numbers.int()
        # Padding rows stay idle.
        if rows != self._rows:
            self._buffers.rows.fill_(self._buffers.idle_slot)
            self._buffers.rows[: len(rows)] = to_device(rows, self._device)
        if pages or rows != self._rows:
            torch.index_select(state.tables, 0, self._buffers.rows, out=self._buffers.tables)
        self._rows = rows

    def _admit(self, arrived: Sequence[_Arrival]) -> None:
        """Initialize the slots of sequences that join the batch."""
        state, sequences = self._buffers.state, [each.sequence for each in arrived]
        values = [
            (state.token, [new.generated[-1] for new in sequences]),
            (state.position, [each.start for each in arrived]),
            # `max_cached_tokens` is also the position of the last possible token.
            (state.limit, [new.max_cached_tokens for new in sequences]),
            (state.key, [new.key for new in sequences]),
            (state.seed, [new.params.seed for new in sequences]),
            (state.offset, [new.prompt.offset for new in sequences]),
        ]
        rows = [[each.slot for each in arrived], *(row for _, row in values)]
        slots, *columns = to_device(rows, self._device).unbind(0)
        for (tensor, _), column in zip(values, columns, strict=True):
            tensor[slots] = column.to(tensor.dtype)
        state.active[slots] = 1
        if self.speculation is not None:
            self.speculation.admit([(each.slot, each.sequence) for each in arrived])

    def _write_rules(self, running: Sequence[RunningSequence]) -> None:
        """Write the sampling parameters, and up to MAX_STOP_IDS stop ids that all rows share."""
        # Usually all rows share one object; then one value per tensor is written, once per call.
        params = list({id(sequence.params): sequence.params for sequence in running}.values())
        if len(params) > 1:
            params = [sequence.params for sequence in running]
        if params != self._params:
            self._buffers.sampler.fill(params)
            self._params = params
        # Stop ids of only some rows are left to the host.
        stop_ids = frozenset.intersection(*{sequence.rules.token_ids for sequence in running})
        if stop_ids != self._stop_ids:
            stops = sorted(stop_ids)[:MAX_STOP_IDS]
            counted = to_device([len(stops), *stops], self._device)
            self._buffers.state.stops[: len(counted)] = counted
            self._stop_ids = stop_ids

    def _new_pages(
        self, resident: _Resident, pages: list[int], start: int
    ) -> list[tuple[int, int]]:
        """Return (index in the tables, page) of each page that changed since the last step."""
        known = resident.pages
        # Pages before the next written one cannot have changed.
        first = min(start // self.cache.page_size, len(known))
        if known[first:] == pages[first:]:
            return []
        resident.pages = list(pages)
        base = resident.slot * self._width
        return [(base + at, pages[at]) for at in range(first, len(pages))]
