"""Raw text of this repository: grade-school math, documents and Python sources.

    python -m benchmarks.raw_text build/text

Writes train.jsonl and test.jsonl for the task `text`, with a document per row: the questions and
answers of data/gsm8k (MIT, see its LICENSE), in their own splits, and this clone's committed .md
and .py files (Apache-2.0), a tenth of them held out by name. Prints sizes and a digest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SPLITS = ("train", "test")


def documents(split: str) -> Iterator[str]:
    """Yield the documents of a split, in a fixed order."""
    with open(ROOT / "data" / "gsm8k" / f"{split}.jsonl", encoding="utf-8") as rows:
        for row in map(json.loads, rows):
            yield f"{row['question']}\n{row['answer']}\n"
    words = ["git", "ls-files", "*.md", "*.py"]
    listed = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in sorted(listed.stdout.split()):
        is_held_out = hashlib.blake2b(name.encode(), digest_size=1).digest()[0] < 26
        text = (ROOT / name).read_text(encoding="utf-8")
        if is_held_out == (split == "test") and text.strip():
            yield text


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="raw_text", description=__doc__)
    parser.add_argument("out", type=Path, help="folder to write into")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        lines = "".join(json.dumps({"text": text}) + "\n" for text in documents(split))
        (args.out / f"{split}.jsonl").write_text(lines, encoding="utf-8")
        digest = hashlib.sha256(lines.encode()).hexdigest()[:16]
        print(f"{split}: {lines.count(chr(10)):,} documents, {len(lines):,} bytes, {digest}")


if __name__ == "__main__":
    main()
