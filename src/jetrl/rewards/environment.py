"""A task as the environment of a rollout: who is asked when a turn ends (rollout/turns.py)."""

from __future__ import annotations

from collections.abc import Sequence

from jetrl.errors import UserError
from jetrl.rollout.multi_turn import Answer
from jetrl.tasks import Scorer, Task
from jetrl.types import Prompt, Turn


class TaskEnvironment:
    """Answers turns with a task's `step`, in the scorer's processes.

    prompts: of the call of `generate`, n completions each. max_turns: see `turns_of`.
    """

    def __init__(self, scorer: Scorer, prompts: Sequence[Prompt], n: int, max_turns: int) -> None:
        self.max_turns = max_turns
        self._scorer, self._prompts, self._n = scorer, prompts, n
        self._sequences: dict[int, int] = {}  # of each ticket that is not answered yet

    def ask(self, sequence: int, turns: Sequence[Turn], completion: str) -> None:
        ticket = self._scorer.ask(self._prompts[sequence // self._n], turns, completion)
        self._sequences[ticket] = sequence

    def answers(self, wait: bool) -> list[Answer]:
        return [
            Answer(self._sequences.pop(answer.ticket), answer.reply, answer.failure)
            for answer in self._scorer.answers(wait)
        ]

    def close(self) -> None:
        self._sequences.clear()
        self._scorer.drop_turns()


def turns_of(task: Task, wanted: int | None) -> int:
    """How many turns a completion may have: `task.max_turns` of the settings, else the task's own.

    Raises:
        UserError: several, of a task that has no turns.
    """
    if wanted is not None and wanted > 1 and task.max_turns == 1:
        raise UserError(
            f"task.max_turns = {wanted}, but task {task.label} has no turns: unset it, or give the "
            "task a `step` and a `max_turns` above 1"
        )
    return task.max_turns if wanted is None else wanted
