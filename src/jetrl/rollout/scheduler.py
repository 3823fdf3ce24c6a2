"""The choice of the tokens that run in each forward, by continuous batching and pre-emption.

Sequences have one order, their index: the older (lower) one goes first. The running sequences are
the oldest unfinished ones that batch and pages have room for:

    running  [0 1 2 3 | 8 9 10]   waiting [11 12 .. ]

- A step is a forward over chunks of prompts, at most max_prefill_tokens together. It reads at most
  64 times as many keys, since attention widens all of them. When no prompt is left to prefill, the
  step is decode: the next token of each running sequence, up to `repeats` forwards in a row.
  Prompts go first, because a forward of few sequences takes nearly as long as one of many.
- The samples of a prompt are a group. Its first sequence, the leader, prefills the prompt; all draw
  their first token from the logits of its last token, and then share its pages. Members that do not
  fit in the batch keep these pages while they wait: they are parked.
- A sequence that waits for its environment keeps its pages. The reply is prefilled like a prompt.
- When no page is free, the youngest sequence that holds pages loses them: parked sequences first,
  then running ones. When it runs again, its prompt (unless a member of the group still holds it)
  and its drawn tokens are prefilled. Draws do not change, since each depends only on its sequence.

Steps may be scheduled before earlier draws are known (`complete`); a sequence that turns out to
have ended drops the rest. Only pre-emption, and decode after prompts, need the tokens themselves:
`schedule` then returns None until the draws arrive.

The scheduler cannot livelock: the oldest unfinished sequence can take the pages of all others, and
the engine refuses a sequence that does not fit, so each step advances at least that one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jetrl.memory.pages import CONTEXT_TOKENS
from jetrl.rollout.pages import PageAllocator, SequencePages
from jetrl.rollout.sequence import RunningSequence
from jetrl.rollout.stopping import StopRules
from jetrl.types import PromptInputs


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence in a scheduled step.

    Attributes:
        length: In decode one token per forward, a lower bound.
        draws: The sequences that draw from the logits of the last token (in decode of each token);
            empty if the chunk ends before the last known token.
        extra: Further tokens that forwards with drafts may write.
    """

    sequence: int
    start: int
    length: int
    draws: tuple[int, ...]
    extra: int = 0

    @property
    def reach(self) -> int:
        """Maximum tokens of the sequence's context at the end of the step."""
        return self.start + self.length + self.extra


@dataclass(frozen=True)
class ScheduledStep:
    """A forward over prompts, or several forwards of decode in a row.

        ScheduledStep(chunks=(Chunk(4, 0, 5, (4, 5, 6, 7)),), copies=(), num_prefill_tokens=5,
                      preempted=())
        ScheduledStep(chunks=(Chunk(0, 17, 8, (0,)), Chunk(4, 5, 8, (4,))), copies=((3, 9),),
                      num_prefill_tokens=0, preempted=(), repeats=8)

    Attributes:
        copies: (source, destination) pages that the cache copies before the forward, all at once.
        num_prefill_tokens: 0 in decode.
        preempted: Running sequences that lost computed tokens to make room for this step.
        repeats: The number of forwards, 1 except in decode.
        width: Maximum tokens per sequence in a forward of decode, above 1 to verify drafts.
    """

    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int], ...]
    num_prefill_tokens: int
    preempted: tuple[int, ...]
    repeats: int = 1
    width: int = 1

    @property
    def decodes(self) -> bool:
        return self.num_prefill_tokens == 0

    @property
    def draws(self) -> list[int]:
        """The sequences that draw, in the order of the tokens that `Scheduler.complete` takes."""
        return [index for chunk in self.chunks for index in chunk.draws]

    @property
    def draw_lengths(self) -> list[int]:
        """The scheduled draws of each of `draws`: one after prompts, in decode one per forward."""
        return [c.length if self.decodes else 1 for c in self.chunks for _ in c.draws]


_FORGOTTEN = RunningSequence(
    -1, PromptInputs((0,)), key=0, rules=StopRules(1), finish_reason="cancelled"
)


