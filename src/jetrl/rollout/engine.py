"""The rollout engine: prompts in, completions with their log-probs out.

`RolloutEngine.generate` steps a `Generation` until all sequences have ended. `add`, `step`,
`cancel` and `finish` serve callers whose prompts come one by one.

    schedule ─▶ prefill: forward, draw ─▶ ... the next steps ... ─▶ read
             └▶ decode: forwards       ─▶

On a GPU a step is launched while the one before still runs, and a decode step has several forwards,
so that the device does not wait for Python. Neither changes a token.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import torch

from jetrl.errors import UserError
from jetrl.kernels.attention.layout import BLOCK_KEYS
from jetrl.kernels.decode_state import MAX_ROWS
from jetrl.memory.out_of_memory import within_memory
from jetrl.models.draft_head import DraftHead
from jetrl.models.policy import Policy
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
    """The sequences that run together over one cache, and the steps that were launched.

    The call began at `started` (`time.perf_counter`). A decode step has `repeats` forwards; `ahead`
    steps are launched before the draws of earlier ones are known.
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
    _verify: Width | None = None  # What the next step of decode verifies.
    _last_ready: torch.cuda.Event | None = None

    def __post_init__(self) -> None:
        self.decode.begin()
        if self.drafts is not None:
            self.drafts.begin()

    def add(self, group: Sequence[RunningSequence]) -> None:
        """Check and add the samples of a prompt; see `RolloutEngine.add`."""
        allocator, scheduler = self.scheduler.allocator, self.scheduler
        # A draft's rows have no sequence of their own in advance.
        names = ("seed",) if self.drafts is None else ("seed", "temperature", "top_p", "top_k")
        alike = attrgetter(*names)
        first = (scheduler.sequences or group)[0].params
        for sequence in group:
            problem = too_small(
                pages=allocator.num_pages,
                page_size=allocator.page_size,
                prompt=len(sequence.prompt),
                most=sequence.rules.max_tokens,
            )
            if problem:
                raise UserError(problem)
            if alike(sequence.params) != alike(first):
                raise UserError(
                    "prompts that are sampled together need the same seed, and with speculation "
                    "the same temperature, top_p and top_k"
                )
        scheduler.add(group)

    def step(self) -> list[int]:
        """Launch a step or read the draws of one; see `RolloutEngine.step`."""
        scheduler = self.scheduler
        # Prompts, or several forwards of decode in a row; None while neither can be planned.
        step = scheduler.schedule(self.repeats, self._width)
        if step is not None:
            self._launch(step)
        elif self._launched:
            # The next step depends on draws that are still on their way.
            self._take_in_oldest()
        else:
            # Every sequence waits for its environment.
            assert self.multi_turn is not None, "nothing to wait for"
            self.multi_turn.take_in(wait=True)
        # Texts of ended sequences become drafts for later ones.
        ended = scheduler.take_ended()
        if self.drafts is not None:
            for index in ended:
                self.drafts.ended(scheduler.sequences[index])
        return ended

    def _width(self, sequences: int) -> int:
        """Return the most tokens per sequence in each forward of a step of so many sequences."""
        if self.drafts is None:
            return 1
        self._verify = self.drafts.choose(sequences)
        return self._verify.most

    def _launch(self, step: ScheduledStep) -> None:
        """Launch a step, and read the draws of an earlier one if enough steps are ahead."""
        # A page that several sequences share is copied before one of them writes to it.
        self.prefill.cache.copy_pages(step.copies)
        self.decode.forget(step)
        sequences = self.scheduler.sequences
        if step.decodes:
            self._launched.append(self.decode.launch(step, sequences, self._verify))
        else:
            self._launched.append(self.prefill.launch(step, sequences))
            if self.drafts is not None:
                self.drafts.put_by()  # The host has time while the device is at work on prompts.
        if len(self._launched) > self.ahead:
            self._take_in_oldest()

    def _take_in_oldest(self) -> None:
        """Wait for the oldest launched step and give its draws to the sequences."""
        launched, counts = self._launched.popleft(), self.counts
        drawn, step = launched.drawn(), launched.step
        seconds = launched.seconds
        if launched.began is not None and launched.ready is not None:
            # A GPU's own clock says how long the device had nothing to do before this step.
            after = self._last_ready or launched.began
            counts.device_idle_s += max(0.0, after.elapsed_time(launched.began)) / 1e3
            self._last_ready = launched.ready
        # The sequences take their draws, and drop those past an end.
        taken = self.scheduler.complete(step, drawn)
        # Drafts learn from what was accepted; environments hear of turns that ended.
        if step.decodes and self.drafts is not None:
            self.drafts.take_in(launched, seconds)
        if self.multi_turn is not None:
            self.multi_turn.ask(step)
            self.multi_turn.take_in(wait=False)
        counts.forwards += step.repeats
        counts.tokens_drawn += taken
        counts.tokens_prefilled += step.num_prefill_tokens
        counts.prefill_s += 0.0 if step.decodes else seconds

    def progress(self, max_tokens: int) -> Progress:
        """Return the progress so far; `max_tokens` per completion bounds the estimate."""
        scheduler, tokens = self.scheduler, self.counts.tokens_drawn
        seconds = time.perf_counter() - self.started
        total, done = len(scheduler.sequences), scheduler.num_finished
        rate = tokens / seconds if seconds > 0 else 0.0
        # The finished sequences are the short ones. If each token were the last one with the same
        # probability, done / tokens, a sequence had tokens / done more, however long it is by now.
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
        """Return the counts, complete with what others counted; once, at the end."""
        scheduler, forwards, counts = self.scheduler, self.decode.forwards, self.counts
        counts.sequences = len(scheduler.sequences)
        counts.preemptions = scheduler.num_preemptions
        counts.pages_total = scheduler.allocator.num_pages
        counts.seconds = time.perf_counter() - self.started
        counts.graphs, counts.capture_s = forwards.num_graphs, forwards.capture_s
        counts.speculation = None if self.drafts is None else self.drafts.end()
        return counts


