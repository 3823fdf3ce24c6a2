"""Data sets and run files in JSON lines: damage is a UserError with its place, never a crash."""

import json

import pytest

from jetrl.models.chat import encode_prompt
from jetrl.models.tiny import character_tokenizer
from jetrl.tasks import get_task
from jetrl.types import Prompt

TOKENIZER = character_tokenizer()
TOKENIZER.chat_template = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}"
    "<assistant>{% endif %}"
)


CONVERSATIONS = [
    {"q": [{"role": "user", "content": "1+1?"}], "a": 2, "id": "x", "worked": "two"},
    {"q": [{"role": "system", "content": "s"}, {"role": "user", "content": "é?"}], "a": "3"},
    {"q": "plain {a} text", "a": "4", "worked": "four", "extra": {"deep": [1, [2]]}},
]


@pytest.mark.parametrize("options", [{}, {"template": "Q: {q} ({extra})\nA:"}])
def test_damaged_rows_of_your_own(mutate, attempt, options, tmp_path):
    file = tmp_path / "rows.jsonl"
    text = "".join(json.dumps(row) + "\n" for row in CONVERSATIONS).encode()
    fields = {"prompt": "q", "answer": "a", "demonstration": "worked", "id": "id"}
    read = 0
    for seed in range(200):
        file.write_bytes(mutate(text, seed))
        task, _ = attempt(lambda: get_task("dataset", path=str(file), **fields, **options))
        if task is None:
            continue
        prompts, problem = attempt(lambda t=task: list(t.prompts("train")))
        if problem:
            assert str(file) in problem, seed
            continue
        read += 1
        for prompt in prompts:
            assert isinstance(prompt, Prompt)
            attempt(task.demonstration, prompt)
            attempt(task.score, prompt, "the answer is 2")
            attempt(encode_prompt, TOKENIZER, prompt, "be brief")
    assert read < 200


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"\xff", b"[" * 3000, b'{"splits": 3}'])
def test_a_damaged_folder_of_datasets(attempt, tmp_path, text):
    (tmp_path / "dataset_dict.json").write_bytes(text)
    found, problem = attempt(
        lambda: list(get_task("dataset", path=str(tmp_path), prompt="q").prompts("train"))
    )
    assert found is None
    assert str(tmp_path) in problem
