"""Sampling and scoring of prompts, for training and for evaluation.

Prompts become token ids (`encode_prompts`), then completions (`sample_prompts`), each of which is
scored as soon as it is finished, while others are drawn (`Scoring`).

Each rank samples and scores whole groups; then every rank has all samples. The random keys of
sequences are made for the whole list of prompts, so no token depends on the number of ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from jetrl.distributed.world import world
from jetrl.errors import UserError
from jetrl.models.chat import encode_prompt
from jetrl.models.model import Model
from jetrl.rollout.engine import ProgressCallback, RolloutEngine
from jetrl.rollout.options import EnvironmentReply, GenerateOptions, Progress
from jetrl.rollout.sequence import sequence_keys
from jetrl.tasks import ScoredText, Scorer, Task, read_prompts
from jetrl.tasks.base import Answer, to_stops
from jetrl.tasks.thoughts import begins_in_thought
from jetrl.types import Completion, Prompt, Sample, SamplingParams, Score, Turn


class TaskEnvironment:
    """The environment that answers turns of one `generate` with a task's `step`."""

    def __init__(self, scorer: Scorer, prompts: Sequence[Prompt], n: int, max_turns: int) -> None:
        self.max_turns = max_turns
        self._scorer, self._prompts, self._n = scorer, prompts, n
        self._sequences: dict[int, int] = {}  # By the ticket of an unanswered turn.

    def ask(self, sequence: int, turns: Sequence[Turn], completion: str) -> None:
        ticket = self._scorer.ask(self._prompts[sequence // self._n], turns, completion)
        self._sequences[ticket] = sequence

    def answers(self, wait: bool) -> list[EnvironmentReply]:
        given = self._scorer.answers(wait)
        return [EnvironmentReply(self._sequences.pop(a.ticket), a.reply, a.failure) for a in given]

    def close(self) -> None:
        self._sequences.clear()
        self._scorer.drop_turns()


def turns_of(task: Task, setting: int | None) -> int:
    """Return the limit of a completion's turns: task.max_turns, or else the task's own."""
    if setting is not None and setting > 1 and task.max_turns == 1:
        raise UserError(
            f"task.max_turns = {setting}, but task {task.label} has no turns: unset it, or give "
            "the task a `step` and a `max_turns` above 1"
        )
    return task.max_turns if setting is None else setting


@dataclass(frozen=True)
class EncodedPrompt:
    """A task's prompt as the model reads it."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    stop: tuple[str, ...] = ()


def encode_prompts(
    policy: Model, task: Task, split: str, limit: int = 0, system_prompt: str | None = None
) -> list[EncodedPrompt]:
    """Return the prompts of a split as token ids, in order; `limit` of each mixed task (0: all)."""
    where = f"task {task.label}, split {split}"
    # A mixture gives each of its tasks the same limit.
    num_seen: Counter[str] = Counter()
    encoded = []
    for prompt in read_prompts(task, split):
        num_seen[prompt.task] += 1
        if limit and num_seen[prompt.task] > limit:
            continue
        token_ids = encode_prompt(policy.tokenizer, prompt, system_prompt, policy.plain_text)
        stops = to_stops(task.stops(prompt), f"{where}: stop of prompt {prompt.id!r}")
        in_thought = begins_in_thought(prompt, _end_of(policy, token_ids))
        prompt = dataclasses.replace(prompt, in_thought=in_thought)
        encoded.append(EncodedPrompt(prompt, tuple(token_ids), stops))
    if not encoded:
        raise UserError(f"{where} has no prompts")
    context = policy.config.max_position_embeddings
    if too_long := [e for e in encoded if len(e.token_ids) >= context]:
        first = too_long[0]
        raise UserError(
            f"{where}: prompt {first.prompt.id!r} has {len(first.token_ids)} tokens, no room for "
            f"an answer in the context of {context}; shorten or drop {len(too_long)} prompts"
        )
    return encoded


def _end_of(policy: Model, token_ids: Sequence[int]) -> str:
    """Return the last characters of a prompt, with the names of special tokens."""
    assert policy.tokenizer is not None  # encode_prompt has used it
    return str(policy.tokenizer.decode(list(token_ids[-32:])))


class Scoring:
    """The scores of one round of completions, each begun as soon as the completion is finished.

    `prompts` are those of all ranks, in order; `own` the indices of those that this rank samples
    and scores, ascending.
    """

    def __init__(
        self,
        scorer: Scorer,
        prompts: Sequence[EncodedPrompt],
        each: int,
        continues_step: bool = False,
    ) -> None:
        if not continues_step:
            scorer.begin_step()
        self.scorer, self.prompts, self.each = scorer, prompts, each
        # Prompts of the same stop strings are sampled together, and each rank has a share of them.
        together = [i for members in _by_stop(prompts).values() for i in members]
        self.own = sorted(world().share(together))
        self._begun: dict[int, tuple[int, Completion]] = {}  # index: scorer's ticket, completion

    def finished(self, index: int, completion: Completion) -> None:
        """Begin to score a completion that has come to its end."""
        if self.scorer.has_workers and not completion.failure:
            self._begin(index, completion)

    def samples(self, completions: Sequence[Completion]) -> list[Sample]:
        """Return the samples of all ranks, grouped by prompt; waits for the last score."""
        return self.gathered(self.own_samples(completions))

    def own_samples(self, completions: Sequence[Completion]) -> list[Sample]:
        """Return this rank's completions as scored samples, once the last score has come.

        If the environment broke down, the sample has its failure and reward 0.
        """
        # Functions that compare completions get whole groups, and so all that there are.
        groups = [self.own[i // self.each] for i in range(len(completions))]
        answers = [
            Answer(self.prompts[group].prompt, c.turns or c.text, c.token_ids)
            for group, c in zip(groups, completions, strict=True)
        ]
        calls = self.scorer.begin_calls(answers)
        # Most were begun while others were drawn; the rest begin now.
        scorable = [i for i, completion in enumerate(completions) if not completion.failure]
        tickets = [self._begin(i, completions[i]) for i in scorable]
        scores = dict(zip(scorable, self.scorer.finish(tickets), strict=True))
        scored = self.scorer.finish_calls(
            calls,
            [
                scores.get(i) or ScoredText(Score(0.0), completion.failure)
                for i, completion in enumerate(completions)
            ],
        )
        self.drop()  # scores that were begun of completions that were drawn again since
        return [
            self._sample(group, completion, score)
            for group, completion, score in zip(groups, completions, scored, strict=True)
        ]

    def gathered(self, own_samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples of all ranks, grouped by prompt, from those of each rank."""
        if world().size == 1:
            return list(own_samples)
        # Tokens travel as bytes, not as pickled numbers.
        packed = [_packed(sample) for sample in own_samples]
        gathered = itertools.chain(*world().gather("samples of the step", packed))
        return [
            self._sample(group, _unpacked(completion, token_ids, logprobs), score)
            # Sorting is stable: the samples of a prompt stay in order.
            for group, completion, token_ids, logprobs, score in sorted(gathered, key=itemgetter(0))
        ]

    def _sample(self, group: int, completion: Completion, scored: ScoredText) -> Sample:
        """Return the sample of a completion of the prompt number `group`."""
        return Sample(
            prompt=self.prompts[group].prompt,
            group=group,
            prompt_token_ids=self.prompts[group].token_ids,
            completion=completion,
            score=scored.score,
            failure=scored.failure,
            readable=scored.readable,
            extra=scored.extra,
        )

    def drop(self) -> None:
        """Forget every score that was begun."""
        self.scorer.drop()
        self._begun.clear()

    def _begin(self, index: int, completion: Completion) -> int:
        """Return the scorer's ticket of a completion."""
        ticket, known = self._begun.get(index, (0, None))
        if known != completion:
            prompt = self.prompts[self.own[index // self.each]].prompt
            ticket = self.scorer.begin(prompt, completion.turns or completion.text)
            self._begun[index] = ticket, completion
        return ticket


_PackedSample = tuple[int, Completion, bytes, bytes, ScoredText]
"""A group's number, a completion without tokens, its tokens and log-probs, and its score."""


def _packed(sample: Sample) -> _PackedSample:
    """Return what other ranks do not know of a sample, its numbers."""
    completion = sample.completion
    return (
        sample.group,
        dataclasses.replace(completion, token_ids=(), logprobs=()),
        array("i", completion.token_ids).tobytes(),
        array("f", completion.logprobs).tobytes(),
        ScoredText(sample.score, sample.failure, sample.readable, sample.extra),
    )


def _unpacked(completion: Completion, token_ids: bytes, logprobs: bytes) -> Completion:
    return dataclasses.replace(
        completion, token_ids=tuple(array("i", token_ids)), logprobs=tuple(array("f", logprobs))
    )


def _by_stop(prompts: Sequence[EncodedPrompt]) -> dict[tuple[str, ...], list[int]]:
    """Return the indices of the prompts that end at the same strings, by these strings."""
    members: dict[tuple[str, ...], list[int]] = {}
    for index, prompt in enumerate(prompts):
        members.setdefault(prompt.stop, []).append(index)
    return members


def sample_prompts(
    engine: RolloutEngine,
    scoring: Scoring,
    params: SamplingParams,
    max_turns: int = 1,
    progress: ProgressCallback | None = None,
) -> list[Completion]:
    """Return `params.n` completions of each prompt that this rank samples, in order.

    A completion ends at `params.stop` and at its prompt's own stop strings, and `scoring` is told.
    If `max_turns` is above 1, the task's `step` answers each turn.
    """
    assert params.n == scoring.each, f"{params.n} completions a prompt, {scoring.each} to be scored"
    prompts = scoring.prompts
    place = {index: i for i, index in enumerate(scoring.own)}
    completions: dict[int, Completion] = {}
    indices: list[int] = []  # of the completions that are drawn together, in `completions`

    def attend(state: Progress) -> None:
        scoring.scorer.attend()
        if progress is not None:
            progress(state)

    def finished(index: int, completion: Completion) -> None:
        scoring.finished(indices[index], completion)

    try:
        for stop, members in _by_stop(prompts).items():
            # The keys are those of the whole list, whichever ranks its prompts are sampled by.
            keys = sequence_keys([prompts[i].token_ids for i in members], params.n)
            own = [(i, key) for i, key in zip(members, keys, strict=True) if i in place]
            if not own:
                continue
            stops = tuple(dict.fromkeys((*params.stop, *stop)))
            # Where the completions of this call belong among all of this rank.
            indices = [place[i] * params.n + k for i, _ in own for k in range(params.n)]
            # Turns are answered in the scoring processes.
            task_prompts = [prompts[i].prompt for i, _ in own]
            environment = TaskEnvironment(scoring.scorer, task_prompts, params.n, max_turns)
            answers, own_keys = environment if max_turns > 1 else None, [key for _, key in own]
            options = GenerateOptions(environment=answers, keys=own_keys, finished=finished)
            own_tokens = [list(prompts[i].token_ids) for i, _ in own]
            own_params = dataclasses.replace(params, stop=stops)
            drawn = engine.generate(own_tokens, own_params, attend, options=options)
            completions |= zip(indices, drawn, strict=True)
    except BaseException:  # nobody will have the completions whose scores were begun
        scoring.drop()
        raise
    return [completions[i] for i in range(len(completions))]
