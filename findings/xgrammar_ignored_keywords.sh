#!/usr/bin/env bash
# xgrammar 0.2.8: uniqueItems, not, dependentRequired and if/then of a JSON schema are dropped without a word.
#
# Guess:    constrained decoding gives documents that are valid for the schema, or the compiler refuses the schema.
# Behavior: the grammar is compiled without these keywords and accepts what they forbid. llguidance 1.9.1 refuses each of
#           the four schemas by the keyword's name.
# Output:   [1, 1] with uniqueItems, "x" with not string, {"a": 1} with dependentRequired or if/then: all accepted.
# Why:      rollouts with tools or structured answers are taken as valid by construction. Validate each one anyway, or the
#           reward function meets arguments that the schema forbids.
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
two = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
cases = {
    "uniqueItems": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 1]"),
    "not": ({"not": {"type": "string"}}, '"x"'),
    "dependentRequired": ({**two, "dependentRequired": {"a": ["b"]}}, '{"a": 1}'),
    "if": ({**two, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, '{"a": 1}'),
}
for keyword, (schema, document) in cases.items():
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    accepted = bool(matcher.accept_string(document) and matcher.accept_token(256))
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    refusal = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar).get_error()
    print(f"{keyword}: xgrammar accepts {document}: {accepted}; llguidance: {refusal.splitlines()[0]}")
    assert accepted and keyword in refusal
PY
