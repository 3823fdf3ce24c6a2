#!/usr/bin/env bash
# math-verify 0.9.0: \sin 30^\circ is the sine of 30 radians.
#
# Guess:    \sin 30^\circ is 1/2, and the degree sign means pi/180.
# Behavior: the degree sign is removed before parsing. 30 stays, and sympy takes it as radians.
# Output:   parse gives sin(30). Gold 1/2, answer \sin 30^\circ: False. Gold \pi/2, answer 90^\circ: False.
#           Gold 90^\circ, answer 90: True, so angles themselves look right in a first test.
# Why:      correct but unevaluated trigonometry gets reward 0, and a gold with \sin or \tan of degrees can never be met.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile math-verify==0.9.0 latex2sympy2-extended==1.11.0 sympy==1.14.0
"$folder/venv/bin/python" - <<'PY'
from math_verify import parse, verify


def judge(gold, answer):
    result = verify(parse(f"${gold}$"), parse(f"${answer}$"))
    print(f"gold {gold}, answer {answer}: {result}")
    return result


read = str(parse(r"$\sin 30^\circ$")[0])
print(r"\sin 30^\circ is read as", read)
assert read == "sin(30)"
assert not judge(r"\frac{1}{2}", r"\sin 30^\circ")
assert not judge(r"\frac{\pi}{2}", r"90^\circ")
assert judge(r"90^\circ", "90")
PY
