"""The rollout engine samples completions, with their log-probs, from prompts.

`RolloutEngine.generate` steps a `Generation` until all sequences have ended. `add`, `step`,
`cancel` and `finish` are for callers whose prompts arrive one by one.

    schedule ─▶ prefill: forward, draw ─▶ ... the next steps ... ─▶ read
             └▶ decode: forwards       ─▶

On a GPU a step is launched while the previous one runs, and a decode step has several forwards, so
the device does not wait for Python. Neither changes a token.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter

import torch

from jetrl.errors import UserError
from jetrl.kernels.attention.layout import BLOCK_KEYS
from jetrl.kernels.decode_state import MAX_ROWS
from jetrl.memory.out_of_memory import within_memory
from jetrl.models.draft_head import DraftHead
from jetrl.models.policy import Policy
from jetrl.precision.backend import has_kernels
from jetrl.rollout.decode import DecodeBatch
from jetrl.rollout.draft_widths import Width
from jetrl.rollout.inputs import encode_prompts, make_groups, resumed_groups, text_decoder
from jetrl.rollout.kv_cache import PagedCache
from jetrl.rollout.kv_pool import KVPool, too_small
from jetrl.rollout.launched_step import LaunchedStep
from jetrl.rollout.multi_turn import MultiTurn
from jetrl.rollout.options import GenerateOptions, Progress, RolloutStats, SpeculationStats
from jetrl.rollout.pages import PageAllocator
from jetrl.rollout.prefill import Prefill
from jetrl.rollout.scheduler import ScheduledStep, Scheduler
from jetrl.rollout.sequence import NonFiniteLogits, RunningSequence
from jetrl.rollout.sizes import RolloutSizes, Sizes
from jetrl.rollout.speculation import MODES, Speculation
from jetrl.types import Completion, Prompt, PromptInputs, SamplingParams, Unfinished

logger = logging.getLogger(__name__)

_SIZES = ("max_batch_size", "num_pages", "page_size", "max_prefill_tokens", "max_model_len")
# On a GPU: forwards of one decode step, and steps launched before earlier draws are known.
_GPU_REPEATS, _GPU_AHEAD = 8, 1


def check_gpu_sizes(max_batch_size: int, page_size: int) -> None:
    """Raise a UserError for sizes that a GPU's decode kernels do not have."""
    if max_batch_size > MAX_ROWS:
        raise UserError(f"max_batch_size {max_batch_size}: a GPU decodes {MAX_ROWS} at most")
    if page_size != BLOCK_KEYS:
        raise UserError(f"page_size {page_size}: a page has {BLOCK_KEYS} tokens on a GPU")


ProgressCallback = Callable[[Progress], None]


