"""The rollout engine: prompts in, completions with their log-probs out.

A call of `generate` is a `RolloutRun`. The engine adds what surrounds it: checks of the input, the
size of the cache, and that nothing is left behind when a call is cut short.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from jetrl.errors import UserError
from jetrl.kernels.decode_state import MAX_ROWS
from jetrl.memory.out_of_memory import within_memory
from jetrl.models.policy import Policy
from jetrl.rollout.generation import ProgressCallback, RolloutRun
from jetrl.rollout.inputs import encode_prompts, make_groups, resumed_groups, text_decoder
from jetrl.rollout.kv_pool import KVPool
from jetrl.rollout.multi_turn import Environment, MultiTurn
from jetrl.rollout.pages import PageAllocator
from jetrl.rollout.partial import Partial, left_over, versions_of
from jetrl.rollout.prefill import Runner
from jetrl.rollout.progress import RolloutStats
from jetrl.rollout.scheduler import Scheduler
from jetrl.rollout.sequence import NonFiniteLogits, RunningSequence
from jetrl.rollout.sizes import RolloutSizes, Sizes
from jetrl.types import Completion, Prompt, SamplingParams, Unfinished

logger = logging.getLogger(__name__)

FinishedCallback = Callable[[int, Completion], None]

# Of decode on a GPU: forwards a step, and steps launched ahead of what is known.
_GPU_REPEATS, _GPU_AHEAD = 8, 1


class RolloutEngine:
    """Samples from a policy.

    The weights are the policy's own at each call; the engine keeps none. What is drawn for a prompt
    depends on the weights, the sampling parameters and that prompt, and on none of the arguments
    below.

    Args:
        policy: what is sampled from.
        max_batch_size: sequences that run together at most.
        num_pages: pages of the KV cache. Default: what the largest batch of a call can use, within
            a quarter of what is free (CPU) or all but 4 GiB of what is free (GPU; but a
            fifth where that is less) and of what contexts of prompts take.
        page_size: tokens a page.
        max_prefill_tokens: prompt tokens a forward at most.
        max_model_len: tokens of prompt and completion at most. Default: the model's context.

    Raises:
        UserError: a size below 1, max_model_len beyond the model's context, or more pages than
            there is memory for.
    """

    def __init__(
        self,
        policy: Policy,
        max_batch_size: int = 256,
        num_pages: int | None = None,
        page_size: int = 64,
        max_prefill_tokens: int = 8192,
        max_model_len: int | None = None,
    ) -> None:
        context = policy.config.max_position_embeddings
        sizes = {
            "max_batch_size": max_batch_size,
            "num_pages": num_pages,
            "page_size": page_size,
            "max_prefill_tokens": max_prefill_tokens,
            "max_model_len": max_model_len,
        }
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, not {value}")
        if max_model_len is not None and max_model_len > context:
            raise UserError(f"max_model_len {max_model_len}: the model's context is {context}")
        on_gpu = policy.device.type == "cuda"
        if on_gpu and max_batch_size > MAX_ROWS:
            raise UserError(f"max_batch_size {max_batch_size}: a GPU decodes {MAX_ROWS} at most")
        self.policy = policy
        self.sizes = RolloutSizes(Sizes(max_batch_size, max_prefill_tokens, num_pages))
        self.page_size = page_size
        self.max_model_len = max_model_len or context
        self._kept = KVPool(policy, self.sizes, num_pages, page_size, self.max_model_len)
        self._repeats, self._ahead = (_GPU_REPEATS, _GPU_AHEAD) if on_gpu else (1, 0)
        self._scheduler: Scheduler | None = None
        self._stats = RolloutStats()
        self._unfinished: dict[int, Unfinished] = {}

    @property
    def max_batch_size(self) -> int:
        """Sequences that run together at most, as it is now."""
        return self.sizes.now.max_batch_size

    @property
    def stats(self) -> RolloutStats:
        """Counts of the last call that came to its end."""
        return self._stats

    @property
    def unfinished(self) -> dict[int, Unfinished]:
        """What the last call cut off, by its index among the completions."""
        return self._unfinished

    @property
    def sequences(self) -> Sequence[RunningSequence]:
        """Those of the call that runs now; none between calls."""
        scheduler = self._scheduler
        return () if scheduler is None else scheduler.sequences

    @property
    def pages_in_use(self) -> int:
        """Pages held by sequences right now: 0 between calls."""
        return 0 if self._scheduler is None else self._scheduler.allocator.num_used

    def free_cache(self) -> None:
        """Gives the pages' memory back. On a GPU the next call goes on with the same pages, and
        with the graphs of decode, if there is room for them again; else it makes a new cache."""
        assert self._scheduler is None, "the cache is in use"
        self._kept.give_back()

    def generate(
        self,
        prompts: Sequence[Sequence[int] | str | Prompt],
        params: SamplingParams,
        progress: ProgressCallback | None = None,
        system_prompt: str | None = None,
        environment: Environment | None = None,
        max_tokens: Sequence[int] | None = None,
        partial: Partial | None = None,
        finished: FinishedCallback | None = None,
    ) -> list[Completion]:
        """Draws params.n completions for each prompt.

        Args:
            prompts: token ids, text, or `Prompt`s (chat messages go through the chat template).
            params: the same for all prompts. Where prompt and max_tokens exceed the context,
                max_tokens is what fits.
            progress: called after every forward. An exception that it raises cancels the call.
            system_prompt: put before the messages of chat prompts.
            environment: answers when a sequence stops, for as many turns as it has; what it says is
                part of the completion, and max_tokens counts it.
            max_tokens: a limit for each completion, in their order, instead of params.max_tokens.
            partial: what to go on with, and after how many complete prompts to end; those cut off
                come with finish_reason "cancelled", and `unfinished` says how to go on with them.
            finished: called with each completion that comes to its end, and its index, while others
                are still drawn; again with the same ones where the call begins anew.

        Returns:
            Completions in the order of the prompts: those of prompt p are [p * n : (p + 1) * n].

        Raises:
            UserError: a prompt that is empty, too long or outside the vocabulary; stop strings
                without a tokenizer; a cache that one sequence does not fit into. Nothing has run.
                And a reply of the environment that cannot be written in tokens.

            NonFiniteLogits: logits without a finite softmax.
            OutOfMemoryStop: memory ran out with one sequence at a time. Before that, `sizes` are
                halved and the call begins anew, with the same draws.

        When it raises, KeyboardInterrupt included, all pages are free and the engine can be used
        again.
        """
        if partial is not None and (environment is not None or max_tokens is not None):
            raise UserError("a partial rollout takes neither an environment nor limits of its own")
        arguments = (prompts, params, progress, system_prompt, environment, max_tokens, partial)
        return within_memory(
            lambda: self._generate(*arguments, finished),
            lambda problem: self.sizes.halve(self._kept.pages, self._kept.needed, problem),
        )

    def _generate(
        self,
        prompts: Sequence[Sequence[int] | str | Prompt],
        params: SamplingParams,
        progress: ProgressCallback | None,
        system_prompt: str | None,
        environment: Environment | None,
        max_tokens: Sequence[int] | None,
        partial: Partial | None,
        finished: FinishedCallback | None,
    ) -> list[Completion]:
        """`generate`, in the memory that there is."""
        assert self._scheduler is None, "generate is not to be called while it runs"
        started = time.perf_counter()
        encoded = encode_prompts(self.policy, prompts, self.max_model_len, system_prompt)
        max_turns = 1 if environment is None else environment.max_turns
        first = 0 if partial is None else partial.num_resumed
        groups = make_groups(
            self.policy, encoded, params, self.max_model_len, max_turns, max_tokens, first
        )
        if partial is not None:
            groups[:0] = resumed_groups(self.policy, partial.resume, params, self.max_model_len)
        self._unfinished = {}
        if not groups:
            self._stats = RolloutStats()
            return []
        cache = self._kept.cache_for(groups)
        allocator = PageAllocator(cache.num_pages, cache.page_size)
        max_prefill = self.sizes.now.max_prefill_tokens
        scheduler = Scheduler(groups, allocator, self.max_batch_size, max_prefill)
        dialogues = None
        if environment is not None and max_turns > 1:
            dialogues = MultiTurn(self.policy, environment, scheduler)
        version = 0 if partial is None else partial.version
        complete = self._completer(version) if dialogues is None else dialogues.completion
        done: dict[int, Completion] = {}

        def ended(index: int) -> None:
            done[index] = complete(scheduler.sequences[index])
            if finished is not None:
                finished(index, done[index])

        try:
            self._scheduler = scheduler
            decode = self._kept.decode_batch()
            decode.begin(params, groups[0][0].rules.token_ids)
            run = RolloutRun(
                scheduler,
                Runner(self.policy, cache),
                decode,
                params,
                dialogues,
                progress,
                ended,
                self._repeats,
                self._ahead,
                len(groups) if partial is None else partial.enough,
            )
            self._stats = stats = run.run(started)
            if stats.graphs:
                logger.info("%d graphs of decode captured in %.1f s", stats.graphs, stats.capture_s)
        except BaseException as error:
            if isinstance(error, NonFiniteLogits):
                sequence = scheduler.sequences[error.sequence]
                error.token_ids = (*sequence.prompt, *sequence.generated)
            scheduler.cancel()
            # What failed may have left NaN in its pages: the next call starts from a clean cache.
            self._kept.drop()
            raise
        finally:
            self._scheduler = None
            if environment is not None:
                environment.close()
        completions = [done.get(s.index) or complete(s) for s in scheduler.sequences]
        self._unfinished = left_over(scheduler.sequences, completions)
        scheduler.cancel()
        return completions

    def _completer(self, version: int) -> Callable[[RunningSequence], Completion]:
        """What makes a sequence a completion. version: of the policy."""
        decode = text_decoder(self.policy)

        def complete(sequence: RunningSequence) -> Completion:
            text = sequence.text
            if text is None:
                text = decode(sequence.generated) if decode is not None else ""
            return Completion(
                token_ids=tuple(sequence.generated),
                logprobs=tuple(sequence.logprobs),
                finish_reason=sequence.finish_reason or "cancelled",
                text=text,
                versions=versions_of(sequence, version),
            )

        return complete
