"""A task as the environment of a rollout, which replies at the end of a turn."""

from __future__ import annotations

from collections.abc import Sequence

from jetrl.errors import UserError
from jetrl.rollout.options import EnvironmentReply
from jetrl.tasks import Scorer, Task
from jetrl.types import Prompt, Turn


class TaskEnvironment:
    """The environment that answers turns with a task's `step`, in the scorer's processes.

    Args:
        prompts: The prompts of one call of `generate`.
    """

    def __init__(self, scorer: Scorer, prompts: Sequence[Prompt], n: int, max_turns: int) -> None:
        self.max_turns = max_turns
        self._scorer, self._prompts, self._n = scorer, prompts, n
        self._sequences: dict[int, int] = {}  # By the ticket of an unanswered turn.

    def ask(self, sequence: int, turns: Sequence[Turn], completion: str) -> None:
        ticket = self._scorer.ask(self._prompts[sequence // self._n], turns, completion)
        self._sequences[ticket] = sequence

    def answers(self, wait: bool) -> list[EnvironmentReply]:
        return [
            EnvironmentReply(self._sequences.pop(answer.ticket), answer.reply, answer.failure)
            for answer in self._scorer.answers(wait)
        ]

    def close(self) -> None:
        self._sequences.clear()
        self._scorer.drop_turns()


def turns_of(task: Task, setting: int | None) -> int:
    """Return the most turns of a completion: the setting `task.max_turns`, or else the task's own.

    Raises:
        UserError: The setting asks for several turns of a task that has none.
    """
    if setting is not None and setting > 1 and task.max_turns == 1:
        raise UserError(
            f"task.max_turns = {setting}, but task {task.label} has no turns: unset it, or give "
            "the task a `step` and a `max_turns` above 1"
        )
    return task.max_turns if setting is None else setting
