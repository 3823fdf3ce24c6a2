import json
import sys
from pathlib import Path

import pytest

from jetrl.errors import UserError
from jetrl.tasks import Scorer, get_task

REAL = Path(__file__).parents[2] / "data" / "gsm8k"
ROW = {"question": " How many? ", "answer": "48+24 = <<48+24=72>>72 clips.\nSo 72.\n#### 1,072"}


def write(file, *lines):
    file.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return str(file)


def prompts(path, split="train", **options):
    return list(get_task("gsm8k", path=path, **options).prompts(split))


def test_the_real_data_is_whole_and_its_worked_answers_score_1():
    task = get_task("gsm8k", path=REAL)
    splits = {split: list(task.prompts(split)) for split in ("train", "test")}
    assert {split: len(p) for split, p in splits.items()} == {"train": 7473, "test": 1319}
    some = splits["test"][::7]
    with Scorer("gsm8k", REAL, workers=2) as scorer:
        results = scorer.score([(p, task.demonstration(p) or "") for p in some])
    assert [r.score.reward for r in results] == [1.0] * len(some)
    assert all(r.score.parts == {"answered": 1.0} for r in results)
    assert not any("<<" in (task.demonstration(p) or "") for p in splits["train"])


def test_prompts_for_chat_and_for_text(tmp_path):
    path = write(tmp_path / "rows.jsonl", ROW)
    (chat,) = prompts(path)
    assert chat.messages is not None
    assert chat.messages[0]["content"].startswith("How many?\nThink step by step.")
    (text,) = prompts(path, format="text")
    assert text.text == "Question: How many?\nAnswer:\n"
    assert (text.id, text.answer) == ("train-0", "1072")
    task = get_task("gsm8k", path=path, format="text")
    assert task.demonstration(text) == "48+24 = 72 clips.\nSo 72.\n#### 1072"
    assert task.stop == ("\nQuestion:",)


@pytest.mark.parametrize(
    "lines, message",
    [
        ([ROW, {"question": "?"}], "line 2: no text field 'answer'"),
        ([{"question": "?", "answer": 5}], "line 1: no text field 'answer'"),
        (
            [{"question": "?", "answer": "72"}],
            "line 1: field 'answer' does not end with '#### NUMBER'",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path, lines, message):
    path = write(tmp_path / "rows.jsonl", *lines)
    with pytest.raises(UserError, match=f"rows.jsonl, {message}"):
        prompts(path)


def test_an_empty_data_set_a_missing_split_and_text_that_is_not_utf8(tmp_path):
    with pytest.raises(UserError, match="no questions in split 'train'"):
        prompts(write(tmp_path / "empty.jsonl", "", ""))
    with pytest.raises(UserError, match=r"the folder has no test.jsonl \(or .parquet"):
        prompts(str(tmp_path), "test")
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "caf\xe9"}')
    with pytest.raises(UserError, match=r"latin.jsonl, line 1: not UTF-8 text"):
        prompts(str(tmp_path / "latin.jsonl"))


def test_a_datasets_name_is_loaded_with_its_package(monkeypatch):
    calls = []
    rows = pytest.importorskip("datasets").Dataset.from_list([ROW, ROW])

    class Datasets:
        @staticmethod
        def load_dataset(name, config, split):
            calls.append((name, config, split))
            if split == "test":
                raise ValueError("no such split")
            return rows

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    assert [p.id for p in prompts("openai/gsm8k")] == ["train-0", "train-1"]
    assert calls == [("openai/gsm8k", "main", "train")]
    with pytest.raises(UserError, match=r"`datasets` cannot load it .*no such split"):
        prompts("openai/gsm8k", "test")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'jetrl\[data\]'"):
        prompts("openai/gsm8k")
