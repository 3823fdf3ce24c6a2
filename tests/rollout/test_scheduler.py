"""The scheduler alone: random loads on few pages, with tokens drawn by a stand-in for the model."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rollout.test_pages import check_counts

from jetrl.rollout.pages import PageAllocator
from jetrl.rollout.scheduler import Chunk, ScheduledStep, Scheduler
from jetrl.rollout.sequence import RunningSequence
from jetrl.rollout.stopping import StopRules
from jetrl.types import PromptInputs

STOP = 0


def make_groups(prompt_lengths, n, max_tokens, turns=1):
    rules = StopRules(max_tokens, frozenset({STOP}), max_turns=turns)
    groups, index = [], 0
    for number, length in enumerate(prompt_lengths):
        prompt = PromptInputs(tuple(range(1000 * number, 1000 * number + length)))
        group = [RunningSequence(index + j, prompt, key=index + j, rules=rules) for j in range(n)]
        groups.append(group)
        index += n
    return groups


@dataclass
class Simulation:
    """Runs a scheduler, with pages that hold tokens where a cache holds keys and values.

    A token drawn is a function of all tokens before it, read back through the pages: a page that is
    shared, copied or freed wrongly changes what is drawn.
    """

    scheduler: Scheduler
    stop_chance: float = 0.2
    repeats: int = 1
    ahead: int = 0  # steps that run before the draws of an earlier one are handed over
    late: int = 0  # steps that an environment's reply takes; by then no draw is pending
    width: int = 1  # tokens of a sequence in a forward: drafts are right by chance
    computed: Counter = field(default_factory=Counter)
    steps: list[ScheduledStep] = field(default_factory=list)

    def __post_init__(self):
        pages = self.scheduler.allocator
        self.memory = [[None] * pages.page_size for _ in range(pages.num_pages)]
        self.tokens = [
            list(s.prompt.token_ids) for s in self.scheduler.sequences
        ]  # pending ones as well
        self.in_flight = []
        self.asked = Counter()

    def run(self):
        while not self.scheduler.done:
            self.step()
            assert len(self.steps) < 20000, "livelock"
        return [sequence.generated for sequence in self.scheduler.sequences]

    def step(self):
        sequences = []

        def width(count):
            sequences.append(count)
            return self.width

        step = self.scheduler.schedule(self.repeats, width)
        if step is not None:
            # A width above 1 was chosen for the very sequences of the step.
            assert step.width == 1 or len(step.chunks) == sequences[-1]
            self.steps.append(step)
            self.check(step)
            self.in_flight.append((step, self.compute(step)))
        while self.in_flight and (step is None or len(self.in_flight) > self.ahead):
            step = self.in_flight[0][0]
            self.scheduler.complete(*self.in_flight.pop(0))
        for sequence in self.scheduler.sequences:
            assert self.in_flight or sequence.num_pending == sequence.num_extra == 0
            if sequence.awaiting and not sequence.num_pending:
                self.reply(sequence)
        tables = [s.pages for s in self.scheduler.sequences if s.pages]
        check_counts(self.scheduler.allocator, tables)

    def reply(self, sequence):
        """EnvironmentReply by a function of the sequence so far, as a draw is one."""
        self.asked[sequence.index] += 1
        if self.asked[sequence.index] > self.late:
            self.asked[sequence.index] = 0
            rng = random.Random(hash((tuple(sequence.generated), sequence.index)))
            said = None if rng.random() < 0.2 else [100 + i for i in range(rng.randint(1, 6))]
            self.scheduler.reply(sequence.index, said)
            if not sequence.finished:
                self.tokens[sequence.index] += said

    def compute(self, step):
        content = [list(self.memory[source]) for source, _ in step.copies]
        for (_, destination), slots in zip(step.copies, content, strict=True):
            self.memory[destination] = slots
        drawn = []
        for chunk in step.chunks:
            if step.decodes:
                drawn.append(self.decode(chunk, step.width))
            else:
                for position in range(chunk.start, chunk.start + chunk.length):
                    self.write(chunk.sequence, position)
                seen = self.read(chunk.sequence, chunk.start + chunk.length)
                for index in chunk.draws:
                    self.tokens[index].append(self.draw(seen, index))
                    drawn.append(self.tokens[index][-1:])
        return [(tokens, [-1.0] * len(tokens)) for tokens in drawn]

    def decode(self, chunk, width):
        """Decode as the GPU does: continue from a sequence's last token, and stop by itself."""
        sequence = self.scheduler.sequences[chunk.sequence]
        tokens, drawn = self.tokens[chunk.sequence], []
        end = len(sequence.prompt) + sequence.rules.max_tokens
        for _ in range(chunk.length):
            first = len(tokens) - 1
            # Each draft is right or wrong; the first wrong one ends the forward.
            for position in range(first, min(first + width, end - 1)):
                if tokens[-1] == STOP:
                    break
                if position > first and hash((len(self.steps), chunk.sequence, position)) % 2:
                    self.overwrite(chunk.sequence, position)
                    break
                assert chunk.start <= position < chunk.reach
                self.write(chunk.sequence, position)
                seen = self.read(chunk.sequence, position + 1)
                tokens.append(self.draw(seen, chunk.sequence))
                drawn.append(tokens[-1])
        return drawn

    def overwrite(self, index, position):
        """Write what is not the sequence's, as a wrong draft does, where the sequence may write."""
        pages, size = self.scheduler.sequences[index].pages, self.scheduler.allocator.page_size
        assert self.scheduler.allocator._users[pages[position // size]] == 1
        self.memory[pages[position // size]][position % size] = None

    def write(self, index, position):
        sequence = self.scheduler.sequences[index]
        size = self.scheduler.allocator.page_size
        page = sequence.pages[position // size]
        assert self.scheduler.allocator._users[page] == 1, "a shared page is written"
        self.memory[page][position % size] = self.tokens[index][position]
        self.computed[index, position] += 1

    def read(self, index, length):
        pages, size = self.scheduler.sequences[index].pages, self.scheduler.allocator.page_size
        seen = [self.memory[pages[p // size]][p % size] for p in range(length)]
        assert seen == self.tokens[index][:length]
        return tuple(seen)

    def draw(self, seen, index):
        rng = random.Random(hash((seen, index)))
        return STOP if rng.random() < self.stop_chance else rng.randint(1, 99)

    def check(self, step):
        scheduler = self.scheduler
        assert 1 <= len(step.chunks) <= scheduler.max_batch_size
        assert step.num_prefill_tokens <= scheduler.max_prefill_tokens
        total = sum(chunk.length for chunk in step.chunks)
        assert total == step.num_prefill_tokens or step.num_prefill_tokens == 0
        contexts = sum(chunk.start + chunk.length for chunk in step.chunks)
        if not step.decodes and len(step.chunks) > 1:
            assert contexts <= 64 * scheduler.max_prefill_tokens
        assert step.repeats <= (self.repeats if step.decodes else 1)
        assert len({chunk.sequence for chunk in step.chunks}) == len(step.chunks)
        destinations = [destination for _, destination in step.copies]
        assert len(set(destinations)) == len(destinations)
        order = [s.index for s in (*scheduler.running, *scheduler.waiting)]
        assert order == sorted(order), "running sequences are the oldest"


def simulate(
    prompt_lengths,
    n=1,
    max_tokens=6,
    pages=1000,
    page_size=4,
    batch=8,
    prefill=64,
    turns=1,
    **kwargs,
):
    groups = make_groups(prompt_lengths, n, max_tokens, turns)
    scheduler = Scheduler(PageAllocator(pages, page_size), batch, prefill)
    for group in groups:
        scheduler.add(group)
    return Simulation(scheduler, **kwargs)


def test_one_group_literally():
    """A prompt of 5 tokens, two samples, pages of 2: the life of a group as data."""
    simulation = simulate([5], n=2, max_tokens=2, page_size=2, prefill=4, stop_chance=0.0)
    simulation.run()
    assert simulation.steps == [
        ScheduledStep((Chunk(0, 0, 4, ()),), (), 4, ()),
        ScheduledStep((Chunk(0, 4, 1, (0, 1)),), (), 1, ()),
        ScheduledStep((Chunk(0, 5, 1, (0,)), Chunk(1, 5, 1, (1,))), ((2, 3),), 0, ()),
    ]


def test_prompts_are_prefilled_once_for_all_samples():
    simulation = simulate([9, 4, 30], n=5, prefill=7, batch=4)
    simulation.run()
    assert simulation.scheduler.num_preemptions == 0
    for leader, length in ((0, 9), (5, 4), (10, 30)):
        for position in range(length):
            assert simulation.computed[leader, position] == 1
            assert all(simulation.computed[leader + j, position] == 0 for j in range(1, 5))
    assert set(simulation.computed.values()) <= {0, 1}
    assert max(len(step.chunks) for step in simulation.steps) == 4
    for sequence in simulation.scheduler.sequences:
        last = len(sequence.prompt) + len(sequence.generated) - 1
        assert simulation.computed[sequence.index, last] == 0, "nothing follows it"


def test_steps_are_scheduled_before_the_draws_are_known():
    simulation = simulate([2, 5], max_tokens=40, stop_chance=0.0, repeats=4, ahead=1)
    for _ in range(4):  # prompts; their draws are waited for; decode, twice
        simulation.step()
    assert [step.decodes for step in simulation.steps] == [False, True, True]
    assert [s.num_pending for s in simulation.scheduler.sequences] == [4, 4]
    assert [len(s.generated) for s in simulation.scheduler.sequences] == [5, 5]
    simulation.run()
    assert [len(s.generated) for s in simulation.scheduler.sequences] == [40, 40]


def test_preempted_sequences_share_the_prompt_again():
    simulation = simulate([40], n=6, max_tokens=60, pages=25, page_size=4, stop_chance=0.04)
    simulation.run()
    preemptions = simulation.scheduler.num_preemptions
    prompt_work = sum(count for (_, at), count in simulation.computed.items() if at < 40)
    assert preemptions >= 2
    assert 40 <= prompt_work < 40 * (1 + preemptions)


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=7),
    n=st.integers(1, 5),
    max_tokens=st.integers(1, 15),
    page_size=st.sampled_from([1, 2, 4, 16]),
    spare_pages=st.sampled_from([0, 0, 1, 2, 5]),
    stop_chance=st.sampled_from([0.0, 0.05, 0.3]),
    turns=st.sampled_from([1, 2, 9]),
    limits=st.fixed_dictionaries(
        {
            "batch": st.sampled_from([1, 2, 3, 8]),
            "prefill": st.sampled_from([1, 2, 7, 64]),
            "repeats": st.sampled_from([1, 2, 5]),
            "ahead": st.sampled_from([0, 1, 2]),
            "late": st.sampled_from([0, 1, 5]),
            "width": st.sampled_from([1, 1, 2, 8]),
        }
    ),
)
def test_any_load_ends_with_the_same_tokens_and_frees_all_pages(
    lengths, n, max_tokens, page_size, spare_pages, stop_chance, turns, limits
):
    """Batch, chunk and page limits change no token, down to the pages that one sequence needs."""
    common = {"page_size": page_size, "turns": turns, "stop_chance": stop_chance}
    ample = simulate(lengths, n, max_tokens, batch=99, **common)
    wanted = ample.run()
    assert ample.scheduler.num_preemptions == 0
    least = -(-(max(lengths) + max_tokens - 1) // page_size)
    tight = simulate(lengths, n, max_tokens, pages=least + spare_pages, **limits, **common)
    assert tight.run() == wanted
    assert tight.scheduler.allocator.num_used == 0
    assert tight.scheduler.num_finished == len(wanted)


def test_a_load_on_the_fewest_pages_preempts_and_close_frees_them():
    """The random loads above would prove little if pages never ran out in them."""
    simulation = simulate([7, 7, 7], n=3, max_tokens=12, pages=5, page_size=4, stop_chance=0.0)
    while not simulation.scheduler.num_preemptions:
        simulation.step()
    assert simulation.scheduler.allocator.num_used > 0
    simulation.scheduler.close()
    assert simulation.scheduler.allocator.num_used == 0


def test_accepted_drafts_are_not_computed_again():
    simulation = simulate([5, 9], n=2, max_tokens=30, width=8, stop_chance=0.0)
    simulation.run()
    assert [step.decodes for step in simulation.steps].count(False) == 1, "the prompts, once"
    assert simulation.steps[1].width == 8


def test_a_cancelled_sequence_gives_back_its_share_of_the_prompt():
    simulation = simulate([7], n=3, max_tokens=3, batch=1, stop_chance=0.0)
    simulation.step()
    first, second, third = simulation.scheduler.sequences
    assert first in simulation.scheduler.running
    assert second.pages
    simulation.scheduler.cancel(second.index)
    assert second.pages == []
    simulation.run()
    assert [len(s.generated) for s in (first, second, third)] == [3, 1, 3]
    assert simulation.scheduler.finished_tokens == 7


def test_short_replies_to_long_conversations_share_a_forward_as_their_contexts_allow():
    # By 16 tokens a forward they would take eight; by 64 times 16 tokens of contexts, five.
    simulation = simulate([200] * 10, batch=10, prefill=16, turns=2, stop_chance=1.0, late=10**6)
    scheduler = simulation.scheduler
    while not all(
        sequence.awaiting and not sequence.num_pending for sequence in scheduler.sequences
    ):
        simulation.step()
    for sequence in scheduler.sequences:
        scheduler.reply(sequence.index, [101])
        simulation.tokens[sequence.index].append(101)
    before = len(simulation.steps)
    simulation.run()
    assert [len(step.chunks) for step in simulation.steps[before : before + 2]] == [5, 5]
