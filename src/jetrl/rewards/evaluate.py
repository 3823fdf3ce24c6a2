"""Sampling and scoring prompts, and what evaluation makes of it: mean@n and pass@k."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jetrl.errors import UserError
from jetrl.models.chat import encode_prompt
from jetrl.models.model import Model
from jetrl.models.policy import Policy
from jetrl.rewards.environment import TaskEnvironment, turns_of
from jetrl.rollout.engine import ProgressCallback, RolloutEngine
from jetrl.rollout.progress import Progress
from jetrl.tasks import ScoredText, Scorer, Task, read_prompts
from jetrl.types import Completion, Prompt, Sample, SamplingParams, Score


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt with the token ids that the model reads, and the task's strings that end an
    answer."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evaluation:
    """What a split was worth to a policy.

    mean: mean reward over all completions (mean@n). pass_at_k: {k: share of prompts solved by one
    of k completions}, k = 1, 2, 4, ... and n, by the unbiased estimator of Chen et al. (arXiv
    2107.03374). response_length: tokens. clip_ratio: share cut off at max_tokens. failures:
    completions that the scorer could not judge. by_task: of each task where several are mixed, by
    `Prompt.task`; {} else."""

    mean: float
    pass_at_k: dict[int, float]
    response_length: float
    clip_ratio: float
    failures: int
    samples: tuple[Sample, ...]
    by_task: Mapping[str, Evaluation] = field(default_factory=dict)


def encode_prompts(
    policy: Model, task: Task, split: str, limit: int = 0, system_prompt: str | None = None
) -> list[EncodedPrompt]:
    """The prompts of a task's split as token ids, each with room for an answer in the model's
    context. limit: take this many from the start (of each task, where several are mixed); 0: all.

    Raises:
        UserError: no prompts; a prompt that fills the context, by id, and how many do.
    """
    where = f"task {task.label}, split {split}"
    seen: Counter[str] = Counter()
    encoded = []
    for prompt in read_prompts(task, split):
        seen[prompt.task] += 1
        if limit and seen[prompt.task] > limit:
            continue
        token_ids = encode_prompt(policy.tokenizer, prompt, system_prompt)
        encoded.append(EncodedPrompt(prompt, tuple(token_ids), tuple(task.stops(prompt))))
    if not encoded:
        raise UserError(f"{where} has no prompts")
    context = policy.config.max_position_embeddings
    long = [e for e in encoded if len(e.token_ids) >= context]
    if long:
        raise UserError(
            f"{where}: prompt {long[0].prompt.id!r} has {len(long[0].token_ids)} tokens, which "
            f"leaves no room for an answer in the model's context of {context}; {len(long)} of "
            f"{len(encoded)} prompts are too long: shorten or drop them"
        )
    return encoded


class Scoring:
    """The scores of completions, each begun when it is finished, while others are still drawn.

    scorer: in whose processes; one without scores when it is asked for the samples. prompts: of the
    completions, `each` of every one, in order. goes_on: in a step that has scored others.
    """

    def __init__(
        self, scorer: Scorer, prompts: Sequence[EncodedPrompt], each: int, goes_on: bool = False
    ) -> None:
        if not goes_on:
            scorer.begin_step()
        self.scorer, self.prompts, self.each = scorer, prompts, each
        self._begun: dict[int, tuple[int, Completion]] = {}  # tickets, and what they are of

    def finished(self, index: int, completion: Completion) -> None:
        """A completion has come to its end; `samples` is given the same one later."""
        if self.scorer.has_workers and not completion.failure:
            self._begin(index, completion)

    def attend(self) -> None:
        """Keeps the scorer's processes busy; does not wait."""
        self.scorer.attend()

    def samples(self, completions: Sequence[Completion]) -> list[Sample]:
        """The completions with their scores, grouped by prompt, when all are there. What an
        environment broke down at is not scored: its failure is the sample's, and the reward 0."""
        judged = [i for i, completion in enumerate(completions) if not completion.failure]
        tickets = [self._begin(i, completions[i]) for i in judged]
        verdicts = dict(zip(judged, self.scorer.finish(tickets), strict=True))
        self.drop()  # what was begun of completions that were drawn anew
        for i, completion in enumerate(completions):
            if completion.failure:
                verdicts[i] = ScoredText(Score(0.0), completion.failure)
        return [
            Sample(
                prompt=self.prompts[i // self.each].prompt,
                group=i // self.each,
                prompt_token_ids=self.prompts[i // self.each].token_ids,
                completion=completion,
                score=verdicts[i].score,
                failure=verdicts[i].failure,
            )
            for i, completion in enumerate(completions)
        ]

    def drop(self) -> None:
        """Forgets what was begun."""
        self.scorer.drop()
        self._begun.clear()

    def _begin(self, index: int, completion: Completion) -> int:
        """The ticket of a completion; the one it has if it was begun as it is now. (Where memory
        ran out the sampling began anew, with other turns if its environment is not deterministic.)
        """
        ticket, known = self._begun.get(index, (0, None))
        if known != completion:
            prompt = self.prompts[index // self.each].prompt
            ticket = self.scorer.begin(prompt, completion.turns or completion.text)
            self._begun[index] = ticket, completion
        return ticket


def sample_prompts(
    engine: RolloutEngine,
    scoring: Scoring,
    params: SamplingParams,
    max_turns: int = 1,
    progress: ProgressCallback | None = None,
) -> list[Completion]:
    """params.n completions for each prompt of `scoring`, in order, which begins with those that are
    finished. A completion ends at params.stop and at the prompt's own stop strings; prompts that
    share these are sampled together. With max_turns above 1 it goes on from there for as long as
    the task's `step` says so."""
    assert params.n == scoring.each, f"{params.n} completions a prompt, {scoring.each} to be scored"
    prompts = scoring.prompts
    found: dict[int, Completion] = {}
    places: list[int] = []

    def attend(state: Progress) -> None:
        scoring.attend()
        if progress is not None:
            progress(state)

    def finished(index: int, completion: Completion) -> None:
        scoring.finished(places[index], completion)

    try:
        for stop in dict.fromkeys(prompt.stop for prompt in prompts):
            members = [i for i, prompt in enumerate(prompts) if prompt.stop == stop]
            both = dataclasses.replace(params, stop=tuple(dict.fromkeys((*params.stop, *stop))))
            places = [member * params.n + k for member in members for k in range(params.n)]
            environment = None
            if max_turns > 1:
                asked = [prompts[i].prompt for i in members]
                environment = TaskEnvironment(scoring.scorer, asked, params.n, max_turns)
            drawn = engine.generate(
                [list(prompts[i].token_ids) for i in members],
                both,
                attend,
                environment=environment,
                finished=finished,
            )
            found |= zip(places, drawn, strict=True)
    except BaseException:  # what was begun is of completions that nobody will have
        scoring.drop()
        raise
    return [found[i] for i in range(len(found))]


def evaluate(
    engine: RolloutEngine,
    scorer: Scorer,
    prompts: Sequence[EncodedPrompt],
    params: SamplingParams,
    threshold: float = 1.0,
    max_turns: int = 1,
    progress: ProgressCallback | None = None,
) -> Evaluation:
    """Sample and score params.n completions of each prompt; a reward >= threshold is a solution."""
    scoring = Scoring(scorer, prompts, params.n)
    samples = scoring.samples(sample_prompts(engine, scoring, params, max_turns, progress))
    tasks = dict.fromkeys(sample.prompt.task for sample in samples)
    parts = {
        task: _judge([s for s in samples if s.prompt.task == task], params.n, threshold)
        for task in tasks
    }
    whole = _judge(samples, params.n, threshold)
    return dataclasses.replace(whole, by_task=parts) if set(parts) != {""} else whole


def _judge(samples: Sequence[Sample], n: int, threshold: float) -> Evaluation:
    """What the samples, n of each prompt in turn, say."""
    rewards = np.array([s.score.reward for s in samples]).reshape(-1, n)
    solved = (rewards >= threshold).sum(1)
    ks = sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})
    return Evaluation(
        mean=float(rewards.mean()),
        pass_at_k={k: _pass_at_k(solved, n, k) for k in ks},
        response_length=float(np.mean([len(s.completion.token_ids) for s in samples])),
        clip_ratio=float(np.mean([s.completion.finish_reason == "length" for s in samples])),
        failures=sum(bool(s.failure) for s in samples),
        samples=tuple(samples),
    )


def _pass_at_k(solved: np.ndarray, n: int, k: int) -> float:
    return float(np.mean([1.0 - math.comb(n - int(c), k) / math.comb(n, k) for c in solved]))


def evaluate_model(
    policy: Policy,
    task: Task,
    scorer: Scorer,
    params: SamplingParams,
    split: str = "test",
    num_prompts: int = 0,
    threshold: float = 1.0,
    system_prompt: str | None = None,
    max_turns: int | None = None,
    progress: ProgressCallback | None = None,
) -> Evaluation:
    """A policy on a task's split: its first num_prompts prompts, 0 for all. max_turns: default the
    task's own."""
    encoded = encode_prompts(policy, task, split, num_prompts, system_prompt)
    turns = turns_of(task, max_turns)
    return evaluate(RolloutEngine(policy), scorer, encoded, params, threshold, turns, progress)
