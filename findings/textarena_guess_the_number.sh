#!/usr/bin/env bash
# TextArena 0.7.4: a lost game of GuessTheNumber pays almost as much as a won one, and lasts a guess longer than it says.
#
# Guess:    two answers against the rules end a game with -1, the default of an invalid move; "within 10 turns" is 10 guesses.
# Behavior: a game that is lost so pays 1 - (distance of the last guess) / 19; the limit is looked at before the turn is counted.
# Output:   a player who says [10], then breaks the rules twice, wins 1 of 20 games and has a mean reward of 0.74. Eleven
#           guesses are taken.
# Why:      a mean reward of 0.74 looks like a good player, and GRPO may learn to give up near the number. Reward wins only
#           (reward == 1), and pass max_turns - 1 for the number of guesses that the prompt names.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile textarena==0.7.4
"$folder/venv/bin/python" - <<'PY'
import textarena


def reward_of(number, answers):
    env = textarena.make("GuessTheNumber-v0")
    env.reset(num_players=1, seed=0)
    game = env
    while hasattr(game, "env"):  # wrappers
        game = game.env
    game.game_number = game.state.game_state["game_number"] = number
    for taken, answer in enumerate(answers, 1):
        done, _ = env.step(answer)
        if done:
            return env.close()[0][0], taken
    return None, taken


rewards = [reward_of(number, ["[10]", "no", "no"])[0] for number in range(1, 21)]
wins, mean = rewards.count(1), sum(rewards) / 20
print(f"one guess, then against the rules: {wins} of 20 games won, mean reward {mean:.2f}")
assert wins == 1 and 0.7 < mean < 0.8, "lost games no longer pay"
_, taken = reward_of(20, [f"[{number}]" for number in range(1, 21)])
print(f"guesses in a game of 10 turns: {taken}")
assert taken == 11, "the limit is another one"
PY
