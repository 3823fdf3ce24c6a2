"""Worked answers as examples to imitate: of a prompt, and whether a task has them at all."""

from __future__ import annotations

from collections.abc import Sequence

from jetrl.errors import UserError
from jetrl.evaluate import EncodedPrompt
from jetrl.models.chat import encode_turns
from jetrl.policy import Policy
from jetrl.tasks import Task
from jetrl.types import Example, Turn


def worked_answer(task: Task, policy: Policy, encoded: EncodedPrompt) -> Example:
    """A prompt's worked answer, with its end.

    Raises:
        UserError: the task has no worked answers, or the model no tokenizer to write them in.
    """
    tokenizer = policy.tokenizer
    answer = task.demonstration(encoded.prompt)
    if answer is None or tokenizer is None:
        raise UserError(
            f"supervised training needs worked answers, and task {task.label} has none for prompt "
            f"{encoded.prompt.id!r}; set sft.steps=0, or give the task a demonstration method"
        )
    turns = [Turn(answer)] if isinstance(answer, str) else list(answer)
    return encode_turns(tokenizer, encoded.token_ids, turns, f"prompt {encoded.prompt.id!r}")


def check_worked_answers(task: Task, policy: Policy, prompts: Sequence[EncodedPrompt]) -> None:
    """Asks for a worked answer of the first prompt of each task that is trained on.

    task: not the run's own, since one may give another answer each time it is asked.

    Raises:
        UserError: there is none.
    """
    first: dict[str, EncodedPrompt] = {}
    for encoded in prompts:
        if task.weights.get(encoded.prompt.task, 1.0) > 0:
            first.setdefault(encoded.prompt.task, encoded)
    for encoded in first.values():
        worked_answer(task, policy, encoded)
