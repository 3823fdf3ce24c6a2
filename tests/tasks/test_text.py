"""Raw text as documents: spans of files, splits, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from jetrl.errors import UserError
from jetrl.tasks import get_task, read_prompts
from jetrl.tasks import text as text_module
from jetrl.tasks.text import Document, RawText, TextSplit


def text_task(path: Path, **options: Any) -> RawText:
    task = get_task("text", path=path, **options)
    assert isinstance(task, RawText)
    return task


def small_spans(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(text_module, "_SPAN", size)
    monkeypatch.setattr(text_module, "_UNDIVIDED", size)


def written(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def folder_of(tmp_path: Path, train: str, text: str) -> Path:
    (tmp_path / train).write_text(text)
    return tmp_path


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
def test_rows_come_back_in_small_spans(tmp_path, monkeypatch, name: str) -> None:
    small_spans(monkeypatch, 200)
    texts = [f"document {n}: {'é' * (n % 13)}" for n in range(50)]
    written(tmp_path / name, [{"body": {"text": text}} for text in texts])
    split = text_task(tmp_path, column="body.text").split("train")
    assert [document.text for document in split] == texts
    assert all(document.ends for document in split)
    assert len(split.spans) >= 8
    each = [len(split.read(span)) for span in split.spans]
    assert max(each) <= 10  # a span is read alone
    assert split.documents == 50
    assert split.characters == sum(map(len, texts))
    # The last span alone has the places that the whole file has.
    numbers = [int(document.where.split()[-1]) for document in split]
    assert numbers == list(range(numbers[0], numbers[0] + 50))
    assert numbers[0] == (1 if name.endswith("jsonl") else 0)


def test_a_separator_divides_a_text_file(tmp_path, monkeypatch) -> None:
    small_spans(monkeypatch, 40)
    texts = [f"line {n}\nnext line\n" for n in range(9)]
    folder_of(tmp_path, "train.txt", "<|end|>\n".join(texts))
    split = text_task(tmp_path, separator="<|end|>").split("train")
    assert [document.text for document in split] == texts
    assert all(document.ends for document in split)
    assert [document.where for document in split][1].endswith("train.txt, line 4")
    assert len(split.spans) > 3


def test_what_is_larger_than_a_span_is_cut_at_lines_and_ends_once(tmp_path, monkeypatch) -> None:
    small_spans(monkeypatch, 40)
    whole = "".join(f"line {n}\n" for n in range(50))
    folder_of(tmp_path, "train.md", whole)
    parts = list(text_task(tmp_path).split("train"))
    assert "".join(part.text for part in parts) == whole
    assert all(part.text.endswith("\n") for part in parts)
    assert len(parts) > 3
    assert [part.ends for part in parts] == [False] * (len(parts) - 1) + [True]


def test_documents_without_splits_are_held_out_by_content(tmp_path) -> None:
    texts = [f"document {n % 40}" for n in range(80)]  # each one twice
    file = written(tmp_path / "all.jsonl", [{"text": text} for text in texts])
    task = text_task(file, test_share=0.3)
    train, test = ([each.text for each in task.split(name)] for name in ("train", "test"))
    assert sorted([*train, *test]) == sorted(texts)
    assert not {*train} & {*test}
    assert 4 < len({*test}) < 24  # 12 expected of 40 (binomial, 4 standard deviations)
    other = [each.text for each in text_task(file, test_share=0.3, seed=1).split("test")]
    assert other != test


def test_a_folder_without_train_is_one_set_of_all_its_files(tmp_path) -> None:
    (tmp_path / "inner").mkdir()
    for name in ("b.md", "a.txt", "inner/c.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    task = text_task(tmp_path, test_share=1e-9)
    assert [document.text for document in task.split("train")] == ["a.txt", "b.md", "inner/c.txt"]
    with pytest.raises(UserError, match=r"no document in split 'test'.*test_share"):
        task.split("test")


def split_of(tmp_path: Path, name: str, contents: bytes, **options: Any) -> TextSplit:
    (tmp_path / name).write_bytes(contents)
    return text_task(tmp_path, **options).split("train")


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("train.txt", b"", "train.txt: no text in it; remove it"),
        ("train.jsonl", b"\n\n", "train.jsonl: no text in it; remove it"),
        ("train.txt", b"a\nb \xff\n", "train.txt, line 2: not UTF-8 text .*save it as UTF-8"),
        ("train.jsonl", b'{"text": "a"}\n\xff\n', "train.jsonl, line 2: not UTF-8 text"),
        ("train.txt", b"\x7fELF\x00\x01", "train.txt, line 1: a NUL character, so not text"),
        (
            "train.jsonl",
            b'{"text": "a"}\n{"txt": "b"}',
            "line 2: no field 'text'; did you mean txt. .task.options.column",
        ),
        ("train.jsonl", b'{"text": ["a"]}', r"line 1: field 'text' is \['a'\], not a text"),
        ("train.jsonl", b'{"text": {"raw": "a"}}', r"a part of it is named text\.raw"),
        ("train.jsonl", b'{"text": null}', "line 1: field 'text' is empty .null.; fill it"),
        ("train.jsonl", b"[1]", "line 1: a JSON object is expected"),
        ("train.parquet", b"PAR1", "train.parquet: not a Parquet file that can be read"),
    ],
)
def test_what_is_not_text_is_refused(tmp_path, name: str, contents: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        split_of(tmp_path, name, contents)


def test_a_missing_or_wrong_column_of_parquet_is_named(tmp_path) -> None:
    written(tmp_path / "train.parquet", [{"words": "a", "number": 3}] * 9)
    with pytest.raises(UserError, match=r"train\.parquet, row 0: no field 'text'"):
        text_task(tmp_path).split("train")
    with pytest.raises(UserError, match=r"row 0: field 'number' is 3, not a text; .*column"):
        text_task(tmp_path, column="number").split("train")


def test_a_place_without_text_and_prompts_of_text_are_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="no file of text here"):
        text_task(tmp_path).split("train")
    for missing in ("missing.txt", "missing", "openai/gsm8k"):
        with pytest.raises(UserError, match=r"no such file or folder; give a file of text") as no:
            text_task(tmp_path / missing)
        assert "datasets" not in str(no.value)
    with pytest.raises(UserError, match="train on its documents with `jetrl sft`"):
        read_prompts(text_task(tmp_path), "train")


@pytest.mark.parametrize("name", ["b.csv", "b.json", "b.txt", "b.jsonl", "b.parquet"])
def test_a_broken_link_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.txt").write_text("text\n")
    (tmp_path / name).symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=rf"{name}: .*(a link to a missing file; remove|No such)"):
        text_task(tmp_path, test_share=1e-9).split("train")


@pytest.mark.parametrize("name", ["b.TXT", "inner/b.Jsonl", "B.MD"])
def test_a_suffix_in_upper_case_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / name).write_text("text\n")
    asked = rf"{name}: not read; rename it to .\.{name.split('.')[1].lower()}, or"
    places = [tmp_path / name, tmp_path]
    for place in places:
        with pytest.raises(UserError, match=asked):
            text_task(place).split("train")
    (tmp_path / "a.txt").write_text("text\n")
    with pytest.raises(UserError, match=asked):
        text_task(tmp_path, test_share=1e-9).split("train")


def test_a_suffix_in_upper_case_is_refused_next_to_splits(tmp_path: Path) -> None:
    for name in ("train.txt", "train.TXT"):
        (tmp_path / name).write_text("text\n")
    with pytest.raises(UserError, match=r"train\.TXT: not read; rename it to train\.txt"):
        text_task(tmp_path).split("train")


@pytest.mark.parametrize("name", ["train.txt", "train.jsonl"])
def test_a_separator_that_no_line_is_is_refused(tmp_path: Path, name: str) -> None:
    text = "one\n<|end|> \ntwo\n" if name == "train.txt" else '{"text": "<|end|>"}\n'
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=r"'<\|eot\|>': no line of a text file.*'train'"):
        text_task(tmp_path, separator="<|eot|>").split("train")
    if name == "train.txt":
        assert text_task(tmp_path, separator="<|end|>").split("train").documents == 2


def test_a_single_document_is_told_to_hold_nothing_out(tmp_path: Path) -> None:
    (tmp_path / "only.md").write_text("text\n")
    with pytest.raises(UserError, match=r"split 'test'.* set eval\.every = 0 to hold nothing out"):
        text_task(tmp_path / "only.md", test_share=1e-9).split("test")
    with pytest.raises(UserError, match=r"split 'train'.* lower it"):
        text_task(tmp_path / "only.md", test_share=1 - 1e-9).split("train")
    (tmp_path / "only.md").rename(tmp_path / "train.md")
    with pytest.raises(UserError, match=r"no split 'test'.*with eval\.every = 0"):
        text_task(tmp_path).split("test")


def test_a_changed_text_has_another_digest(tmp_path) -> None:
    before = split_of(tmp_path, "train.txt", b"abc\n")
    assert split_of(tmp_path, "train.txt", b"abc\n").digest == before.digest
    assert split_of(tmp_path, "train.txt", b"abd\n").digest != before.digest
    assert list(before) == [Document("abd\n", f"{tmp_path}/train.txt, line 1")]


def test_parts_of_a_document_are_in_one_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_spans(monkeypatch, 64)
    for name in "abcdefgh":
        lines = [f"file {name} line {number}, and more words\n" for number in range(40)]
        (tmp_path / f"{name}.txt").write_text("".join(lines))
    task = RawText(str(tmp_path), test_share=0.5)
    files = [{Path(d.where.split(",")[0]).name for d in task.split(n)} for n in ("train", "test")]
    assert not files[0] & files[1]
    assert len(files[0] | files[1]) == 8
    assert files[0]
    assert files[1]
    assert sum(task.split(name).documents for name in ("train", "test")) > 40


def test_rows_in_other_files_have_another_digest(tmp_path: Path) -> None:
    rows = [f'{{"text": "row {number}"}}\n' for number in range(8)]
    for folder, parts in (("one", [rows]), ("two", [rows[:5], rows[5:]])):
        (tmp_path / folder).mkdir()
        for number, part in enumerate(parts):
            (tmp_path / folder / f"{number}.jsonl").write_text("".join(part))
    one, two = (RawText(str(tmp_path / f), test_share=0.1).split("train") for f in ("one", "two"))
    assert [d.text for d in one] == [d.text for d in two]
    assert one.digest != two.digest
