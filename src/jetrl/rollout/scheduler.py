"""What runs in each forward: continuous batching, chunked prefill, pre-emption. No torch.

Sequences have one order, their index: the older (lower) one goes first, always. The running ones
are the oldest unfinished ones, as many as the batch and the pages allow:

    running  [0 1 2 3 | 8 9 10]   waiting [11 12 .. ]

- A step is a forward over chunks of the prompts that are not there yet, at most max_prefill_tokens
  together, with contexts of at most 64 times as many: attention widens the keys and values of all
  that it reads (short replies to long conversations). When no prompt is left to prefill, it is
  decode: of each running sequence the next token, and then the next again, up to `repeats`
  forwards in a row. Prompts go first: a forward of few sequences takes nearly as long as one of
  many.
- The samples of a prompt are a group. Its first sequence prefills the prompt, the others wait; from
  the logits of the prompt's last token all of them draw their first token, and then all of them
  have the prompt's pages. Those that the batch has no room for keep them while they wait (parked).
- A sequence that waits for its environment keeps its place and its pages, and nothing of it runs.
  What the environment said is prefilled like a prompt.
- When a page is needed and none is free, the youngest sequence that holds pages loses them: parked
  ones first, then running ones, which go back to wait. Its drawn tokens stay; when its turn comes
  again, prompt and drawn tokens are prefilled, or only the latter where a sequence of its group
  still holds the prompt. What is drawn does not change: a token's draw depends on its sequence
  alone.

Steps may be scheduled before what the earlier ones drew is known (`complete`): lengths are known
without it, and a sequence that turns out to have ended leaves the rest of its draws. Only two need
the tokens themselves, pre-emption, and decode after prompts, which goes on from their draws:
`schedule` then returns None until they are in.

It cannot livelock: nothing takes pages from the oldest unfinished sequence, it can take those of
all others, and one sequence always fits (the engine refuses it otherwise), so each step brings at
least that one forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from jetrl.memory.pages import CONTEXT_TOKENS
from jetrl.rollout.pages import PageAllocator
from jetrl.rollout.sequence import RunningSequence


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence in a step.

    sequence: its index. start: position of the first token. length: number of tokens; in decode
    one a forward, at most the step's repeats. draws: indices of the sequences that draw their next
    token from the logits of the chunk's last token (in decode of each token); empty when the chunk
    ends before the last known token.
    """

    sequence: int
    start: int
    length: int
    draws: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One forward over prompts, or some of decode in a row, as data.

    copies: (source, destination) pages that the cache copies before the forward, all sources being
    read before any destination is written. num_prefill_tokens: those of the chunks, 0 in decode.
    preempted: running sequences that lost computed tokens to make room for this step. repeats:
    forwards, 1 except in decode.

        Step(chunks=(Chunk(4, 0, 5, (4, 5, 6, 7)),), copies=(), num_prefill_tokens=5, preempted=())
        Step(chunks=(Chunk(0, 17, 8, (0,)), Chunk(4, 5, 8, (4,))), copies=((3, 9),),
             num_prefill_tokens=0, preempted=(), repeats=8)
    """

    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int], ...]
    num_prefill_tokens: int
    preempted: tuple[int, ...]
    repeats: int = 1

    @property
    def decodes(self) -> bool:
        return self.num_prefill_tokens == 0

    @property
    def draws(self) -> list[int]:
        """Sequences that draw, in the order in which `Scheduler.complete` wants the tokens."""
        return [index for chunk in self.chunks for index in chunk.draws]


class Scheduler:
    """Decides the steps of one call of `generate`.

    Args:
        groups: for each prompt its samples; indices count up through all groups. Every sequence
            fits into the allocator's pages when it is alone.
        allocator: the pages, all free.
        max_batch_size: running sequences at most.
        max_prefill_tokens: prefill tokens a step at most.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[RunningSequence]],
        allocator: PageAllocator,
        max_batch_size: int,
        max_prefill_tokens: int,
    ) -> None:
        assert max_batch_size >= 1, f"max_batch_size {max_batch_size}"
        assert max_prefill_tokens >= 1, f"max_prefill_tokens {max_prefill_tokens}"
        self.allocator = allocator
        self.max_batch_size = max_batch_size
        self.max_prefill_tokens = max_prefill_tokens
        self.sequences = [sequence for group in groups for sequence in group]
        self._groups = [group for group in groups for _ in group]
        self._unfinished = {id(group): len(group) for group in groups}
        for index, sequence in enumerate(self.sequences):
            assert sequence.index == index, f"sequence {sequence.index} at place {index}"
            needed = allocator.pages_for(sequence.max_cached_tokens)
            assert needed <= allocator.num_pages, f"sequence {index} needs {needed} pages"
        self.running: list[RunningSequence] = []
        self.waiting = deque(self.sequences)
        self.num_preemptions = 0
        self.num_finished = 0
        self.finished_tokens = 0
        self.num_complete_groups = 0  # of which every sequence is finished
        self._parked: deque[RunningSequence] = deque()  # waiting ones that hold pages, oldest first
        self._preempted: list[int] = []
        self._evicted: list[RunningSequence] = []  # of this step, computed tokens or not
        self._ended: list[int] = []  # sequences that nobody has been told of
        self._prompts_pending = 0  # steps over prompts whose draws are not in

    @property
    def num_groups(self) -> int:
        return len(self._unfinished)

    @property
    def done(self) -> bool:
        return not self.running and not self.waiting

    def schedule(self, repeats: int = 1) -> Step | None:
        """The next step, of at most `repeats` forwards; not when `done`. Takes the pages that it
        needs.

        Returns:
            None while it takes the draws of earlier steps to go on: `complete` them first. Where
            none are pending, it takes the environment: `reply` first.
        """
        assert not self.done, "every sequence is finished"
        self._admit()
        plan = self._prefills()
        prefills = bool(plan)
        if not prefills:
            plan = [] if self._prompts_pending else self._decodes(repeats)
        if not plan or (self._waits_for_draws() and not self._fits(plan)):
            waits = self._waits_for_draws() or any(s.awaiting for s in self.running)
            assert waits, "a step that does nothing"
            return None
        chunks: list[Chunk] = []
        copies: list[tuple[int, int]] = []
        for sequence, length in plan:
            if sequence in self._evicted:
                continue
            start = sequence.num_computed
            if not self._make_room(sequence, length):
                continue  # the youngest of all: it gave up its own pages
            copy = self.allocator.make_writable(sequence.pages, start, length)
            if copy is not None:
                copies.append(copy)
            ends = start + length == len(sequence.prompt) + len(sequence.generated)
            draws = self._draws(sequence) if ends or not prefills else ()
            chunks.append(Chunk(sequence.index, start, length, draws))
            sequence.num_computed += length
            for index in draws:
                self.sequences[index].num_pending += 1 if prefills else length
        self._evicted.clear()
        if not chunks:  # a reply had no room: its sequence gave up its pages, others go on
            return self.schedule(repeats)
        prefilled = sum(chunk.length for chunk in chunks) if prefills else 0
        forwards = 1 if prefills else max(chunk.length for chunk in chunks)
        preempted, self._preempted = tuple(self._preempted), []
        step = Step(tuple(chunks), tuple(copies), prefilled, preempted, forwards)
        self._prompts_pending += prefills and bool(step.draws)
        return step

    def complete(self, step: Step, drawn: Sequence[tuple[Sequence[int], Sequence[float]]]) -> int:
        """Takes in what a step drew: (token ids, their log-probs) for each of `step.draws`, in that
        order; as many as it has forwards, or fewer for a sequence that ends. Steps are completed in
        the order in which they were scheduled.

        Returns:
            Tokens taken; what was drawn for a sequence past its end, or its turn's, is not.

        Raises:
            NonFiniteLogits: as `RunningSequence.extend`.
        """
        draws = step.draws
        assert len(draws) == len(drawn), f"{len(drawn)} draws for {len(draws)} sequences"
        self._prompts_pending -= not step.decodes and bool(draws)
        lengths = [
            chunk.length if step.decodes else 1 for chunk in step.chunks for _ in chunk.draws
        ]
        taken = 0
        ended: list[RunningSequence] = []
        for index, length, (token_ids, logprobs) in zip(draws, lengths, drawn, strict=True):
            sequence = self.sequences[index]
            sequence.num_pending -= length
            if not (sequence.finished or sequence.awaiting):
                taken += sequence.extend(token_ids, logprobs)
                if sequence.finished:
                    ended.append(sequence)
                elif not sequence.awaiting:
                    assert len(token_ids) == length, f"{len(token_ids)} of {length} tokens"
        youngest_running = self.running[-1].index if self.running else -1
        for chunk in step.chunks:
            leader = self.sequences[chunk.sequence]
            for index in chunk.draws:
                if index != leader.index and not self.sequences[index].finished:
                    self._share_prompt(leader, self.sequences[index])
                    if index > youngest_running:
                        self._parked.append(self.sequences[index])
        for sequence in ended:
            self._finish(sequence, sequence.index <= youngest_running)
        if ended:
            self.running = [sequence for sequence in self.running if not sequence.finished]
        return taken

    def reply(self, index: int, token_ids: Sequence[int] | None) -> None:
        """Takes in what the environment said to a sequence that waits for it and has no draws
        pending; None ends it."""
        sequence = self.sequences[index]
        sequence.reply(token_ids)
        if sequence.finished:
            self._finish(sequence, sequence in self.running)
            self.running = [s for s in self.running if not s.finished]

    def take_ended(self) -> list[int]:
        """The sequences that have finished since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def cancel(self) -> None:
        """Gives back all pages. The scheduler is of no use afterwards."""
        for sequence in self.sequences:
            self.allocator.release(sequence.pages)
        self.running.clear()
        self.waiting.clear()
        self._parked.clear()

    def _finish(self, sequence: RunningSequence, was_running: bool) -> None:
        self.num_finished += 1
        self._ended.append(sequence.index)
        self.finished_tokens += len(sequence.generated)
        group = self._groups[sequence.index]
        self._unfinished[id(group)] -= 1
        self.num_complete_groups += self._unfinished[id(group)] == 0
        if not was_running:
            self.waiting.remove(sequence)
            if sequence in self._parked:
                self._parked.remove(sequence)
        self.allocator.release(sequence.pages)

    def _prefills(self) -> list[tuple[RunningSequence, int]]:
        """(sequence, tokens) of the next forward over prompts; empty when there is none to run."""
        budget = self.max_prefill_tokens
        keys = CONTEXT_TOKENS * budget
        plan: list[tuple[RunningSequence, int]] = []
        for sequence in self.running:
            if sequence.num_pending or sequence.awaiting or budget == 0:
                continue
            uncomputed = sequence.num_tokens - sequence.num_computed
            assert uncomputed >= 1, f"sequence {sequence.index} has nothing to compute"
            if uncomputed > 1 if sequence.started else self._leads(sequence):
                length = min(uncomputed, budget)
                budget -= length
                keys -= sequence.num_computed + length
                if plan and keys < 0:
                    break
                plan.append((sequence, length))
        return plan

    def _decodes(self, repeats: int) -> list[tuple[RunningSequence, int]]:
        """(sequence, forwards) of the next decode step. One forward where pages are short."""
        plan = [
            (sequence, min(repeats, sequence.draws_left))
            for sequence in self.running
            if sequence.started and sequence.draws_left and not sequence.awaiting
        ]
        if repeats > 1 and not self._fits(plan):
            return self._decodes(1)
        return plan

    def _fits(self, plan: Sequence[tuple[RunningSequence, int]]) -> bool:
        """Whether all of it can be written without taking pages from anyone."""
        cost = self.allocator.write_cost
        needed = sum(cost(sequence.pages, sequence.num_computed, n) for sequence, n in plan)
        return needed <= self.allocator.num_free

    def _waits_for_draws(self) -> bool:
        return any(sequence.num_pending for sequence in self.running)

    def _leads(self, sequence: RunningSequence) -> bool:
        return self._groups[sequence.index][0] is sequence

    def _draws(self, sequence: RunningSequence) -> tuple[int, ...]:
        if sequence.started:
            return (sequence.index,)
        return tuple(member.index for member in self._groups[sequence.index])

    def _share_prompt(self, donor: RunningSequence, sequence: RunningSequence) -> None:
        sequence.pages = self.allocator.fork(donor.pages, len(donor.prompt))
        sequence.num_computed = len(donor.prompt)

    def _admit(self) -> None:
        """Moves waiting sequences to the running ones while batch and pages allow.

        One page is kept free for each running sequence that may still need another: without this
        margin a sequence would be admitted only to be pre-empted a few steps later.
        """
        if not self.waiting or len(self.running) >= self.max_batch_size:
            return
        margin = sum(self._may_grow(sequence) for sequence in self.running)
        while self.waiting and len(self.running) < self.max_batch_size:
            sequence = self.waiting[0]
            # With none running, the first one is parked or all pages are free: it always fits.
            if self.running and self._pages_to_admit(sequence) + margin > self.allocator.num_free:
                return
            self.waiting.popleft()
            self._give_pages(sequence)
            self.running.append(sequence)
            margin += self._may_grow(sequence)

    def _may_grow(self, sequence: RunningSequence) -> bool:
        pages = sequence.pages
        if len(pages) < self.allocator.pages_for(sequence.max_cached_tokens):
            return True
        return self.allocator.write_cost(pages, sequence.num_computed) > 0

    def _pages_to_admit(self, sequence: RunningSequence) -> int:
        """Free pages that it would take for the tokens that it has now, and one more to grow."""
        if sequence.started:
            shares_prompt = bool(sequence.pages) or self._donor(sequence) is not None
        else:
            shares_prompt = not self._leads(sequence)
        size = self.allocator.page_size
        total = self.allocator.pages_for(
            min(sequence.num_tokens + size, sequence.max_cached_tokens)
        )
        return total - len(sequence.prompt) // size if shares_prompt else total

    def _donor(self, sequence: RunningSequence) -> RunningSequence | None:
        """A sequence of the same group that holds the whole prompt."""
        prompt = len(sequence.prompt)
        for member in self._groups[sequence.index]:
            if member.pages and member.num_computed >= prompt and member is not sequence:
                return member
        return None

    def _give_pages(self, sequence: RunningSequence) -> None:
        if sequence.pages:
            parked = self._parked.popleft()
            assert parked is sequence, f"parked {parked.index} is older than {sequence.index}"
        elif sequence.started:
            donor = self._donor(sequence)
            if donor is not None:
                self._share_prompt(donor, sequence)
            self._extend(sequence)
        elif self._leads(sequence):
            self._extend(sequence)

    def _extend(self, sequence: RunningSequence) -> None:
        """Pages for all tokens that the sequence has, so that its prefill needs no more of them."""
        missing = self.allocator.pages_for(sequence.num_tokens) - len(sequence.pages)
        sequence.pages += self.allocator.allocate(missing)

    def _make_room(self, sequence: RunningSequence, length: int) -> bool:
        """Frees pages until a running sequence can write its next tokens, the youngest ones first.

        Returns:
            False when it had to give up its own pages instead.
        """
        allocator = self.allocator
        # The cost is asked for again each time: with the other users of a page gone, it is 0.
        at = sequence.num_computed
        while allocator.write_cost(sequence.pages, at, length) > allocator.num_free:
            if self._parked:
                self._drop_pages(self._parked.pop())
                continue
            victim = self.running.pop()
            assert self.running, "the oldest sequence does not fit into all the pages"
            if victim.num_computed > 0:
                self.num_preemptions += 1
                self._preempted.append(victim.index)
            self._drop_pages(victim)
            self._evicted.append(victim)
            self.waiting.appendleft(victim)
            if victim is sequence:
                return False
        return True

    def _drop_pages(self, sequence: RunningSequence) -> None:
        self.allocator.release(sequence.pages)
        sequence.num_computed = 0
