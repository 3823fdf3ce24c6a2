#!/usr/bin/env bash
# transformers 5.23.0: a Qwen directory without tokenizer.json loads, and its tokenizer turns every text into no tokens.
#
# Guess:    AutoTokenizer raises an error if the vocabulary is missing.
# Behavior: for model_type qwen2 it builds an empty tokenizer from tokenizer_config.json. For llama it raises.
# Output:   vocabulary of 1 token, encode("What is 2 + 2?") is [].
# Why:      a partly copied checkpoint trains on empty prompts, or scores empty completions, and no step fails for it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile transformers==5.23.0 tokenizers==0.23.3
cd "$folder"
"$folder/venv/bin/python" - 2>"$folder/errors" <<'PY' || { tail -20 "$folder/errors"; exit 1; }
import json
from pathlib import Path

from transformers import AutoTokenizer

for family in ("qwen2", "llama"):
    Path(family).mkdir()
    Path(family, "config.json").write_text(json.dumps({"model_type": family}))
    Path(family, "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
tokenizer = AutoTokenizer.from_pretrained("qwen2")
tokens = tokenizer.encode("What is 2 + 2?")
print(f"qwen2: {type(tokenizer).__name__}, vocabulary {len(tokenizer)}, tokens {tokens}")
assert tokens == []
try:
    AutoTokenizer.from_pretrained("llama")
except ValueError as error:
    print("llama:", str(error).splitlines()[0])
else:
    raise AssertionError("llama loads without a vocabulary")
PY
