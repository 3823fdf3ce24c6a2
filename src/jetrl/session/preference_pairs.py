"""Pairs of a better and a worse completion, as a reward model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jetrl.errors import UserError
from jetrl.models.chat import encode_turns
from jetrl.models.model import Model
from jetrl.rewards.sampling import EncodedPrompt
from jetrl.tasks import Task
from jetrl.training.extras.reward_model import Pair
from jetrl.types import Turn


@dataclass(frozen=True)
class PairFacts:
    """Of all pairs of a split. longest: tokens of a sequence, prompt included. equal: pairs of the
    same completion twice. longer: pairs whose better completion has more tokens than the worse."""

    count: int
    longest: int
    equal: int
    longer: int


def preference_pair(task: Task, model: Model, encoded: EncodedPrompt) -> Pair:
    """The task's two completions of a prompt as whole sequences, each with its end.

    Raises:
        UserError: the task has none, or the model no tokenizer to write them in; one of them is
            longer than the model's context.
    """
    found = task.preference(encoded.prompt)
    if found is None or model.tokenizer is None:
        raise UserError(
            f"a reward model learns from pairs of completions, and task {task.label} has none for "
            f"prompt {encoded.prompt.id!r}; give the task a preference method, or the data set's "
            "fields in task.options.chosen and task.options.rejected"
        )
    where = f"prompt {encoded.prompt.id!r}"
    two = isinstance(found, tuple | list) and len(found) == 2
    if not two or not all(isinstance(text, str) for text in found):
        raise UserError(f"task {task.label}, {where}: its preference is not two texts")
    examples = [
        encode_turns(model.tokenizer, encoded.token_ids, [Turn(text)], where) for text in found
    ]
    better, worse = ((*example.prompt, *example.completion) for example in examples)
    limit, longest = model.config.max_position_embeddings, max(len(better), len(worse))
    if longest > limit:
        raise UserError(
            f"{where} and its longer completion have {longest} tokens, and the model's context is "
            f"{limit}; shorten or drop it"
        )
    return better, worse


def look_at_pairs(task: Task, model: Model, prompts: Sequence[EncodedPrompt]) -> PairFacts:
    """All pairs that are trained on, once.

    task: not the run's own, since one may give other completions each time it is asked.

    Raises:
        UserError: as `preference_pair`.
    """
    pairs = [
        preference_pair(task, model, encoded)
        for encoded in prompts
        if task.weights.get(encoded.prompt.task, 1.0) > 0
    ]
    return PairFacts(
        count=len(pairs),
        longest=max(len(sequence) for pair in pairs for sequence in pair),
        equal=sum(better == worse for better, worse in pairs),
        longer=sum(len(better) > len(worse) for better, worse in pairs),
    )