class Scheduler:
    """The scheduler of the sequences that run together; `add` takes the samples of a prompt.

    Indices count up through all groups; each sequence fits into the allocator's pages by itself.
    """

    def __init__(
        self, allocator: PageAllocator, max_batch_size: int, max_prefill_tokens: int
    ) -> None:
        self.allocator = allocator
        self._pages = SequencePages(allocator)
        self.max_batch_size = max_batch_size
        self.max_prefill_tokens = max_prefill_tokens
        self.sequences: list[RunningSequence] = []
        self._prompts: list[int] = []  # Of each sequence, the number of its prompt.
        self._unfinished: list[int] = []  # Of each prompt.
        self.running: list[RunningSequence] = []
        self.waiting: deque[RunningSequence] = deque()
        self.num_preemptions = 0
        self.num_finished = 0
        self.finished_tokens = 0
        self.num_complete_groups = 0
        # Sequences that lost their pages in the step that is being scheduled; those that lost
        # computed tokens are pre-empted too.
        self._evicted: list[RunningSequence] = []
        self._preempted: list[int] = []
        # Sequences that finished since the last call to `take_ended`.
        self._ended: list[int] = []
        # Sequences to forget once their pending draws have arrived.
        self._forgotten: set[int] = set()
        # Steps over prompts whose draws have not arrived.
        self._prompts_pending = 0

    def add(self, group: Sequence[RunningSequence]) -> None:
        """Let the samples of another prompt wait for their turn, as the youngest sequences."""
        # A resumed group may mix: started members neither lead nor take the first draws.
        members: dict[bool, list[RunningSequence]] = {
            begun: [s for s in group if s.started is begun] for begun in (False, True)
        }
        prompt = len(self._unfinished)
        self._unfinished.append(len(group))
        for sequence in group:
            index = len(self.sequences)
            assert sequence.index == index, f"sequence {sequence.index} has index {index}"
            needed = self.allocator.pages_for(sequence.max_cached_tokens)
            assert needed <= self.allocator.num_pages, f"sequence {index} needs {needed} pages"
            self.sequences.append(sequence)
            self._pages.groups.append(members[sequence.started])
            self._prompts.append(prompt)
            self.waiting.append(sequence)

    @property
    def done(self) -> bool:
        return not self.running and not self.waiting

    def schedule(
        self, repeats: int = 1, width: Callable[[int], int] = lambda sequences: 1
    ) -> ScheduledStep | None:
        """Choose the next step and take the pages that it needs; not to be called when `done`.

        Returns None while the step depends on draws of earlier ones (`complete`); without pending
        draws, every sequence waits for its environment (`reply`). `width` maps the number of
        decoding sequences to the maximum tokens of each per forward.
        """
        assert not self.done, "every sequence is finished"
        # Fill the batch, then plan who runs: prompts if any wait for prefill, otherwise decode.
        self._admit()
        plan = self._prefills()
        prefills = bool(plan)
        most, fits = 1, True
        if prefills:
            fits = self._pages.fits(plan, most)
        elif not self._prompts_pending:  # Decode continues from the draws of prompts.
            plan, most, fits = self._decodes(repeats, width)
        # A plan that would pre-empt needs to know all tokens of its victims: wait for their draws.
        if not plan or (not fits and self._waits_for_draws()):
            waits = self._waits_for_draws() or any(s.awaiting for s in self.running)
            assert waits, "a step that does nothing"
            return None
        # Give each planned sequence pages to write, oldest first; younger ones may lose theirs.
        chunks: list[Chunk] = []
        copies: list[tuple[int, int]] = []
        for sequence, length in plan:
            if sequence in self._evicted:
                continue
            start = sequence.num_computed
            written = length if prefills else sequence.most_written(length, most)
            if not fits and not self._make_room(sequence, written):
                continue  # The sequence was the youngest, and gave up its own pages.
            copy = self.allocator.make_writable(sequence.pages, start, written)
            if copy is not None:
                copies.append(copy)
            # A prefill draws only where its chunk ends with the last known token.
            ends = start + length == len(sequence.prompt) + len(sequence.generated)
            # At the start the whole group draws from the prompt's logits.
            drawing = [sequence] if sequence.started else self._pages.groups[sequence.index]
            draws = tuple(s.index for s in drawing) if ends or not prefills else ()
            chunks.append(Chunk(sequence.index, start, length, draws, written - length))
            sequence.num_computed += length
            sequence.num_extra += length * (most - 1)
            for index in draws:
                self.sequences[index].num_pending += 1 if prefills else length
        self._evicted.clear()
        if not chunks:  # A reply had no room and its sequence gave up its pages: plan once more.
            return self.schedule(repeats, width)
        prefilled = sum(chunk.length for chunk in chunks) if prefills else 0
        forwards = 1 if prefills else max(chunk.length for chunk in chunks)
        preempted, self._preempted = tuple(self._preempted), []
        step = ScheduledStep(tuple(chunks), tuple(copies), prefilled, preempted, forwards, most)
        self._prompts_pending += prefills and bool(step.draws)
        return step

    def complete(
        self, step: ScheduledStep, drawn: Sequence[tuple[Sequence[int], Sequence[float]]]
    ) -> int:
        """Give the draws of a step to its sequences, in the order in which steps were scheduled.

        `drawn` has (token ids, log-probs) for each of `step.draws`: one per forward, up to
        `step.width` with drafts, or fewer for a sequence that ends. Returns the number of tokens
        taken: draws past the end of a sequence or a turn are dropped.
        """
        draws = step.draws
        assert len(draws) == len(drawn), f"{len(drawn)} draws for {len(draws)} sequences"
        self._prompts_pending -= not step.decodes and bool(draws)
        # Every sequence takes its draws and decides whether it ends with one of them.
        taken = 0
        ended: list[RunningSequence] = []
        taken_in = zip(draws, step.draw_lengths, drawn, strict=True)
        for index, length, (token_ids, logprobs) in taken_in:
            sequence = self.sequences[index]
            sequence.num_pending -= length
            sequence.num_extra -= length * (step.width - 1)
            if not (sequence.finished or sequence.awaiting):
                count = sequence.extend(token_ids, logprobs)
                taken += count
                if step.decodes:  # Drafts that were right brought more than a token a forward.
                    sequence.num_computed += max(0, count - length)
                if sequence.finished:
                    ended.append(sequence)
                elif not sequence.awaiting:
                    most = length * step.width
                    assert length <= count <= most, f"{count} tokens of {length} forwards"
        # The members of a group take over the prompt's pages once their first tokens are drawn.
        # Those that do not run yet keep the pages while they wait.
        youngest_running = self.running[-1].index if self.running else -1
        for chunk in step.chunks:
            leader = self.sequences[chunk.sequence]
            for index in chunk.draws:
                # A leader that was cancelled meanwhile has no pages left to share.
                shares = index != leader.index and bool(leader.pages)
                if shares and not self.sequences[index].finished:
                    self._pages.share_prompt(leader, self.sequences[index])
                    if index > youngest_running:
                        self._pages.parked.append(self.sequences[index])
        # Sequences that ended give their pages back.
        for sequence in ended:
            self._finish(sequence, sequence.index <= youngest_running)
        if ended:
            self.running = [sequence for sequence in self.running if not sequence.finished]
        self._drop_forgotten()
        return taken

    def reply(self, index: int, token_ids: Sequence[int] | None) -> None:
        """Give an environment's reply to the sequence that waits for it; None ends the sequence."""
        sequence = self.sequences[index]
        sequence.reply(token_ids)
        if sequence.finished:
            self._finish(sequence, sequence in self.running)
            self.running = [s for s in self.running if not s.finished]

    def cancel(self, index: int) -> None:
        """End a sequence that has not ended; its pending draws are dropped when they arrive."""
        sequence = self.sequences[index]
        assert not sequence.finished, f"sequence {index} is finished"
        sequence.finish_reason, sequence.awaiting = "cancelled", False
        # If the prompt is not prefilled yet, the next member of the group leads.
        self._pages.groups[index].remove(sequence)
        running = sequence in self.running
        self._finish(sequence, running)
        if running:
            self.running.remove(sequence)

    def forget(self, index: int) -> None:
        """Drop an ended sequence, at once or when its pending draws have arrived.

        A placeholder keeps its index, so that others keep theirs.
        """
        assert self.sequences[index].finished, f"sequence {index} runs"
        self._forgotten.add(index)
        self._drop_forgotten()

    def _drop_forgotten(self) -> None:
        for index in [i for i in self._forgotten if not self.sequences[i].num_pending]:
            self._forgotten.remove(index)
            self.sequences[index] = _FORGOTTEN
            self._pages.groups[index] = []

    def take_ended(self) -> list[int]:
        """Return the sequences that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Free all pages; the scheduler cannot be used afterwards."""
        for sequence in self.sequences:
            self.allocator.release(sequence.pages)
        self.running.clear()
        self.waiting.clear()
        self._pages.parked.clear()

    def _finish(self, sequence: RunningSequence, was_running: bool) -> None:
        """Count a sequence that ended, take it out of the waiting ones, and free its pages."""
        self.num_finished += 1
        self._ended.append(sequence.index)
        self.finished_tokens += len(sequence.generated)
        prompt = self._prompts[sequence.index]
        self._unfinished[prompt] -= 1
        self.num_complete_groups += self._unfinished[prompt] == 0
        if not was_running:
            self.waiting.remove(sequence)
        self._pages.release(sequence)

    def _prefills(self) -> list[tuple[RunningSequence, int]]:
        """Return (sequence, tokens) of the next forward over prompts; empty if none can run."""
        budget = self.max_prefill_tokens
        keys = CONTEXT_TOKENS * budget
        plan: list[tuple[RunningSequence, int]] = []
        for sequence in self.running:
            if sequence.num_pending or sequence.awaiting or budget == 0:
                continue
            # A new group is prefilled by its leader; a started sequence prefills what it lost in a
            # pre-emption or what its environment replied. A single uncomputed token is decode's.
            uncomputed = sequence.num_tokens - sequence.num_computed
            assert uncomputed >= 1, f"sequence {sequence.index} has nothing to compute"
            if uncomputed > 1 if sequence.started else self._pages.leads(sequence):
                length = min(uncomputed, budget)
                budget -= length
                # The first sequence always runs, however long its context is.
                keys -= sequence.num_computed + length
                if plan and keys < 0:
                    break
                plan.append((sequence, length))
        return plan

    def _decodes(
        self, repeats: int, width: Callable[[int], int]
    ) -> tuple[list[tuple[RunningSequence, int]], int, bool]:
        """Return (sequence, tokens) of the next decode step, its width, and whether it fits."""
        plan = [
            (sequence, min(repeats, sequence.draws_left))
            for sequence in self.running
            if sequence.started and sequence.draws_left and not sequence.awaiting
        ]
        most = width(len(plan)) if plan else 1
        fits = self._pages.fits(plan, most)
        if not fits and repeats > 1:
            plan = [(sequence, 1) for sequence, _ in plan]
            fits = self._pages.fits(plan, most)
        if not fits and most > 1:
            most, fits = 1, self._pages.fits(plan, 1)
        return plan, most, fits

    def _waits_for_draws(self) -> bool:
        return any(sequence.num_pending for sequence in self.running)

    def _admit(self) -> None:
        """Move waiting sequences to the running ones while batch and pages allow."""
        if not self.waiting or len(self.running) >= self.max_batch_size:
            return
        margin = sum(self._pages.may_grow(sequence) for sequence in self.running)
        while self.waiting and len(self.running) < self.max_batch_size:
            sequence = self.waiting[0]
            # With no running sequence the first waiting one is parked, or all pages are free: it
            # always fits.
            needed = self._pages.needed_to_admit(sequence) + margin
            if self.running and needed > self.allocator.num_free:
                return
            self.waiting.popleft()
            self._pages.admit(sequence)
            self.running.append(sequence)
            margin += self._pages.may_grow(sequence)

    def _make_room(self, sequence: RunningSequence, length: int) -> bool:
        """Free pages from the youngest; return False if that is the sequence itself."""
        allocator = self.allocator
        # The cost changes on the way: with the other users of a page gone, no copy is needed.
        at = sequence.num_computed
        while allocator.write_cost(sequence.pages, at, length) > allocator.num_free:
            if self._pages.drop_parked():
                continue
            victim = self.running.pop()
            assert self.running, "the oldest sequence does not fit into all the pages"
            if victim.num_computed > 0:
                self.num_preemptions += 1
                self._preempted.append(victim.index)
            self._pages.drop(victim)
            self._evicted.append(victim)
            self.waiting.appendleft(victim)
            if victim is sequence:
                return False
        return True
