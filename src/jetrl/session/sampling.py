"""Sampling and scoring of prompts, for training and evaluation.

`encode_prompts` tokenizes prompts, `sample_prompts` samples completions, and `Scoring` scores each
completion as soon as it is finished, while others are still being sampled.

Each rank samples and scores whole groups; all samples are then gathered. Random keys are derived
for the full list of prompts, so tokens do not depend on the number of ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from array import array
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
from jetrl.tasks.endpoint import Endpoint
from jetrl.tasks.registry import first_of_each
from jetrl.tasks.thoughts import begins_in_thought
from jetrl.types import Completion, Prompt, PromptInputs, Sample, SamplingParams, Score, Turn


class TaskEnvironment:
    """Environment for one `generate` call that answers turns with a task's `step`."""

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
    """Return the maximum turns per completion: task.max_turns, or else the task's limit."""
    if setting is not None and setting > 1 and task.max_turns == 1:
        raise UserError(
            f"task.max_turns = {setting}, but task {task.label} has no turns: unset it, or give "
            "the task a `step` and a `max_turns` above 1"
        )
    return task.max_turns if setting is None else setting


@dataclass(frozen=True)
class EncodedPrompt:
    """A task's prompt and its encoded inputs."""

    prompt: Prompt
    inputs: PromptInputs
    stop: tuple[str, ...] = ()


def encode_prompts(
    policy: Model, task: Task, split: str, limit: int = 0, system_prompt: str | None = None
) -> list[EncodedPrompt]:
    """Return the tokenized prompts of a split, in order; `limit` is per mixed task (0: all)."""
    where = f"task {task.label}, split {split}"
    encoded = []
    for prompt in first_of_each(read_prompts(task, split), limit):
        if isinstance(task, Endpoint):
            inputs = _name_of(prompt, policy.config.vocab_size)
        else:
            inputs = encode_prompt(
                policy.tokenizer, prompt, system_prompt, policy.plain_text, policy.tower
            )
        stops = to_stops(task.stops(prompt), f"{where}: stop of prompt {prompt.id!r}")
        in_thought = begins_in_thought(prompt, _end_of(policy, inputs.token_ids))
        prompt = dataclasses.replace(prompt, in_thought=in_thought)
        encoded.append(EncodedPrompt(prompt, inputs, stops))
    if not encoded:
        raise UserError(f"{where} has no prompts")
    context = policy.config.max_position_embeddings
    if too_long := [e for e in encoded if len(e.inputs) >= context]:
        first = too_long[0]
        raise UserError(
            f"{where}: prompt {first.prompt.id!r} has {len(first.inputs)} tokens, no room for "
            f"an answer in the context of {context}; shorten or drop {len(too_long)} prompts"
        )
    return encoded


def _name_of(prompt: Prompt, vocab_size: int) -> PromptInputs:
    """Return token ids that only name a row: its harness writes the prompts."""
    content = hashlib.blake2b(f"{prompt.id} {prompt.text}".encode(), digest_size=8).digest()
    return PromptInputs(tuple(byte % vocab_size for byte in content))


def _end_of(policy: Model, token_ids: Sequence[int]) -> str:
    """Return the last characters of a prompt, with special tokens by name."""
    assert policy.tokenizer is not None  # used by encode_prompt
    return str(policy.tokenizer.decode(list(token_ids[-32:])))


