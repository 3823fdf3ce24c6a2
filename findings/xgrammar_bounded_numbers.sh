#!/usr/bin/env bash
# xgrammar 0.2.8: a bound on a number forbids more than six decimals and any exponent, and a pattern must match in full.
#
# Guess:    {"type": "number", "maximum": 1} allows each number up to 1, and "pattern" searches, as JSON Schema says.
# Behavior: without a bound 0.1234567, 5e-1 and 1e-3 pass. With one, all three are rejected, and 0.123456 passes. A pattern
#           [0-9] rejects "x1". llguidance 1.9.1 takes 0.1234567 and "x1", and rejects the exponents too.
# Output:   0.1234567, 5e-1, 1e-3: True without a bound, False with maximum 1. "x1" for pattern [0-9]: False.
# Why:      a probability or a rate with a range is a usual tool argument. The mask makes the model's right answer
#           impossible, and the forced tokens have tiny log-probs under the unmasked policy.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile xgrammar==0.2.8 torch==2.13.0 numpy==2.4.6 llguidance==1.9.1
"$folder/venv/bin/python" - <<'PY'
import json

import llguidance
import xgrammar

vocabulary = [bytes([i]) for i in range(256)] + [b"<eos>"]
compiler = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[256])
)


def judge(schema, document):
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    first = bool(matcher.accept_string(document) and matcher.accept_token(256))
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    other = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
    tokens = list(document.encode())
    second = other.try_consume_tokens(tokens) == len(tokens) and other.is_accepting()
    print(f"{json.dumps(schema)} {document}: xgrammar {first}, llguidance {second}")
    return first, second


free, bounded = {"type": "number"}, {"type": "number", "maximum": 1}
assert judge(free, "0.1234567") == judge(bounded, "0.123456") == (True, True)
assert judge(bounded, "0.1234567") == (False, True)
for number in ("5e-1", "1e-3"):
    assert judge(free, number) == (True, True)
    assert judge(bounded, number) == (False, False)
assert judge({"type": "string", "pattern": "[0-9]"}, '"x1"') == (False, True)
PY
