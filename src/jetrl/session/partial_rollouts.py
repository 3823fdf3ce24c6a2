"""Partial rollouts (rollout.oversample): completions that span several steps.

A step samples more prompts than it trains on until enough are complete, and trains on the oldest
complete ones; the others continue in the next step. Their number is set by the first step. If a
resumed run changes rollout.oversample, its first step draws more or fewer prompts.

`Completion.versions` records the policy version of each token. Tokens of the current policy are
compared with the trainer bit for bit; older tokens keep the log-probs they were sampled with.

Each rank samples until its own share is complete, and continues its own waiting groups. So
truncation points do not depend on speed, and a run is reproducible on the same number of ranks.
Every rank knows all waiting groups; a resumed run redistributes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from jetrl.distributed.world import world
from jetrl.errors import UserError
from jetrl.models.policy import Policy
from jetrl.rollout.engine import ProgressCallback, RolloutEngine
from jetrl.rollout.options import GenerateOptions, Partial
from jetrl.rollout.sequence import sequence_keys
from jetrl.session.sampling import EncodedPrompt
from jetrl.settings.loading import Settings
from jetrl.types import Completion, SamplingParams, Unfinished

Item = TypeVar("Item")


@dataclass(frozen=True)
class Group:
    """A prompt and its completions, which may be unfinished or not begun."""

    prompt: EncodedPrompt
    members: tuple[Unfinished, ...]

    @property
    def complete(self) -> bool:
        """True if every completion is finished."""
        return all(_is_complete(member) for member in self.members)

    def dated(self, version: int) -> Group:
        """Return this group with policy versions in its complete completions."""

        def of_version(c: Completion) -> Completion:
            return replace(c, versions=c.versions or (version,) * len(c.token_ids))

        members = [replace(m, completion=of_version(m.completion)) for m in self.members]
        return replace(self, members=tuple(members))

    def state(self) -> Any:
        """Return this group as JSON values."""
        members = []
        for member in self.members:
            c = member.completion
            record = c.token_ids, c.logprobs, c.finish_reason, c.text, c.versions
            members.append([member.key, *record])
        return [self.prompt.prompt.id, members]


class PartialRollouts:
    """Groups that wait to be continued in the next step; the plan must be exact.

    `on`: rollout.oversample is set, or groups from an earlier setting still wait.
    """

    def __init__(
        self,
        settings: Settings,
        policy: Policy,
        prompts: Sequence[EncodedPrompt],
        max_turns: int,
        dynamic_sampling: bool,
        ranks: int | None = None,
    ) -> None:
        self._prompts_per_step = settings.rollout.prompts_per_step
        self._samples_per_prompt = settings.rollout.samples_per_prompt
        self._max_tokens = settings.rollout.max_tokens
        self._share = settings.rollout.oversample
        self._by_id = {encoded.prompt.id: encoded for encoded in prompts}
        ranks = ranks or world().size
        self._waiting: list[list[Group]] = [[] for _ in range(ranks)]
        # Incompatible settings are rejected only if completions actually wait.
        self._problem = _problem(policy, prompts, max_turns, dynamic_sampling)
        self.on = self._share > 0
        if self.on and self._problem:
            raise UserError(f"rollout.oversample = {self._share}: {self._problem}")
        if self.on and self._prompts_per_step < ranks:
            raise UserError(
                f"rollout.oversample = {self._share}: rollout.prompts_per_step is below the number "
                f"of ranks, {ranks}"
            )

    @property
    def num_unfinished(self) -> int:
        """Number of completions to be continued in the next step."""
        return sum(not _is_complete(m) for own in self._waiting for g in own for m in g.members)

    def start_step(self) -> int:
        """Return how many extra prompts the step draws; negative if too many groups wait."""
        self.on = self._share > 0 or any(self._waiting)
        return sum(self._lacking()) - self._prompts_per_step

    def _lacking(self) -> list[int]:
        """Return how many groups each rank starts, so that enough wait after the step."""
        # Each rank has its share of the prompts to train on and of the waiting ones.
        trained, size = self._prompts_per_step, world().size
        totals = trained, math.ceil(self._share * trained)
        return [
            max(sum(len(range(rank, total, size)) for total in totals) - len(groups), 0)
            for rank, groups in enumerate(self._waiting)
        ]

    def _dealt(self, num_prompts: int) -> list[int]:
        """Return the indices of the step's prompts that this rank starts."""
        # Assign prompts round-robin to the ranks that still need groups.
        lacking, own, rank = self._lacking(), [], 0
        for number in range(num_prompts):
            while not lacking[rank]:
                rank = (rank + 1) % len(lacking)
            lacking[rank] -= 1
            if rank == world().rank:
                own.append(number)
            rank = (rank + 1) % len(lacking)
        return own

    def sample(
        self,
        engine: RolloutEngine,
        prompts: Sequence[EncodedPrompt],
        params: SamplingParams,
        version: int,
        progress: ProgressCallback,
    ) -> list[Group]:
        """Continue waiting groups, then new ones, until enough of this rank's are complete."""
        ranks = world()
        waiting = self._waiting[ranks.rank]
        # Continue only unfinished completions; groups keep their order.
        resume = [[m for m in group.members if not _is_complete(m)] for group in waiting]
        resume = [members for members in resume if members]
        # Stop sampling once this many groups of this rank are complete.
        quota = len(ranks.share(range(self._prompts_per_step)))
        enough = quota - sum(group.complete for group in waiting)
        # Random keys are derived for the full list, so that tokens do not depend on the number of
        # ranks.
        keys = sequence_keys([prompt.inputs for prompt in prompts], params.n)
        own = self._dealt(len(prompts))
        # All prompts share their stop strings.
        earlier = [group.prompt for of_rank in self._waiting for group in of_rank]
        any_prompt = [*prompts, *earlier][0]
        stop = tuple(dict.fromkeys((*params.stop, *any_prompt.stop)))
        partial = Partial(enough, resume, version)
        options = GenerateOptions(partial=partial, keys=[keys[number] for number in own])
        inputs = [prompts[number].inputs for number in own]
        completions = engine.generate(inputs, replace(params, stop=stop), progress, options=options)
        # Unfinished completions keep their tokens and continue in the next step.
        cut_off, drawn = engine.unfinished, enumerate(completions)

        def continued(member: Unfinished) -> Unfinished:
            if _is_complete(member):
                return member
            index, completion = next(drawn)
            return cut_off.get(index) or replace(member, key=0, completion=completion)

        # The engine returns continued completions first, then new ones.
        begun = Completion((), (), "cancelled")
        groups = [*waiting]
        for prompt in (prompts[number] for number in own):
            groups.append(Group(prompt, (Unfinished(prompt.inputs, 0, begun),) * params.n))
        return [replace(g, members=tuple(map(continued, g.members))) for g in groups]

    def choose(
        self, groups: Sequence[Group], version: int
    ) -> tuple[list[EncodedPrompt], list[Completion]]:
        """Select the oldest complete groups to train on; the others wait.

        Returns the step's prompts of all ranks, and the completions of this rank's share.
        """
        ranks = world()
        quota = len(ranks.share(range(self._prompts_per_step)))
        chosen = [group for group in groups if group.complete][:quota]
        # The others wait; all ranks gather all waiting groups, for the checkpoint.
        chosen_ids = {id(group) for group in chosen}
        left = [group.dated(version) for group in groups if id(group) not in chosen_ids]
        states = ranks.gather("waiting groups", [group.state() for group in left])
        self._waiting = [[self._group(state) for state in of_rank] for of_rank in states]
        self._waiting[ranks.rank] = left
        ids = ranks.gather("prompts of the step", [group.prompt.prompt.id for group in chosen])
        prompts = [self._by_id[prompt_id] for prompt_id in _in_turn(ids)]
        return prompts, [member.completion for group in chosen for member in group.members]

    def state(self) -> Any:
        return [group.state() for group in _in_turn(self._waiting)]

    def load_state(self, state: Any) -> None:
        """Restore the waiting groups of a checkpoint."""
        if state and self._problem:
            raise UserError(
                "the checkpoint has unfinished completions, but this run cannot continue "
                f"them: {self._problem}"
            )
        # Oldest first, regardless of the previous number of ranks.
        groups, size = [self._group(group) for group in state], len(self._waiting)
        counts = {len(group.members) for group in groups} - {self._samples_per_prompt}
        needed = [f"samples_per_prompt={count}" for count in counts]
        members = [m for group in groups for m in group.members if not _is_complete(m)]
        longest = max((len(member.completion.token_ids) for member in members), default=0)
        if longest >= self._max_tokens:
            needed.append(f"max_tokens={longest + 1} or more")
        for key in needed:
            raise UserError(f"the checkpoint has unfinished completions: resume with rollout.{key}")
        self._waiting = [groups[rank::size] for rank in range(size)]

    def _group(self, state: Any) -> Group:
        """Return the group stored by its `state`."""
        prompt_id, members = state
        prompt = self._by_id.get(prompt_id)
        if prompt is None:
            raise UserError(
                f"the checkpoint has unfinished completions of prompt {prompt_id!r}, which the "
                "task no longer has: restore its data, or choose another run.name"
            )
        unfinished = []
        for key, token_ids, logprobs, reason, text, versions in members:
            completion = Completion(
                token_ids=tuple(token_ids),
                logprobs=tuple(logprobs),
                finish_reason=reason,
                text=text,
                versions=tuple(versions),
            )
            unfinished.append(Unfinished(prompt.inputs, key, completion))
        return Group(prompt, tuple(unfinished))


def _problem(
    policy: Policy, prompts: Sequence[EncodedPrompt], max_turns: int, dynamic_sampling: bool
) -> str:
    """Return why completions of this run cannot span several steps, or ""."""
    if not policy.plan.exact:
        return f"the plan {policy.plan.name!r} is not exact; use precision.preset=int8"
    if dynamic_sampling:
        return "dynamic sampling replaces prompts; set algorithm.dynamic_sampling=false"
    if max_turns > 1:
        return "multi-turn completions cannot be interrupted; set task.max_turns=1"
    if len({prompt.stop for prompt in prompts}) > 1:
        return "prompts with different stop strings cannot be sampled together"
    if len({prompt.prompt.id for prompt in prompts}) < len(prompts):
        return "two prompts have the same id"
    return ""


def _is_complete(member: Unfinished) -> bool:
    return member.completion.finish_reason != "cancelled"


def _in_turn(lists: Sequence[Sequence[Item]]) -> list[Item]:
    longest = max(map(len, lists))
    return [items[i] for i in range(longest) for items in lists if i < len(items)]
