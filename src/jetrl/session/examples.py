"""Examples for supervised updates: demonstrations and preference pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jetrl.errors import UserError
from jetrl.models.chat import encode_turns
from jetrl.models.model import Model
from jetrl.session.sampling import EncodedPrompt
from jetrl.tasks import Task
from jetrl.training.sft import ExamplePair, Pair
from jetrl.types import Example, Turn

AnyExample = TypeVar("AnyExample", Example, Pair, ExamplePair)


def demonstration(task: Task, model: Model, encoded: EncodedPrompt) -> Example:
    """Return a prompt's demonstration, including its end token."""
    answer = task.demonstration(encoded.prompt)
    if answer is None or model.tokenizer is None:
        raise UserError(
            f"supervised training needs demonstrations, but task {task.label} has none for prompt "
            f"{encoded.prompt.id!r}: name the field that has them in task.options.demonstration, "
            "or add a demonstration method to your own task"
        )
    # Demonstrations may have several turns, with environment replies in between.
    turns = [Turn(answer)] if isinstance(answer, str | Mapping) else list(answer)
    return _encoded(model, encoded, turns, "demonstration")


def preference_pair(task: Task, model: Model, encoded: EncodedPrompt) -> Pair:
    """Return the task's two completions of a prompt as full sequences with end tokens."""
    better, worse = preference_examples(task, model, encoded)
    return (*better.prompt, *better.completion), (*worse.prompt, *worse.completion)


def preference_examples(task: Task, model: Model, encoded: EncodedPrompt) -> ExamplePair:
    """Return the task's better and worse completion of a prompt, with end tokens."""
    texts = task.preference(encoded.prompt)
    if texts is None or model.tokenizer is None:
        raise UserError(
            f"a reward model or DPO needs pairs, and task {task.label} has none for prompt "
            f"{encoded.prompt.id!r}; give it a preference method, or set task.options.chosen and "
            "task.options.rejected"
        )
    is_pair = isinstance(texts, tuple | list) and len(texts) == 2
    if not is_pair or not all(isinstance(text, str | Mapping) for text in texts):
        raise UserError(
            f"task {task.label}, prompt {encoded.prompt.id!r}: its preference is not a pair of "
            "texts or messages"
        )
    # Both sequences share the prompt; a reward model's scores are read at the last token.
    better, worse = (_encoded(model, encoded, [Turn(text)], "completion") for text in texts)
    return better, worse


def trained_examples(
    example_of: Callable[[Task, Any, EncodedPrompt], AnyExample],
    task: Task,
    model: Model,
    prompts: Sequence[EncodedPrompt],
) -> Iterator[AnyExample]:
    """Build an example for every training prompt; raise if one cannot be built.

    `task` is not the run's own object: a task may return another example each time.
    """
    for encoded in prompts:
        if task.weights.get(encoded.prompt.task, 1.0) > 0:
            yield example_of(task, model, encoded)


def _encoded(model: Model, encoded: EncodedPrompt, turns: Sequence[Turn], name: str) -> Example:
    """Return the tokens of a prompt and turns, checked against the model's context length."""
    where = f"prompt {encoded.prompt.id!r}"
    tokenizer, limit = model.tokenizer, model.config.max_position_embeddings
    assert tokenizer is not None, "no turns without a tokenizer"
    example = encode_turns(
        tokenizer,
        encoded.inputs.token_ids,
        turns,
        where,
        plain_text=model.plain_text,
        asked=encoded.prompt,
    )
    if (count := len(example.prompt) + len(example.completion)) > limit:
        raise UserError(
            f"{where} and its {name} have {count} tokens, and the model's context is {limit}; "
            "shorten or drop it"
        )
    return example