class RolloutEngine:
    """The sampler of a policy, with the policy's current weights in each call.

    Draws for a prompt depend only on the weights, the sampling parameters and that prompt, not on
    the arguments below.

    Args:
        max_batch_size: Sequences that run at once.
        num_pages: Pages of the KV cache. By default enough for the largest batch of a call, within
            a quarter of the free memory (CPU), or within all but 4 GiB of it and the contexts of
            prompts (GPU; all but a fifth if that leaves more).
        page_size: Tokens per page; 64 on a GPU.
        max_prefill_tokens: Prompt tokens per forward.
        max_model_len: Tokens of prompt and completion; by default the model's context.
        speculation: "text" drafts tokens from earlier text and verifies several per forward,
            "head" drafts them by a draft head, "auto" does either if that is faster.
        draft_head: Needed by "head", used by "auto" if given.

    Attributes:
        stats: The counts of the last call that came to its end.
        unfinished: The completions that the last call cut off, by their index.

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
            what = "speculation 'head' needs a draft head"
            raise UserError(f"{what}, which a run trains; use text, auto or off")
        # Kernels fix some sizes on a GPU.
        on_gpu = policy.device.type == "cuda"
        if on_gpu:
            check_gpu_sizes(max_batch_size, page_size)
        self.policy = policy
        self.sizes = RolloutSizes(Sizes(max_batch_size, max_prefill_tokens, num_pages))
        self.page_size = page_size
        self.max_model_len = max_model_len or context
        self._pool = KVPool(policy, self.sizes, num_pages, page_size, self.max_model_len)
        if speculation != "off":
            self._pool.speculation = Speculation(
                speculation, max_batch_size, self.max_model_len, policy.device, draft_head
            )
        self._repeats, self._ahead = (_GPU_REPEATS, _GPU_AHEAD) if on_gpu else (1, 0)
        self._running: Generation | None = None
        self.stats = RolloutStats()
        self.unfinished: dict[int, Unfinished] = {}

    @property
    def sequences(self) -> Sequence[RunningSequence]:
        """The sequences that run now, ended ones included; empty between calls."""
        running = self._running  # The watchdog reads this from another thread.
        return () if running is None else running.scheduler.sequences

    @property
    def pages_in_use(self) -> int:
        """The number of pages that sequences hold; 0 between calls."""
        return 0 if self._running is None else self._running.scheduler.allocator.num_used

    def use_drafts(self, speculation: Speculation) -> None:
        """Verify the drafts of a `Speculation` with max_batch_size slots, from the next call on."""
        self._pool.speculation = speculation

    def take_speculation(self) -> SpeculationStats | None:
        """Return the worth of all drafts since the last call of this, None without."""
        drafts = self._pool.speculation
        return None if drafts is None else drafts.take()

    def free_cache(self) -> None:
        """Free the memory of the KV pages.

        On a GPU the next call continues with the same pages and captured graphs if they fit again;
        otherwise it makes a new cache.
        """
        assert self._running is None, "the cache is in use"
        self._pool.give_back()

    def generate(
        self,
        prompts: Sequence[Sequence[int] | str | Prompt | PromptInputs],
        params: SamplingParams,
        progress: ProgressCallback | None = None,
        system_prompt: str | None = None,
        options: GenerateOptions | None = None,
    ) -> list[Completion]:
        """Draw params.n completions of each prompt.

        When the call raises, KeyboardInterrupt included, all pages are free and the engine can be
        used again.

        Args:
            prompts: Token ids, texts, or `Prompt`s, whose messages go through the chat template; or
                prompts that are encoded already.
            params: If prompt and max_tokens exceed the context, max_tokens is reduced to what fits.
            progress: Called after every step. An exception that it raises cancels the call.
            system_prompt: A message before those of each chat prompt.

        Returns:
            Completions in the order of the prompts: those of prompt p are [p * n : (p + 1) * n],
            after those of a partial rollout that are continued.

        Raises:
            UserError: A prompt is empty, too long or outside the vocabulary, stop strings have no
                tokenizer, or the cache is too small for one sequence, before anything has run; or
                the tokenizer's chat template takes no reply of an environment.
            NonFiniteLogits: Logits have no finite softmax.
            OutOfMemoryStop: Memory ran out with one sequence at a time. Before that `sizes` are
                halved and the call starts over, with the same draws.
        """
        chosen = options or GenerateOptions()
        # Everything that a user may have got wrong is checked before anything runs.
        limit = self.max_model_len
        encoded = encode_prompts(self.policy, prompts, limit, system_prompt)

        def attempt() -> list[Completion]:
            started = time.perf_counter()
            groups = resumed_groups(self.policy, chosen.bounds.resume, params, limit)
            first = sum(map(len, groups))
            groups += make_groups(self.policy, encoded, params, limit, chosen, first)
            return self._run(groups, params.max_tokens, progress, chosen, started)

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
        """Run the sequences of one attempt of `generate`, which raises if memory runs out."""
        assert self._running is None, "generate is not to be called while sequences run"
        self.unfinished = {}
        if not groups:
            self.stats = RolloutStats()
            return []
        finished: dict[int, Completion] = {}
        # A refusal for lack of pages leaves the current cache as it is.
        cache = self._pool.cache_for(groups)
        try:
            with self._dropped_on_error():
                scheduler = self._open(cache, started).scheduler
                for group in groups:
                    self.add(group)
                complete = self._completer(options)
                # Step until enough prompts are complete; the others are cut off.
                while not scheduler.done and scheduler.num_complete_groups < options.bounds.enough:
                    for index in self.step():
                        finished[index] = complete(scheduler.sequences[index])
                        if options.finished is not None:
                            options.finished(index, finished[index])
                    if progress is not None:
                        progress(self._running_now.progress(max_tokens))
                # Their tokens so far go to `unfinished`, for the next call.
                for sequence in scheduler.sequences:
                    if not sequence.finished:
                        self.cancel(sequence.index)
                self.finish()
        finally:
            if options.environment is not None:
                options.environment.close()
        completions = [finished.get(s.index) or complete(s) for s in scheduler.sequences]
        self.unfinished = {
            s.index: Unfinished(s.prompt, s.key, completion)
            for s, completion in zip(scheduler.sequences, completions, strict=True)
            if s.finish_reason == "cancelled"
        }
        return completions

    def add(self, group: Sequence[RunningSequence]) -> None:
        """Let the samples of a prompt run from the next step on, next to those that run already.

        The first group sizes the cache, unless the engine was given `num_pages`. Sequences have
        their own parameters and stop rules (`inputs.make_groups`); their indices follow those of
        earlier groups. Raises UserError if the cache is too small for a sequence, or if sequences
        differ in their seed, or with speculation in temperature, top_p or top_k.
        """
        if self._running is None:
            self._open(self._pool.cache_for([group]), time.perf_counter())
        self._running_now.add(group)

    def step(self) -> list[int]:
        """Run one step; return the indices of the sequences that ended. A failure drops all."""
        with self._dropped_on_error():
            return self._running_now.step()

    def cancel(self, index: int) -> None:
        """End a sequence with the tokens that it has, and free its pages for the others."""
        self._running_now.scheduler.cancel(index)

    def finish(self) -> None:
        """Drop all sequences, free their pages, and store their counts in `stats`."""
        running = self._running_now
        self.stats = stats = running.stats()
        if stats.graphs:
            logger.info("%d graphs of decode captured in %.1f s", stats.graphs, stats.capture_s)
        # The pool keeps the cache and its graphs for the next call.
        running.scheduler.close()
        self._running = None

    @property
    def _running_now(self) -> Generation:
        assert self._running is not None, "no sequence was added"
        return self._running

    def _open(self, cache: PagedCache, started: float) -> Generation:
        """Return a new run over a cache, still without sequences."""
        # The pages are shared by all sequences; only the scheduler decides who gets them.
        allocator = PageAllocator(cache.num_pages, cache.page_size)
        now = self.sizes.now
        self._running = Generation(
            Scheduler([], allocator, now.max_batch_size, now.max_prefill_tokens),
            Prefill(self.policy, cache),
            self._pool.decode_batch(),
            self._pool.speculation,
            started,
            self._repeats,
            self._ahead,
        )
        return self._running

    @contextlib.contextmanager
    def _dropped_on_error(self) -> Iterator[None]:
        """Give up all sequences and the cache if the body raises."""
        try:
            yield
        except BaseException as error:
            running, self._running = self._running, None
            if running is not None:
                if isinstance(error, NonFiniteLogits):
                    sequence = running.scheduler.sequences[error.sequence]
                    error.token_ids = (*sequence.prompt.token_ids, *sequence.generated)
                running.scheduler.close()
            # Pages may hold NaN after a failure: the next call starts from a clean cache.
            self._pool.drop()
            raise

    def _completer(self, options: GenerateOptions) -> Callable[[RunningSequence], Completion]:
        """Return the function that makes a completion of an ended sequence."""
        running = self._running_now
        # With an environment, completions are conversations.
        if options.environment is not None and options.max_turns > 1:
            turns = MultiTurn(self.policy, options.environment, running.scheduler)
            running.multi_turn = turns
            return turns.completion
        decode = text_decoder(self.policy)

        def complete(sequence: RunningSequence) -> Completion:
            assert sequence.finish_reason is not None, f"sequence {sequence.index} is not finished"
            text = sequence.text  # Cut before a stop string.
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