class Scoring:
    """Scores of one round of completions; each starts as soon as its completion is finished.

    `prompts` are those of all ranks, in order; `own` lists the ascending indices that this rank
    samples and scores.
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
        # Prompts with the same stop strings are sampled together, split across ranks.
        together = [i for members in _by_stop(prompts).values() for i in members]
        self.own = sorted(world().share(together))
        self._begun: dict[int, tuple[int, Completion]] = {}  # index: scorer's ticket, completion

    def finished(self, index: int, completion: Completion) -> None:
        """Start scoring a finished completion."""
        if self.scorer.has_workers and not completion.failure:
            self._begin(index, completion)

    def samples(self, completions: Sequence[Completion]) -> list[Sample]:
        """Return the samples of all ranks, grouped by prompt; waits for all scores."""
        return self.gathered(self.own_samples(completions))

    def own_samples(self, completions: Sequence[Completion]) -> list[Sample]:
        """Return this rank's completions as scored samples; waits for all scores.

        If the environment failed, the sample has that failure and reward 0.
        """
        # Functions that compare completions get whole groups at once.
        groups = [self.own[i // self.each] for i in range(len(completions))]
        answers = [
            Answer(self.prompts[group].prompt, c.turns or c.text, c.token_ids)
            for group, c in zip(groups, completions, strict=True)
        ]
        calls = self.scorer.begin_calls(answers)
        # Most scores started during sampling; start the rest now.
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
        self.drop()  # scores of completions that were sampled again since
        return [
            self._sample(group, completion, score)
            for group, completion, score in zip(groups, completions, scored, strict=True)
        ]

    def gathered(self, own_samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples of all ranks, grouped by prompt, given each rank's own."""
        if world().size == 1:
            return list(own_samples)
        # Send tokens as bytes, not as pickled ints.
        packed = [_packed(sample) for sample in own_samples]
        gathered = itertools.chain(*world().gather("samples of the step", packed))
        return [
            self._sample(group, _unpacked(completion, token_ids, logprobs), score)
            # Stable sort: samples of a prompt stay in order.
            for group, completion, token_ids, logprobs, score in sorted(gathered, key=itemgetter(0))
        ]

    def _sample(self, group: int, completion: Completion, scored: ScoredText) -> Sample:
        """Return the sample for a completion of prompt `group`."""
        return Sample(
            prompt=self.prompts[group].prompt,
            group=group,
            inputs=self.prompts[group].inputs,
            completion=completion,
            score=scored.score,
            failure=scored.failure,
            readable=scored.readable,
            extra=scored.extra,
        )

    def drop(self) -> None:
        """Cancel all pending scores."""
        self.scorer.drop()
        self._begun.clear()

    def _begin(self, index: int, completion: Completion) -> int:
        """Start scoring a completion; return its ticket."""
        ticket, known = self._begun.get(index, (0, None))
        if known != completion:
            prompt = self.prompts[self.own[index // self.each]].prompt
            ticket = self.scorer.begin(prompt, completion.turns or completion.text)
            self._begun[index] = ticket, completion
        return ticket


def groups_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return the samples of each group, in order."""
    return [list(group) for _, group in itertools.groupby(samples, key=lambda s: s.group)]


def numbered(groups: Sequence[Sequence[Sample]]) -> list[Sample]:
    """Return the samples of all groups, which are numbered from 0."""
    return [dataclasses.replace(s, group=i) for i, group in enumerate(groups) for s in group]


_PackedSample = tuple[int, Completion, bytes, bytes, ScoredText]
"""Group number, completion without tokens, packed tokens and log-probs, and score."""


def _packed(sample: Sample) -> _PackedSample:
    """Return the part of a sample that other ranks do not know, in packed form."""
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
    """Return prompt indices grouped by stop strings."""
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
    """Return `params.n` completions for each prompt sampled on this rank, in order.

    A completion ends at `params.stop` and its prompt's own stop strings, and is passed to
    `scoring`. If `max_turns` exceeds 1, the task's `step` answers each turn.
    """
    assert params.n == scoring.each, f"{params.n} completions a prompt, {scoring.each} to be scored"
    prompts = scoring.prompts
    place = {index: i for i, index in enumerate(scoring.own)}
    completions: dict[int, Completion] = {}
    indices: list[int] = []  # indices into `completions` of this call

    def attend(state: Progress) -> None:
        scoring.scorer.attend()
        if progress is not None:
            progress(state)

    def finished(index: int, completion: Completion) -> None:
        scoring.finished(indices[index], completion)

    try:
        for stop, members in _by_stop(prompts).items():
            # Keys are derived for the full list, regardless of which rank samples a prompt.
            keys = sequence_keys([prompts[i].inputs for i in members], params.n)
            own = [(i, key) for i, key in zip(members, keys, strict=True) if i in place]
            if not own:
                continue
            stops = tuple(dict.fromkeys((*params.stop, *stop)))
            # Positions of this call's completions among this rank's.
            indices = [place[i] * params.n + k for i, _ in own for k in range(params.n)]
            # Scoring processes answer turns.
            task_prompts = [prompts[i].prompt for i, _ in own]
            environment = TaskEnvironment(scoring.scorer, task_prompts, params.n, max_turns)
            answers, own_keys = environment if max_turns > 1 else None, [key for _, key in own]
            options = GenerateOptions(environment=answers, keys=own_keys, finished=finished)
            own_inputs = [prompts[i].inputs for i, _ in own]
            own_params = dataclasses.replace(params, stop=stops)
            drawn = engine.generate(own_inputs, own_params, attend, options=options)
            completions |= zip(indices, drawn, strict=True)
    except BaseException:  # nobody will collect these scores
        scoring.drop()
        raise
    return [completions[i] for i in range(len(completions))]
