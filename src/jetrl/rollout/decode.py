"""Decode on the device: several forwards in a row, whose tokens Python sees only afterwards.

`DecodeBatch` keeps the last tokens, positions and page tables of running sequences on the device
(`kernels.decode`), a slot for each. A decode step writes the news to the device (new sequences,
added pages), runs the forwards, and copies their draws to the host. The host waits for nothing, so
it schedules the next step while the device runs this one. A sequence that ends in between does
nothing more on the device, and the scheduler drops the draws past its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from jetrl.kernels.decode_state import MAX_STOP_IDS
from jetrl.models.policy import Policy
from jetrl.rollout.decode_forward import DecodeBuffers, EagerForwards, GraphForwards
from jetrl.rollout.kv_cache import PagedCache
from jetrl.rollout.launched_step import LaunchedStep, mark, to_device, to_host
from jetrl.rollout.scheduler import ScheduledStep
from jetrl.rollout.sequence import RunningSequence
from jetrl.types import SamplingParams

MAX_REPEATS = 16  # The most forwards of one decode step.


@dataclass
class _Resident:
    """A sequence that the device knows.

    Attributes:
        slot: The sequence's slot in the device's state.
        position: The position of the next token, unless the sequence ends before.
        pages: The page table as the device has it.
    """

    slot: int
    position: int
    pages: list[int]


class DecodeBatch:
    """The device's side of decode over one cache.

    Args:
        policy: The policy.
        cache: The KV pages.
        max_batch_size: The most running sequences.
        max_model_len: The most tokens of a sequence.
    """

    def __init__(
        self, policy: Policy, cache: PagedCache, max_batch_size: int, max_model_len: int
    ) -> None:
        self._width = -(-max_model_len // cache.page_size)
        self._device = policy.device
        self._buffers = DecodeBuffers.empty(max_batch_size, MAX_REPEATS, self._width, policy.device)
        # A traced forward runs eagerly, since the replay of a graph calls no Python.
        captured = cache.reads_pages_in_place and policy.decoder.trace is None
        forwards = GraphForwards if captured else EagerForwards
        self._forwards = forwards(policy, cache, self._buffers)
        self._free = list(range(max_batch_size))
        self._resident: dict[int, _Resident] = {}
        self._rows: list[int] = []
        self._before = (0, 0.0)  # Graphs, and seconds of capturing, before this call.

    @property
    def captured(self) -> tuple[int, float]:
        """The number of graphs that this call captured, and the seconds that capturing took."""
        forwards, (graphs, seconds) = self._forwards, self._before
        return forwards.num_graphs - graphs, forwards.capture_s - seconds

    def begin(self, params: SamplingParams, stop_ids: frozenset[int]) -> None:
        """Forget all sequences and take the parameters of a call.

        The host alone checks stop ids beyond the first MAX_STOP_IDS.
        """
        buffers, stops = self._buffers, sorted(stop_ids)[:MAX_STOP_IDS]
        self._free += [resident.slot for resident in self._resident.values()]
        self._resident.clear()
        self._rows = []
        self._before = (self._forwards.num_graphs, self._forwards.capture_s)
        buffers.state.active.zero_()
        buffers.state.seed.fill_(params.seed)
        buffers.state.stops[: 1 + len(stops)] = torch.tensor([len(stops), *stops])
        buffers.temperature.fill_(params.temperature)
        buffers.top_p.fill_(params.top_p)
        buffers.top_k.fill_(params.top_k)
        self._filtered = params.top_p < 1 or params.top_k > 0

    def forget(self, step: ScheduledStep) -> None:
        """Forget sequences that a step prefills or that lost their pages, before the step runs."""
        prefilled = [] if step.decodes else [chunk.sequence for chunk in step.chunks]
        for index in (*step.preempted, *prefilled):
            resident = self._resident.pop(index, None)
            if resident is not None:
                self._free.append(resident.slot)

    def launch(self, step: ScheduledStep, sequences: Sequence[RunningSequence]) -> LaunchedStep:
        """Start a decode step, after its page copies, without waiting for the device."""
        assert step.decodes, "a step over prompts is not decode"
        assert step.repeats <= MAX_REPEATS, f"{step.repeats} forwards in one step"
        longest = max(chunk.start + chunk.length for chunk in step.chunks)
        self._forwards.prepare(len(step.chunks), longest, self._filtered)
        self._place(step, sequences)
        out = self._buffers.out
        out.count.zero_()
        began = mark(self._device)
        for _ in range(step.repeats):
            self._forwards.run(len(step.chunks), longest, self._filtered)
        tokens, logprobs = to_host(out.tokens), to_host(out.logprobs)
        return LaunchedStep(step, tokens, logprobs, began, mark(self._device))

    def _place(self, step: ScheduledStep, sequences: Sequence[RunningSequence]) -> None:
        """Make the step's sequences the rows 0 to B, and write the news of each to the device."""
        # Sequences that do not run in this step leave their slots.
        running = {chunk.sequence for chunk in step.chunks}
        for index in [index for index in self._resident if index not in running]:
            self._free.append(self._resident.pop(index).slot)
        rows: list[int] = []
        # New sequences bring their state, all others at most new pages.
        arrivals: list[tuple[int, int, int, int, int]] = []
        pages: list[tuple[int, int]] = []
        for chunk in step.chunks:
            sequence = sequences[chunk.sequence]
            resident = self._resident.get(chunk.sequence)
            if resident is None:
                slot = self._free.pop()
                resident = _Resident(slot, chunk.start, [])
                self._resident[chunk.sequence] = resident
                limit = len(sequence.prompt) + sequence.rules.max_tokens - 1
                token = sequence.generated[-1]
                arrivals.append((slot, token, chunk.start, limit, sequence.key))
            assert resident.position == chunk.start, f"{chunk} follows {resident.position}"
            pages += self._new_pages(resident, sequence.pages, chunk.start)
            resident.position = chunk.start + chunk.length
            rows.append(resident.slot)
        # One copy to the device for all of a kind.
        state = self._buffers.state
        if arrivals:
            slots, token_ids, positions, limits, keys = to_device(arrivals, self._device).unbind(1)
            state.token[slots] = token_ids.int()
            state.position[slots] = positions.int()
            state.limit[slots] = limits.int()
            state.key[slots] = keys
            state.active[slots] = 1
        if pages:
            entries, numbers = to_device(pages, self._device).unbind(1)
            state.tables.view(-1)[entries] = numbers.int()
        if rows != self._rows:
            self._buffers.rows.fill_(self._buffers.idle_slot)
            self._buffers.rows[: len(rows)] = to_device(rows, self._device)
        if pages or rows != self._rows:
            torch.index_select(state.tables, 0, self._buffers.rows, out=self._buffers.tables)
        self._rows = rows

    def _new_pages(
        self, resident: _Resident, pages: list[int], start: int
    ) -> list[tuple[int, int]]:
        """Return (entry of the tables, page) for each page that changed since the last step.

        Args:
            resident: The sequence as the device knows it.
            pages: The page table now.
            start: The position of the next token; pages before it never change.
        """
        known = resident.pages
        first = min(start // self._forwards.page_size, len(known))
        if known[first:] == pages[first:]:
            return []
        resident.pages = list(pages)
        base = resident.slot * self._width
        return [(base + at, pages[at]) for at in range(first, len(pages))]
