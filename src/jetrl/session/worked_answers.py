"""Worked answers as examples to imitate: of a prompt, and whether all prompts have one."""

from __future__ import annotations

from collections.abc import Sequence

from jetrl.errors import UserError
from jetrl.models.chat import encode_turns
from jetrl.models.policy import Policy
from jetrl.rewards.sampling import EncodedPrompt
from jetrl.tasks import Task
from jetrl.types import Example, Turn


def worked_answer(task: Task, policy: Policy, encoded: EncodedPrompt) -> Example:
    """A prompt's worked answer, with its end.

    Raises:
        UserError: the task has no worked answers, or the model no tokenizer to write them in; it is
            longer than the model's context.
    """
    tokenizer = policy.tokenizer
    answer = task.demonstration(encoded.prompt)
    if answer is None or tokenizer is None:
        raise UserError(
            f"supervised training needs worked answers, and task {task.label} has none for prompt "
            f"{encoded.prompt.id!r}; set sft.steps=0, or give the task a demonstration method"
        )
    turns = [Turn(answer)] if isinstance(answer, str) else list(answer)
    where = f"prompt {encoded.prompt.id!r}"
    example = encode_turns(tokenizer, encoded.token_ids, turns, where)
    limit = policy.config.max_position_embeddings
    num_tokens = len(example.prompt) + len(example.completion)
    if num_tokens > limit:
        raise UserError(
            f"{where} and its worked answer have {num_tokens} tokens, and the model's context is "
            f"{limit}; shorten or drop it"
        )
    return example


def check_worked_answers(task: Task, policy: Policy, prompts: Sequence[EncodedPrompt]) -> None:
    """Asks for the worked answer of every prompt that is trained on.

    task: not the run's own, since one may give another answer each time it is asked.

    Raises:
        UserError: as `worked_answer`.
    """
    for encoded in prompts:
        if task.weights.get(encoded.prompt.task, 1.0) > 0:
            worked_answer(task, policy, encoded)