@dataclass(eq=False)
class Generation:
    """Sequences that run together over one cache, with their launched steps.

    `started` is the start of the call (`time.perf_counter`). A decode step has `repeats` forwards;
    `ahead` steps are launched before earlier draws are known.
    """

    scheduler: Scheduler
    prefill: Prefill
    decode: DecodeBatch
    drafts: Speculation | None
    started: float
    repeats: int
    ahead: int
    multi_turn: MultiTurn | None = None
    counts: RolloutStats = field(default_factory=RolloutStats)
    _launched: deque[LaunchedStep] = field(default_factory=deque)
    _verify: Width | None = None  # of the next decode step
    _last_ready: torch.cuda.Event | None = None

    def __post_init__(self) -> None:
        self.decode.begin()
        if self.drafts is not None:
            self.drafts.begin()

    def add(self, group: Sequence[RunningSequence]) -> None:
        """Check and add the samples of a prompt; see `RolloutEngine.add`."""
        scheduler = self.scheduler
        allocator = scheduler.allocator
        first = next(chain(scheduler.running, scheduler.waiting, group)).params
        for sequence in group:
            problem = too_small(
                pages=allocator.num_pages,
                page_size=allocator.page_size,
                prompt=len(sequence.prompt),
                most=sequence.rules.max_tokens,
            )
            if problem:
                raise UserError(problem)
            if not self._together(sequence.params, first):
                raise UserError(
                    "prompts that are sampled together with speculation need the same "
                    "temperature, top_p, top_k, min_p and truncated_logprobs"
                )
        scheduler.add(group)

    def takes(self, params: SamplingParams) -> bool:
        """Return True if `add` takes sequences with these parameters now."""
        # Those that are present go together.
        present = next(chain(self.scheduler.running, self.scheduler.waiting), None)
        return present is None or self._together(params, present.params)

    def _together(self, first: SamplingParams, other: SamplingParams) -> bool:
        # With drafts, the sequence of a row is not known in advance.
        alike = attrgetter("temperature", "token_filter", "truncated_logprobs")
        return self.drafts is None or alike(first) == alike(other)

    def step(self) -> list[int]:
        """Launch a step or read the draws of one; see `RolloutEngine.step`."""
        scheduler = self.scheduler
        # Prefill, or several decode forwards; None if neither can be planned.
        step = scheduler.schedule(self.repeats, self._width)
        if step is not None:
            self._launch(step)
        elif self._launched:
            # The next step depends on pending draws.
            self._complete_oldest()
        else:
            # Every sequence waits for its environment.
            assert self.multi_turn is not None, "nothing to wait for"
            self.multi_turn.deliver_replies(wait=True)
        # Texts of ended sequences serve as drafts for later ones.
        ended = scheduler.take_ended()
        if self.drafts is not None:
            for index in ended:
                self.drafts.archive(scheduler.sequences[index])
        return ended

    def _width(self, sequences: int) -> int:
        """Return the maximum tokens per sequence in a forward of this many sequences."""
        if self.drafts is None:
            return 1
        self._verify = self.drafts.choose(sequences)
        return self._verify.most

    def _launch(self, step: ScheduledStep) -> None:
        """Launch a step, and read the draws of an earlier one if enough steps are ahead."""
        # Shared pages are copied before they are written.
        self.prefill.cache.copy_pages(step.copies)
        self.decode.forget(step)
        sequences = self.scheduler.sequences
        if step.decodes:
            self._launched.append(self.decode.launch(step, sequences, self._verify))
        else:
            self._launched.append(self.prefill.launch(step, sequences))
            if self.drafts is not None:
                self.drafts.flush_archive()  # The host is idle while the device runs a prefill.
        if len(self._launched) > self.ahead:
            self._complete_oldest()

    def _complete_oldest(self) -> None:
        """Wait for the oldest launched step and give its draws to the sequences."""
        launched = self._launched.popleft()
        step = launched.step
        drawn = launched.drawn()
        seconds = launched.seconds
        counts = self.counts
        if launched.began is not None and launched.ready is not None:
            # Idle time between steps, by the clock of the GPU.
            after = self._last_ready or launched.began
            counts.device_idle_s += max(0.0, after.elapsed_time(launched.began)) / 1e3
            self._last_ready = launched.ready
        # Draws past the end of a sequence are dropped.
        taken = self.scheduler.complete(step, drawn)
        # Update acceptance rates, and send ended turns to the environment.
        if step.decodes and self.drafts is not None:
            self.drafts.record(launched, seconds)
        if self.multi_turn is not None:
            self.multi_turn.ask(step)
            self.multi_turn.deliver_replies(wait=False)
        counts.forwards += step.repeats
        counts.tokens_drawn += taken
        counts.tokens_prefilled += step.num_prefill_tokens
        counts.prefill_s += 0.0 if step.decodes else seconds

    def progress(self, max_tokens: int) -> Progress:
        """Return the progress so far; `max_tokens` per completion bounds `eta_s`."""
        scheduler = self.scheduler
        tokens = self.counts.tokens_drawn
        seconds = time.perf_counter() - self.started
        rate = tokens / seconds if seconds > 0 else 0.0
        total = len(scheduler.sequences)
        done = scheduler.num_finished
        # Short sequences finish first, so their mean length is biased. If each token ends its
        # sequence with probability done / tokens, a sequence has tokens / done left on average.
        room = (total - done) * max_tokens - (tokens - scheduler.finished_tokens)
        left = min(room, (total - done) * tokens / done) if done else room
        return Progress(
            sequences_done=done,
            sequences_total=total,
            tokens=tokens,
            tokens_per_s=rate,
            pages_in_use=scheduler.allocator.num_used,
            pages_total=scheduler.allocator.num_pages,
            seconds=seconds,
            eta_s=max(0.0, left) / rate if rate > 0 else None,
        )

    def stats(self) -> RolloutStats:
        """Complete the counts at the end of a call, and return them."""
        counts = self.counts
        scheduler = self.scheduler
        forwards = self.decode.forwards
        counts.sequences = len(scheduler.sequences)
        counts.preemptions = scheduler.num_preemptions
        counts.pages_total = scheduler.allocator.num_pages
        counts.seconds = time.perf_counter() - self.started
        counts.graphs = forwards.num_graphs
        counts.capture_s = forwards.capture_s
        counts.speculation = None if self.drafts is None else self.drafts.end()
        return counts


