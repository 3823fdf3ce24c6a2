#!/usr/bin/env bash
# datasets 5.2.0: load_dataset("json") changes right answers: dates become datetime objects, large integers lose digits.
#
# Guess:    a JSON string stays a string, and a JSON integer stays an integer (or the load fails).
# Behavior: a column whose strings all look like ISO dates becomes timestamps; one "noon" in it keeps all as text. Integers
#           become float64 as soon as one row has a decimal, or beyond 64 bits, without the error that
#           Dataset.from_list raises for the same rows.
# Output:   "2024-03-01" -> datetime.datetime(2024, 3, 1, 0, 0), whose text is "2024-03-01 00:00:00".
#           9007199254740993 -> 9007199254740992.0 next to 0.5.
# Why:      a reward function that compares the completion with str(answer) never matches, on exactly these files; and
#           whether it happens depends on the other rows. Write answers as text with a prefix, or pass features=.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile datasets==5.2.0 pyarrow==26.0.1
cd "$folder"
HF_HOME="$folder/cache" "$folder/venv/bin/python" - <<'PY'
import json
from pathlib import Path

import datasets

datasets.disable_progress_bars()


def load(name, answers):
    Path(name).write_text("".join(json.dumps({"answer": answer}) + "\n" for answer in answers))
    found = datasets.load_dataset("json", data_files=name, split="train")["answer"][:]
    print(f"{answers} -> {found}")
    return found


assert str(load("dates.jsonl", ["2024-03-01", "2023-01-01"])[0]) == "2024-03-01 00:00:00"
assert load("times.jsonl", ["2024-03-01", "noon"])[0] == "2024-03-01"
assert load("large.jsonl", [9007199254740993, 7]) == [9007199254740993, 7]
assert load("decimals.jsonl", [9007199254740993, 0.5]) == [9007199254740992.0, 0.5]
try:
    datasets.Dataset.from_list([{"answer": 0.5}, {"answer": 9007199254740993}])
except Exception as error:
    print("Dataset.from_list:", error)
else:
    raise AssertionError("from_list takes the integer")
PY
