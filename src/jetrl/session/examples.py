"""Examples for supervised updates: demonstrations, preference pairs, and pieces of raw text."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from jetrl.errors import UserError
from jetrl.models.chat import encode_text, encode_turns
from jetrl.models.model import Model
from jetrl.randomness import derive_seed, draw_range
from jetrl.session.sampling import EncodedPrompt
from jetrl.settings.loading import Settings
from jetrl.tasks import Task
from jetrl.tasks.text import Document, RawText, TextSplit
from jetrl.training.sft import ExamplePair, Pair
from jetrl.types import IMAGE_MARKS, Example, Turn

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
    if encoded.inputs.images:
        raise UserError(
            f"prompt {encoded.prompt.id!r} has images, and pairs have text only so far: drop the "
            "row, or train on answers (jetrl sft without --task)"
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
    if model.tower is not None:
        _refuse_places(turns, f"{where}: its {name}")
    example = encode_turns(
        tokenizer,
        encoded.inputs.token_ids,
        turns,
        where,
        plain_text=model.plain_text,
        asked=encoded.prompt,
    )
    if model.tower is not None:  # the tokens of places that the texts do not show
        model.tower.spans(example.completion, (), f"{where}: its {name}")
    if (count := len(example)) > limit:
        raise UserError(
            f"{where} and its {name} have {count} tokens, and the model's context is {limit}; "
            "shorten or drop it"
        )
    return dataclasses.replace(example, images=encoded.inputs.images)


def _refuse_places(turns: Sequence[Turn], where: str) -> None:
    """Raise UserError for a place of an image after the prompt, whose images are the only ones."""
    replies = (turn.reply for turn in turns if turn.reply is not None)
    contents = (str(each if isinstance(each, str) else each["content"]) for each in replies)
    # A part of a message that is an image is <image> here, whatever the model's token.
    for text in (*(turn.text for turn in turns), *contents):
        if mark := next((mark for mark in IMAGE_MARKS if mark in text), None):
            raise UserError(
                f"{where} has {mark}, a place of an image, and only prompts have images: take it "
                "out"
            )


def encode_document(model: Model, document: Document) -> list[int]:
    """Return the tokens of a document, with an end-of-sequence token after its last part."""
    tokenizer = model.tokenizer
    if tokenizer is None or tokenizer.eos_token_id is None:
        what = "no tokenizer" if tokenizer is None else "a tokenizer without an end token"
        raise UserError(
            f"raw text needs an end token between documents, and the model has {what}; set "
            "model.tokenizer to one that has it (eos_token in tokenizer_config.json)"
        )
    as_text = model.plain_text == "all"
    token_ids = encode_text(tokenizer, document.text, document.where, as_text=as_text)
    return [*token_ids, *[tokenizer.eos_token_id] * document.ends]


def pieces(token_ids: Sequence[int], length: int) -> Iterator[Example]:
    """Yield a document as sequences of at most `length` tokens, for the loss of all but its first.

    Each piece begins with the last token of the one before, which is context there: every token
    but a document's first is predicted once.
    """
    for start in range(0, len(token_ids) - 1, length - 1):
        piece = token_ids[start : start + length]
        yield Example(piece[:1], piece[1:])


def eval_pieces(settings: Settings, model: Model, task: RawText) -> list[Example]:
    """Return the first held-out documents, cut at the largest length of training."""
    held_out, length = task.split(settings.task.eval_split), max(settings.sft.lengths)
    found: list[Example] = []
    for document in itertools.islice(held_out, settings.eval.prompts or None):
        found += pieces(encode_document(model, document), length)
    return found


class Place(NamedTuple):
    """The place of the next piece: epoch, span in its order, document of the span, token."""

    epoch: int = 0
    span: int = 0
    document: int = 0
    token: int = 0


class TextOrder:
    """Raw text as the examples of each update, in an order that depends only on the seed.

    In each pass over the text, spans come in random order, and so do the documents of a span. An
    update takes pieces until the next one would exceed sft.tokens_per_step. The examples of the
    next update are made in a thread meanwhile. The place in the text is the state.
    """

    def __init__(self, settings: Settings, model: Model, split: TextSplit) -> None:
        self._sft, self._model, self._split = settings.sft, model, split
        self._seed = derive_seed(settings.run.seed, "text")
        self._place = Place()
        # Of the last place: the epoch's order of spans, the span's documents, a document's tokens.
        self._spans: tuple[int, list[int]] = (-1, [])
        self._documents: tuple[tuple[int, int], list[Document]] = ((-1, -1), [])
        self._tokens: tuple[Document | None, list[int]] = (None, [])
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="text")
        self._next: Future[tuple[list[Example], Place]] | None = None

    def draw(self, update: int) -> list[Example]:
        """Return the examples of an update (from 1); updates come in order."""
        # Tokenizing takes time in which a GPU would wait.
        if self._next is None:
            self._next = self._ahead(update)
        examples, self._place = self._next.result()
        self._next = self._ahead(update + 1) if update < self._sft.steps else None
        return examples

    def state(self) -> dict[str, Any]:
        return {"digest": self._split.digest, "place": list(self._place)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if state["digest"] != self._split.digest:
            raise UserError(
                "the text is not that of the checkpoint (its files or task.options changed), so "
                "the place in it is lost: restore it, or begin another run (run.name)"
            )
        self._place, self._next = Place._make(state["place"]), None

    def _ahead(self, update: int) -> Future[tuple[list[Example], Place]]:
        return self._thread.submit(self._examples, self._place, self._sft.length(update))

    def _examples(self, place: Place, length: int) -> tuple[list[Example], Place]:
        """Return the examples of an update from a place on, and the place after them."""
        examples: list[Example] = []
        room, first_epoch = self._sft.tokens_per_step, place.epoch
        while True:
            documents = self._documents_at(place)
            for number in range(place.document, len(documents)):
                # Only the first document may have been begun by the update before.
                token = place.token if number == place.document else 0
                for piece in pieces(self._encoded(documents[number])[token:], length):
                    # It begins the next update: no document is cut to fill this one.
                    if len(piece) > room:
                        return examples, Place(place.epoch, place.span, number, token)
                    examples.append(piece)
                    room -= len(piece)
                    token += len(piece) - 1
            is_last = place.span + 1 == len(self._split.spans)
            place = Place(place.epoch + 1) if is_last else Place(place.epoch, place.span + 1)
            if not examples and place.epoch > first_epoch + 1:
                raise UserError("no document has two tokens, so there is nothing to predict")

    def _documents_at(self, place: Place) -> list[Document]:
        """Return the documents of a place's span, in the order of its pass over the text."""
        key = place.epoch, place.span
        if self._documents[0] != key:
            if self._spans[0] != place.epoch:
                order = _shuffled(len(self._split.spans), derive_seed(self._seed, place.epoch))
                self._spans = place.epoch, order
            found = self._split.read(self._split.spans[self._spans[1][place.span]])
            order = _shuffled(len(found), derive_seed(self._seed, place.epoch, place.span))
            self._documents = key, [found[index] for index in order]
        return self._documents[1]

    def _encoded(self, document: Document) -> list[int]:
        if self._tokens[0] is not document:
            self._tokens = document, encode_document(self._model, document)
        return self._tokens[1]


def _shuffled(count: int, seed: int) -> list[int]:
    return draw_range(count, 0, count, seed)