class RolloutEngine:
    """Samples from a policy; each call uses the current weights.

    The tokens drawn for a prompt depend only on weights, sampling parameters and prompt, not on the
    arguments below.

    Args:
        max_batch_size: Maximum sequences per forward.
        num_pages: Pages of the KV cache. Default: enough for the largest batch of a call, up to a
            quarter of the free memory (CPU), or all but 4 GiB and the contexts of a prefill (GPU;
            all but a fifth if that leaves more).
        page_size: Tokens per page; 64 on a GPU.
        max_prefill_tokens: Maximum prompt tokens per forward.
        max_model_len: Maximum tokens of prompt and completion. Default: the context length.
        speculation: "text" drafts tokens from earlier text and verifies several per forward,
            "head" drafts them with a draft head, "auto" uses both when that is faster.
        draft_head: Required by "head", used by "auto" if given.

    Attributes:
        stats: Counts of the last call that succeeded.
        unfinished: Completions that the last call cut off, by index.

    Raises:
        UserError: "head" without a draft head; a size is below 1 or not supported by the device,
            max_model_len exceeds the model's context, or the pages do not fit in memory.
    """

    def __init__(
        self,
        policy: Policy,
        max_batch_size: int = 256,
        num_pages: int | None = None,
        page_size: int = 64,
        max_prefill_tokens: int = 8192,
        max_model_len: int | None = None,
        speculation: str = "off",
        draft_head: DraftHead | None = None,
    ) -> None:
        context = policy.config.max_position_embeddings
        sizes = (max_batch_size, num_pages, page_size, max_prefill_tokens, max_model_len)
        for name, value in zip(_SIZES, sizes, strict=True):
            if value is not None and (isinstance(value, float | str) or value < 1):
                raise UserError(f"{name} must be an integer of at least 1, not {value!r}")
        if max_model_len is not None and max_model_len > context:
            raise UserError(f"max_model_len {max_model_len}: the model's context is {context}")
        if speculation not in MODES:
            raise UserError(f"speculation {speculation!r}: one of {', '.join(MODES)}")
        if speculation == "head" and draft_head is None:
            raise UserError(
                "speculation 'head' needs a draft head, which a run trains; use text, auto or off"
            )
        # GPU kernels support fixed sizes only.
        on_gpu = has_kernels(policy.device)
        if on_gpu:
            check_gpu_sizes(max_batch_size, page_size)
        self.policy = policy
        self.sizes = RolloutSizes(Sizes(max_batch_size, max_prefill_tokens, num_pages))
        self.page_size = page_size
        self.max_model_len = max_model_len or context
        self._pool = KVPool(
            policy,
            self.sizes,
            num_pages=num_pages,
            page_size=page_size,
            max_model_len=self.max_model_len,
        )
        if speculation != "off":
            self._pool.speculation = Speculation(
                speculation,
                slots=max_batch_size,
                max_model_len=self.max_model_len,
                device=policy.device,
                head=draft_head,
            )
        self._repeats = _GPU_REPEATS if on_gpu else 1
        self._ahead = _GPU_AHEAD if on_gpu else 0
        self._running: Generation | None = None
        self.stats = RolloutStats()
        self.unfinished: dict[int, Unfinished] = {}

    @property
    def sequences(self) -> Sequence[RunningSequence]:
        """Sequences of the current call, including finished ones; empty between calls."""
        running = self._running  # Another thread, the watchdog, reads this.
        return () if running is None else running.scheduler.sequences

    @property
    def num_unfinished(self) -> int:
        """Sequences that run or wait; 0 between calls."""
        running = self._running
        if running is None:
            return 0
        return len(running.scheduler.running) + len(running.scheduler.waiting)

    @property
    def num_pages(self) -> int:
        """Pages of the current call; 0 between calls."""
        return 0 if self._running is None else self._running.scheduler.allocator.num_pages

    @property
    def pages_in_use(self) -> int:
        """Pages held by sequences; 0 between calls."""
        return 0 if self._running is None else self._running.scheduler.allocator.num_used

    def use_drafts(self, speculation: Speculation) -> None:
        """Use a `Speculation` with max_batch_size slots from the next call on."""
        self._pool.speculation = speculation

    def take_speculation(self) -> SpeculationStats | None:
        """Return the counts of drafts since the previous call of this; None without any."""
        drafts = self._pool.speculation
        return None if drafts is None else drafts.take()

    def free_cache(self) -> None:
        """Free the memory of the KV pages.

        On a GPU the next call continues with the same pages and captured graphs if they fit again;
        otherwise it makes a new cache.
        """
        assert self._running is None, "the cache is in use"
        self._pool.free_memory()

    def generate(
        self,
        prompts: Sequence[Sequence[int] | str | Prompt | PromptInputs],
        params: SamplingParams,
        progress: ProgressCallback | None = None,
        system_prompt: str | None = None,
        options: GenerateOptions | None = None,
    ) -> list[Completion]:
        """Sample params.n completions for each prompt.

        If the call raises, even KeyboardInterrupt, all pages are freed and the engine can be used
        again.

        Args:
            prompts: Token ids, texts, `Prompt`s, whose messages go through the chat template, or
                encoded prompts.
            params: max_tokens is reduced if prompt and completion would exceed the context.
            progress: Called after each step; an exception cancels the call.
            system_prompt: System message of each chat prompt.

        Returns:
            Completions in the order of the prompts, [p * n : (p + 1) * n] for prompt p, after
            continued ones of a partial rollout.

        Raises:
            UserError: Before anything runs, if a prompt is empty, too long or outside the
                vocabulary, stop strings have no tokenizer, or the cache is too small for one
                sequence. Later, if the chat template does not accept a reply of an environment.
            NonFiniteLogits: Logits have no finite softmax.
            OutOfMemoryStop: Out of memory with one sequence at a time. Before that, `sizes` are
                halved and the call restarts, with the same draws.
        """
        chosen = options or GenerateOptions()
        # Check all user input before anything runs.
        self.policy.check_backend()
        limit = self.max_model_len
        encoded = encode_prompts(self.policy, prompts, limit, system_prompt)

        def attempt() -> list[Completion]:
            started = time.perf_counter()
            groups = resumed_groups(self.policy, chosen.bounds.resume, params, limit)
            first = sum(map(len, groups))
            groups += make_groups(
                self.policy,
                encoded,
                params=params,
                max_model_len=limit,
                options=chosen,
                first=first,
            )
            return self._run(
                groups,
                max_tokens=params.max_tokens,
                progress=progress,
                options=chosen,
                started=started,
            )

        return within_memory(
            attempt,
            lambda problem: self.sizes.halve(self._pool.pages, self._pool.needed, problem),
            together=False,
        )

    def _run(
        self,
        groups: Sequence[Sequence[RunningSequence]],
        max_tokens: int,
        progress: ProgressCallback | None,
        options: GenerateOptions,
        started: float,
    ) -> list[Completion]:
        """Run the sequences of one attempt of `generate`; raises if out of memory."""
        assert self._running is None, "generate was called while sequences run"
        self.unfinished = {}
        if not groups:
            self.stats = RolloutStats()
            return []
        complete_ones: dict[int, Completion] = {}
        # If there are too few pages, this raises and keeps the current cache.
        cache = self._pool.cache_for(groups)
        try:
            with self._dropped_on_error():
                scheduler = self._open(cache, started).scheduler
                for group in groups:
                    self.add(group)
                complete = _completer(self.policy, self._running_now, options)
                # Step until enough prompts are complete, and cancel the others.
                while not scheduler.done and scheduler.num_complete_groups < options.bounds.enough:
                    for index in self.step():
                        completion = complete(scheduler.sequences[index])
                        complete_ones[index] = completion
                        if options.finished is not None:
                            options.finished(index, completion)
                    if progress is not None:
                        progress(self._running_now.progress(max_tokens))
                # Their tokens go to `unfinished`, for the next call.
                for sequence in scheduler.sequences:
                    if not sequence.finished:
                        self.cancel(sequence.index)
                self.finish()
        finally:
            if options.environment is not None:
                options.environment.close()
        completions = [complete_ones.get(s.index) or complete(s) for s in scheduler.sequences]
        self.unfinished = {
            s.index: Unfinished(s.prompt, s.key, completion)
            for s, completion in zip(scheduler.sequences, completions, strict=True)
            if s.finish_reason == "cancelled"
        }
        return completions

    def add(self, group: Sequence[RunningSequence]) -> None:
        """Add the samples of a prompt, which run from the next step on.

        The first group determines the cache size, unless the engine has `num_pages`. Sequences have
        their own parameters and stop rules (`inputs.make_groups`), and indices after those of
        earlier groups. Raises UserError if the cache is too small for a sequence, or if sequences
        differ in temperature, filters or truncated_logprobs with speculation.
        """
        if self._running is None:
            self._open(self._pool.cache_for([group]), time.perf_counter())
        self._running_now.add(group)

    def takes(self, params: SamplingParams) -> bool:
        """Return False if sequences that run have other parameters than `add` could take."""
        return self._running is None or self._running.takes(params)

    def step(self) -> list[int]:
        """Run one step; return the indices of ended sequences. A failure drops all sequences."""
        with self._dropped_on_error():
            return self._running_now.step()

    def cancel(self, index: int) -> None:
        """End a running sequence, keeping its tokens, and free its pages."""
        self._running_now.scheduler.cancel(index)

    def forget(self, index: int) -> None:
        """Free the memory of an ended sequence; its index is not used again before `finish`."""
        self._running_now.scheduler.forget(index)

    def reserve(self) -> int:
        """Make a cache for max_batch_size sequences of max_model_len, or what memory has room for.

        Sequences that are added next run in it. Returns its number of pages.
        """
        params = SamplingParams(n=self.sizes.now.max_batch_size, max_tokens=self.max_model_len)
        longest = make_groups(self.policy, [PromptInputs((0,))], params, self.max_model_len)
        return self._pool.cache_for(longest).num_pages

    def finish(self) -> None:
        """Drop all sequences, free their pages, and store their counts in `stats`."""
        running = self._running_now
        stats = running.stats()
        self.stats = stats
        if stats.graphs:
            logger.info("%d graphs of decode captured in %.1f s", stats.graphs, stats.capture_s)
        # Cache and graphs stay in the pool for the next call.
        running.scheduler.close()
        self._running = None

    @property
    def _running_now(self) -> Generation:
        assert self._running is not None, "no sequence was added"
        return self._running

    def _open(self, cache: PagedCache, started: float) -> Generation:
        """Start a generation over a cache, without sequences yet."""
        # All sequences share the pages; only the scheduler assigns them.
        allocator = PageAllocator(cache.num_pages, cache.page_size)
        now = self.sizes.now
        self._running = Generation(
            scheduler=Scheduler(allocator, now.max_batch_size, now.max_prefill_tokens),
            prefill=Prefill(self.policy, cache),
            decode=self._pool.decode_batch(),
            drafts=self._pool.speculation,
            started=started,
            repeats=self._repeats,
            ahead=self._ahead,
        )
        return self._running

    @contextlib.contextmanager
    def _dropped_on_error(self) -> Iterator[None]:
        """Drop all sequences and the cache if the body raises."""
        try:
            yield
        except BaseException as error:
            running, self._running = self._running, None
            if running is not None:
                if isinstance(error, NonFiniteLogits):
                    sequence = running.scheduler.sequences[error.sequence]
                    error.token_ids = (*sequence.prompt.token_ids, *sequence.generated)
                running.scheduler.close()
            # Pages may hold NaN after a failure.
            self._pool.drop()
            raise


def _completer(
    policy: Policy, generation: Generation, options: GenerateOptions
) -> Callable[[RunningSequence], Completion]:
    """Return a function from an ended sequence to its completion."""
    # With an environment, completions are conversations.
    if options.environment is not None and options.max_turns > 1:
        turns = MultiTurn(policy, options.environment, generation.scheduler)
        generation.multi_turn = turns
        return turns.completion
    decode = text_decoder(policy)

    def complete(sequence: RunningSequence) -> Completion:
        assert sequence.finish_reason is not None, f"sequence {sequence.index} is not finished"
        text = sequence.text  # cut before a stop string
        if text is None:
            text = decode(sequence.generated) if decode is not None else ""
        return Completion(
            token_ids=tuple(sequence.generated),
            logprobs=tuple(sequence.logprobs),
            finish_reason=sequence.finish_reason,
            text=text,
            versions=sequence.versions_with(options.bounds.version),
        )

    return complete
