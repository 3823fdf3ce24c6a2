"""Text for a small language model: the Python sources and documents of the installed packages.

    python -m benchmarks.text_model --out build/text --megabytes 60
    jetrl sft benchmarks/text_model.toml model.tokenizer=DIR task.path=build/text --out MODEL

It writes train.jsonl and test.jsonl (every fiftieth file). A row has a file's name as the prompt,
and 1,700 characters of it up to the end of a line, some 500 tokens, as the completion. Copies of a
file and files with long lines, which are data, are left out. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

PIECE = 1700  # characters
ENDINGS = {".py", ".pyi", ".md", ".rst", ".txt"}


def files() -> list[tuple[str, Path]]:
    """Return the files of the library and of all packages by name, in an order of their names."""
    roots = [Path(p) for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    found: dict[str, Path] = {}
    for root in (*roots, Path(sysconfig.get_path("stdlib"))):
        for path in root.rglob("*"):
            if path.suffix in ENDINGS and path.is_file() and not path.is_symlink():
                name = str(path.relative_to(root))
                found[name.partition("-packages/")[2] or name] = path
    return sorted(found.items(), key=lambda item: hashlib.sha256(item[0].encode()).digest())


def texts(limit: int) -> Iterator[tuple[str, str]]:
    """Yield the name and text of files, up to this number of characters."""
    seen: set[bytes] = set()
    for name, path in files():
        try:
            text = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.sha256(text.encode()).digest()
        lines = text.count("\n") + 1
        if digest not in seen and 400 <= len(text) <= 400_000 and len(text) <= 90 * lines:
            yield name, text
            limit -= len(text)
        seen.add(digest)
        if limit < 0:
            return


def pieces(text: str) -> Iterator[str]:
    """Yield the parts of a text, each up to the end of a line."""
    while len(text) > PIECE:
        end = text.rfind("\n", 200, PIECE) + 1 or PIECE
        yield text[:end]
        text = text[end:]
    if text.strip():
        yield text


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.text_model", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=Path("build/text"))
    parser.add_argument("--megabytes", type=int, default=60)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[str]] = {"train": [], "test": []}
    for number, (name, text) in enumerate(texts(args.megabytes * 10**6)):
        split = rows["train" if number % 50 else "test"]
        split += [json.dumps({"prompt": f"{name}\n", "completion": p}) for p in pieces(text)]
    for split_name, lines in rows.items():
        random.Random(0).shuffle(lines)
        (args.out / f"{split_name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{split_name}: {len(lines)} pieces, {sum(map(len, lines)) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
