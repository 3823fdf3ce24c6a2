#!/usr/bin/env bash
# transformers 5.23.0: AutoTokenizer ignores a part of tokenizer.json if config.json says qwen2.
#
# Guess:    AutoTokenizer gives the tokens of the tokenizer.json in the directory.
# Behavior: for model_type qwen2 (and qwen3, gpt2) it builds its own class, with the vocabulary and merges of the file but
#           its own pre-tokenizer, whatever tokenizer_class is declared. With model_type llama the file is used as it is.
# Output:   a file that splits digits in groups of three: "1234567" is 3 tokens from the file and with llama, 7 with qwen2.
#           Decoding gives the same text, so a round trip shows nothing.
# Why:      a Qwen2 architecture with another tokenizer (a model that was trained with one's own) gets token sequences it
#           has never seen, and an inference engine that reads tokenizer.json samples others than the trainer scores.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile transformers==5.23.0 tokenizers==0.23.3
cd "$folder"
"$folder/venv/bin/python" - 2>"$folder/errors" <<'PY' || { tail -20 "$folder/errors"; exit 1; }
import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

backend = Tokenizer(models.BPE())
backend.pre_tokenizer = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)
backend.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
backend.train_from_iterator(["123", "456", "7"] * 50, trainer)
expected = backend.encode("1234567").ids
print("tokenizer.json:", len(expected), "tokens")
for family, same in (("llama", True), ("qwen2", False)):
    folder = Path(family)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = tokenizer.encode("1234567", add_special_tokens=False)
    print(f"{family}: {type(tokenizer).__name__}, {len(found)} tokens, decoded {tokenizer.decode(found)!r}")
    assert (found == expected) == same
    assert tokenizer.decode(found) == "1234567"
PY
