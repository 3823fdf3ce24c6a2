"""Decode on the device: several forwards in a row, whose tokens Python sees only afterwards.

`DecodeBatch` keeps the last tokens, positions and page tables of running sequences on the device
(`kernels.decode`), a slot for each. A step writes what changed (new sequences, added pages), runs
the forwards, and copies their draws to the host without waiting. A sequence that ends in between
does nothing more on the device, and the scheduler drops draws past its end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from jetrl.kernels.decode_state import MAX_STOP_IDS, Drawn, Verified
from jetrl.models.policy import Policy
from jetrl.rollout.decode_forward import (
    DecodeBuffers,
    EagerForwards,
    ForwardSize,
    GraphForwards,
)
from jetrl.rollout.draft_widths import Width
from jetrl.rollout.kv_cache import PagedCache
from jetrl.rollout.launched_step import LaunchedStep, mark, to_device, to_host
from jetrl.rollout.sampler import filters
from jetrl.rollout.scheduler import ScheduledStep
from jetrl.rollout.sequence import RunningSequence
from jetrl.rollout.sizes import padded_batch
from jetrl.rollout.speculation import Speculation
from jetrl.types import SamplingParams

MAX_REPEATS = 16  # The most forwards of one decode step.


@dataclass
class _Resident:
    """A sequence that the device knows.

    Attributes:
        position: The position of the next token, unless the sequence ends before; a lower bound if
            forwards verify drafts.
    """

    slot: int
    position: int
    pages: list[int]


class DecodeBatch:
    """The device's side of decode over one cache; `speculation` is None without drafts."""

    def __init__(
        self,
        policy: Policy,
        cache: PagedCache,
        max_batch_size: int,
        max_model_len: int,
        speculation: Speculation | None = None,
    ) -> None:
        self._width = -(-max_model_len // cache.page_size)
        self._device = policy.device
        self._speculation = speculation
        self._buffers = DecodeBuffers.empty(
            max_batch_size, MAX_REPEATS, self._width, policy.device, speculation is not None
        )
        # A traced forward runs eagerly, since the replay of a graph calls no Python.
        captured = cache.reads_pages_in_place and policy.decoder.trace is None
        forwards = GraphForwards if captured else EagerForwards
        self.forwards = forwards(policy, cache, self._buffers, speculation)
        self._free = list(range(max_batch_size))
        self._resident: dict[int, _Resident] = {}
        self._rows: list[int] = []
        self._params: list[SamplingParams] = []  # Those in the buffers: one for all rows, or each.
        self._stop_ids: frozenset[int] | None = None  # Those in the buffers.

    def close(self) -> None:
        """Free the forwards' graphs; nothing is launched afterwards."""
        self.forwards.close()

    def begin(self) -> None:
        """Forget all sequences."""
        self._free += [resident.slot for resident in self._resident.values()]
        self._resident.clear()
        self._rows = []
        self._params, self._stop_ids = [], None
        self._buffers.state.active.zero_()

    def forget(self, step: ScheduledStep) -> None:
        """Forget sequences that a step prefills or that lost their pages, before the step runs."""
        prefilled = [] if step.decodes else [chunk.sequence for chunk in step.chunks]
        for index in (*step.preempted, *prefilled):
            resident = self._resident.pop(index, None)
            if resident is not None:
                self._free.append(resident.slot)

    def launch(
        self,
        step: ScheduledStep,
        sequences: Sequence[RunningSequence],
        verify: Width | None = None,
    ) -> LaunchedStep:
        """Start a decode step, after its page copies, without waiting for the device.

        Args:
            verify: The chosen size of the forwards; None without drafts.
        """
        assert step.decodes, "a step over prompts is not decode"
        assert step.repeats <= MAX_REPEATS, f"{step.repeats} forwards in one step"
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
        out: Drawn | Verified = self._buffers.out
        if self._speculation is not None:
            assert self._buffers.verified is not None, "no room for verifying drafts"
            out = self._buffers.verified
        out.count.zero_()
        began, called = mark(self._device), time.perf_counter()
        # Each forward continues from the draws of the one before, on the device.
        for _ in range(step.repeats):
            self.forwards.run(size)
        # Copy the draws to the host, which waits for `ready` only when it needs them.
        used = (slice(0, step.repeats), slice(0, size.rows * step.width))
        tokens, logprobs = (to_host(x[used].contiguous()) for x in (out.tokens, out.logprobs))
        offers = to_host(out.offers[used].contiguous()) if isinstance(out, Verified) else None
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
        arrivals: list[tuple[int, int, int, int, int]] = []
        arrived: list[tuple[int, RunningSequence]] = []
        pages: list[tuple[int, int]] = []
        for chunk, sequence in zip(step.chunks, running, strict=True):
            resident = self._resident.get(chunk.sequence)
            if resident is None:
                slot = self._free.pop()
                resident = _Resident(slot, chunk.start, [])
                self._resident[chunk.sequence] = resident
                limit = sequence.max_cached_tokens  # The position of the last token.
                token = sequence.generated[-1]
                arrivals.append((slot, token, chunk.start, limit, sequence.key))
                arrived.append((slot, sequence))
            # The device may be further on: the host learns later how many drafts were right.
            assert resident.position <= chunk.start, f"{chunk} follows {resident.position}"
            pages += self._new_pages(resident, sequence.pages, chunk.start)
            resident.position = chunk.start + chunk.length
            rows.append(resident.slot)
        # One copy to the device for all of a kind.
        state = self._buffers.state
        if arrivals or rows != self._rows:
            self._take_rules(running)
        if arrivals:
            slots, token_ids, positions, limits, keys = to_device(arrivals, self._device).unbind(1)
            state.token[slots] = token_ids.int()
            state.position[slots] = positions.int()
            state.limit[slots] = limits.int()
            state.key[slots] = keys
            state.active[slots] = 1
        if arrived and self._speculation is not None:
            self._speculation.arrive(arrived)
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
        """Write the sampling parameters of the rows, and the stop ids that all rows share.

        The host alone checks the other stop ids, and those beyond the first MAX_STOP_IDS.
        """
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
            self._buffers.state.stops[: 1 + len(stops)] = to_device(
                [len(stops), *stops], self._device
            )
            self._stop_ids = stop_ids

    def _new_pages(
        self, resident: _Resident, pages: list[int], start: int
    ) -> list[tuple[int, int]]:
        """Return (entry of the tables, page) for each page that changed since the last step."""
        known = resident.pages
        first = min(start // self.forwards.page_size, len(known))
        if known[first:] == pages[first:]:
            return []
        resident.pages = list(pages)
        base = resident.slot * self._width
        return [(base + at, pages[at]) for at in range(first, len(pages))]
