"""Raw text as examples: cut into pieces, in a seeded order, continued at a place."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jetrl.errors import UserError
from jetrl.models.policy import Policy
from jetrl.models.tiny import make_tiny
from jetrl.precision import PrecisionPlan
from jetrl.session.examples import TextOrder, encode_document, pieces
from jetrl.settings.loading import load_config
from jetrl.tasks import text as text_module
from jetrl.tasks.text import Document, RawText
from jetrl.types import Example

WORDS = ["sft.steps=12", "task=text", "sft.tokens_per_step=64", "sft.lengths=[16]"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    path = make_tiny(tmp_path_factory.mktemp("tiny"), vocab_size=128, hidden_size=64, num_layers=1)
    return Policy.from_pretrained(path, plan=PrecisionPlan.preset("bf16"), device="meta")


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(text_module, "_SPAN", 100)
    texts = [f"{n}: {'words ' * (n % 9)}" for n in range(30)]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "train.jsonl").write_text(rows)
    return tmp_path


def order_of(path: Path, model: Policy, *words: str) -> TextOrder:
    settings = load_config(None, [*WORDS, *words])
    return TextOrder(settings, model, RawText(str(path)).split("train"))


def tokens(examples: list[Example]) -> list[tuple[int, ...]]:
    return [(*example.prompt, *example.completion) for example in examples]


@pytest.mark.parametrize("count", [2, 3, 15, 16, 17, 31, 46, 100])
def test_each_token_but_the_first_is_predicted_once(count: int) -> None:
    found = list(pieces(range(count), 16))
    assert [token for piece in found for token in piece.completion] == list(range(1, count))
    assert all(list(piece.prompt) == [piece.completion[0] - 1] for piece in found)
    assert max(map(len, found)) <= 16
    assert all(len(piece) == 16 for piece in found[:-1])


def test_an_end_token_follows_a_document_and_not_a_part_of_one(model) -> None:
    end = model.tokenizer.eos_token_id
    whole = encode_document(model, Document("abc", "here"))
    assert whole[-1] == end
    assert encode_document(model, Document("abc", "here", ends=False)) == whole[:-1]
    assert end not in whole[:-1]


def test_an_epoch_has_each_document_once_in_the_order_of_the_seed(model, corpus) -> None:
    split = RawText(str(corpus)).split("train")
    assert len(split.spans) > 5
    expected = Counter(
        piece
        for document in split
        for piece in tokens(list(pieces(encode_document(model, document), 16)))
    )
    orders = []
    for seed in (0, 1):
        order = order_of(corpus, model, f"run.seed={seed}", "sft.steps=60")
        drawn = [tokens(order.draw(update)) for update in range(1, 61)]
        assert all(sum(map(len, step)) <= 64 for step in drawn)
        assert all(sum(map(len, step)) > 64 - 16 for step in drawn)
        flat = [piece for step in drawn for piece in step]
        epochs = [
            flat[i : i + expected.total()] for i in range(0, 3 * expected.total(), expected.total())
        ]
        assert all(Counter(epoch) == expected for epoch in epochs)
        assert epochs[0] != epochs[1]
        orders.append(epochs[0])
    assert orders[0] != orders[1]


def test_it_continues_at_the_place_of_a_checkpoint(model, corpus) -> None:
    words = ["sft.lengths=[16,40]", "sft.length_steps=[5]"]
    uncut = order_of(corpus, model, *words)
    expected = [tokens(uncut.draw(update)) for update in range(1, 13)]
    lengths = [max(map(len, step)) for step in expected]
    assert max(lengths[:5]) == 16
    assert 16 < max(lengths[5:]) <= 40
    for cut in range(13):
        first = order_of(corpus, model, *words)
        before = [tokens(first.draw(update)) for update in range(1, cut + 1)]
        second = order_of(corpus, model, *words)
        second.load_state(json.loads(json.dumps(first.state())))
        assert before + [tokens(second.draw(u)) for u in range(cut + 1, 13)] == expected


def test_another_text_than_the_checkpoints_is_refused(model, corpus) -> None:
    state = order_of(corpus, model).state()
    with (corpus / "train.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(UserError, match="not that of the checkpoint"):
        order_of(corpus, model).load_state(state)


@pytest.mark.parametrize("tokenizer", [None, SimpleNamespace(eos_token_id=None)])
def test_a_model_without_an_end_token_is_refused(tokenizer: Any) -> None:
    model: Any = SimpleNamespace(tokenizer=tokenizer, plain_text="none")
    with pytest.raises(UserError, match=r"needs an end token .*; set model\.tokenizer"):
        encode_document(model, Document("abc", "here"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sft.lengths=[16,32]"], "2 stages, so sft.length_steps needs 1 numbers, not 0"),
        (["sft.lengths=[16,32]", "sft.length_steps=[12]"], "no update for the last length"),
        (["sft.lengths=[128]"], "tokens_per_step = 64 is below sft.lengths = 128"),
        (["sft.lengths=[1]"], r"sft\.lengths"),
        (["sft.examples_per_step=8"], "no effect without a task with demonstrations"),
        (["sft.until=0.5"], "no effect without a task with demonstrations"),
        (["task=gsm8k"], "sft.tokens_per_step = 64 has no effect without task.name=text"),
    ],
)
def test_settings_that_do_not_agree_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(None, [*WORDS, *words])


def test_the_length_of_each_stage() -> None:
    words = ["sft.lengths=[16,32,64]", "sft.length_steps=[2,3]"]
    sft = load_config(None, [*WORDS, *words]).sft
    found: list[Any] = [sft.length(update) for update in range(1, 9)]
    assert found == [16, 16, 32, 32, 32, 64, 64, 64]
