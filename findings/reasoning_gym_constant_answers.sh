#!/usr/bin/env bash
# reasoning-gym 0.1.25: two verifiers pay a constant answer as if the question had been solved.
#
# Guess:    a constant wrong answer gets about the base rate, and a refusal gets 0.
# Behavior: game_of_life_halting compares bool(answer) with bool("True") or bool("False"). A text that is not empty is
#           true, so every answer is right. coin_flip pays by the distance to the probability, and 0 is near most of them.
# Output:   game_of_life_halting: mean reward 1.00 for "I do not know"; coin_flip: mean reward 0.93 for "0".
# Why:      the first set has no gradient at all (every group has equal rewards), the second teaches to answer 0. Before
#           training on a set, score a few constant answers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile reasoning-gym==0.1.25
"$folder/venv/bin/python" - <<'PY'
import reasoning_gym


def mean(name, answer):
    data = reasoning_gym.create_dataset(name, size=200, seed=0)
    exact = sum(answer == entry["answer"] for entry in data) / 200
    score = sum(float(data.score_answer(answer, entry)) for entry in data) / 200
    print(f"{name}: {answer!r} gets {score:.3f} on average; it is the right answer to {exact:.1%} of the questions")
    return score, exact


assert mean("game_of_life_halting", "I do not know")[0] == 1
assert mean("game_of_life_halting", "False")[0] == mean("game_of_life_halting", "True")[0] == 1
score, exact = mean("coin_flip", "0")
assert score > 0.8 and exact < 0.2
PY
