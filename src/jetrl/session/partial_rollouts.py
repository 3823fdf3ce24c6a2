"""Partial rollouts from step to step (rollout.oversample): more prompts are sampled than a step
trains on, sampling ends when enough of them are complete, and the others go on in the next step.

Every step draws prompts_per_step prompts and trains on as many complete ones, the oldest first, so
the number of prompts on their way stays what the first step made it. Where a resumed run has
another rollout.oversample, its first step draws more to fill up, or fewer. A completion that took
several steps was drawn by several policies: `Completion.versions` says which token is whose. Tokens
of the present one are exactly the trainer's, and checked; the others keep the log-probs that they
were drawn with, and are off-policy by as many steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jetrl.errors import UserError
from jetrl.models.policy import Policy
from jetrl.rewards.sampling import EncodedPrompt
from jetrl.rollout.engine import ProgressCallback, RolloutEngine
from jetrl.rollout.partial import Partial
from jetrl.settings.loading import Settings
from jetrl.types import Completion, SamplingParams, Unfinished


@dataclass(frozen=True)
class Group:
    """A prompt and its completions, those that are not there yet cut off or not begun."""

    prompt: EncodedPrompt
    members: tuple[Unfinished, ...]

    @property
    def complete(self) -> bool:
        return all(_done(member) for member in self.members)


class PartialRollouts:
    """The groups on their way between two steps.

    Attributes:
        on: whether this step's sampling goes through `sample`: rollout.oversample is set, or there
            is something left of a time when it was.

    Raises:
        UserError: settings that do not go with rollout.oversample.
    """

    def __init__(
        self,
        settings: Settings,
        policy: Policy,
        prompts: Sequence[EncodedPrompt],
        max_turns: int,
        dynamic_sampling: bool,
    ) -> None:
        self._wanted = settings.rollout.prompts_per_step
        self._share = settings.rollout.oversample
        self._by_id = {encoded.prompt.id: encoded for encoded in prompts}
        self._groups: list[Group] = []
        self._problem = _problem(policy, prompts, max_turns, dynamic_sampling)
        self.on = self._share > 0
        if self.on and self._problem:
            raise UserError(f"rollout.oversample = {self._share}: {self._problem}")

    @property
    def num_unfinished(self) -> int:
        """Completions that go on in the next step."""
        return sum(not _done(member) for group in self._groups for member in group.members)

    def start_step(self) -> int:
        """Prompts that the step draws beside its own: what the stock lacks, in the first step all
        of it. Negative where it has more than it should: so many fewer are begun."""
        self.on = self._share > 0 or bool(self._groups)
        return max(math.ceil(self._share * self._wanted) - len(self._groups), -self._wanted)

    def sample(
        self,
        engine: RolloutEngine,
        prompts: Sequence[EncodedPrompt],
        params: SamplingParams,
        version: int,
        progress: ProgressCallback,
    ) -> tuple[list[EncodedPrompt], list[Completion]]:
        """Goes on with what is there and begins `prompts`: (the step's complete prompts, their
        completions). version: of the policy, counted by steps."""
        old = self._groups
        resume = [[m for m in group.members if not _done(m)] for group in old]
        resume = [members for members in resume if members]
        enough = self._wanted - sum(group.complete for group in old)
        some = prompts[0] if prompts else old[0].prompt
        stop = tuple(dict.fromkeys((*params.stop, *some.stop)))
        completions = engine.generate(
            [list(prompt.token_ids) for prompt in prompts],
            replace(params, stop=stop),
            progress,
            partial=Partial(enough, resume, version),
        )
        cut = engine.unfinished
        place = iter(range(len(completions)))

        def next_member(prompt: EncodedPrompt) -> Unfinished:
            index = next(place)
            return cut.get(index) or Unfinished(prompt.token_ids, 0, completions[index])

        groups = [
            Group(g.prompt, tuple(m if _done(m) else next_member(g.prompt) for m in g.members))
            for g in old
        ]
        groups += [Group(p, tuple(next_member(p) for _ in range(params.n))) for p in prompts]
        chosen = [group for group in groups if group.complete][: self._wanted]
        taken = {id(group) for group in chosen}
        self._groups = [_dated(group, version) for group in groups if id(group) not in taken]
        return (
            [group.prompt for group in chosen],
            [member.completion for group in chosen for member in group.members],
        )

    def state(self) -> Any:
        """For a checkpoint, as JSON values."""
        return [
            [group.prompt.prompt.id, [_record(member) for member in group.members]]
            for group in self._groups
        ]

    def load_state(self, state: Any) -> None:
        """Goes on with what `state` gave.

        Raises:
            UserError: one of its prompts is no longer there, or settings that do not go with it.
        """
        if state and self._problem:
            raise UserError(
                "the checkpoint has unfinished completions, of a time when rollout.oversample was "
                f"set: {self._problem}"
            )
        self._groups = []
        for prompt_id, members in state:
            prompt = self._by_id.get(prompt_id)
            if prompt is None:
                raise UserError(
                    f"the checkpoint has unfinished completions of prompt {prompt_id!r}, which the "
                    "task does not have now: put its data back as it was, or start a new run "
                    "under another run.name"
                )
            self._groups.append(Group(prompt, tuple(_member(prompt, m) for m in members)))


def _problem(
    policy: Policy, prompts: Sequence[EncodedPrompt], max_turns: int, dynamic_sampling: bool
) -> str:
    """Why completions of this run cannot cross steps, "" if they can."""
    if not policy.plan.exact:
        return (
            f"the plan {policy.plan.name!r} does not know the policy that drew an old token to the "
            "bit; use precision.preset=unified or jet"
        )
    if dynamic_sampling:
        return "dynamic sampling draws prompts again; set algorithm.dynamic_sampling=false"
    if max_turns > 1:
        return "an environment's turns cannot be cut off; set task.max_turns=1"
    if len({prompt.stop for prompt in prompts}) > 1:
        return "the prompts end at different stop strings, and are not sampled in one call"
    if len({prompt.prompt.id for prompt in prompts}) < len(prompts):
        return "two prompts have the same id"
    return ""


def _done(member: Unfinished) -> bool:
    return member.completion.finish_reason != "cancelled"


def _dated(group: Group, version: int) -> Group:
    """With the versions of completions that are done and wait: in the next step they are old."""
    return replace(
        group,
        members=tuple(
            replace(m, completion=replace(c, versions=c.versions or (version,) * len(c.token_ids)))
            for m in group.members
            for c in (m.completion,)
        ),
    )


def _record(member: Unfinished) -> list[Any]:
    c = member.completion
    return [member.key, c.token_ids, c.logprobs, c.finish_reason, c.text, c.versions]


def _member(prompt: EncodedPrompt, record: Sequence[Any]) -> Unfinished:
    key, token_ids, logprobs, finish_reason, text, versions = record
    completion = Completion(
        tuple(token_ids), tuple(logprobs), finish_reason, text, versions=tuple(versions)
    )
    return Unfinished(prompt.token_ids, key, completion)
