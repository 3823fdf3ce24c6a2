#!/usr/bin/env bash
# math-verify 0.9.0: very small numbers of different size are equal.
#
# Guess:    1.6e-19 and 6.6e-34 differ by fifteen orders of magnitude, so verify() returns False.
# Behavior: the tolerances are absolute, not relative. Two decimals are rounded to six digits behind the point. For products
#           such as 1.6 \times 10^{-19} the difference is evaluated with sympy's chop, which makes a tiny difference 0.
# Output:   gold 1.6e-19, answer 6.6e-34: True. Gold 0.0000003, answer 0.0000001: True. Gold 1.6e19, answer 6.6e18: False.
# Why:      on physics and chemistry questions with small answers, wrong small numbers earn the full reward.
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


assert judge(r"1.6\times 10^{-19}", r"6.6\times 10^{-34}")
assert judge("0.0000003", "0.0000001")
assert not judge(r"1.6\times 10^{19}", r"6.6\times 10^{18}")
PY
