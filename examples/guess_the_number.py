"""An agent loop with the `openai` client, for the task `endpoint`: TextArena's GuessTheNumber.

    pip install textarena openai
    jetrl train model=DIRECTORY task=endpoint task.options.harness=examples/guess_the_number.py:Game

The game is TextArena's own, with its hints. The reward is 1 for the number, else 0; a part is that
of TextArena, which pays for a near guess even in a game that was lost by answers against the rules.
The model sees `1 to 20?` and then hints, and answers with a number in brackets.
"""

from __future__ import annotations

import random
from typing import Any

from openai import AsyncOpenAI
from textarena.envs.GuessTheNumber.env import GuessTheNumberEnv


class Game:
    """Plays games with numbers up to `largest` and at most `turns` guesses."""

    def __init__(self, largest: int = 20, turns: int = 5) -> None:
        self.largest, self.turns = largest, turns

    def rows(self, split: str) -> list[dict[str, Any]]:
        """Return 500 games for training and 100 others, each named by its seed."""
        seeds = range(500) if split == "train" else range(1000, 1100)
        return [{"seed": seed} for seed in seeds]

    async def play(self, episode: Any) -> dict[str, float]:
        random.seed(episode.row["seed"])  # TextArena draws its number from the global generator
        # TextArena 0.7.4 takes one guess more than it says.
        game = GuessTheNumberEnv(max_number=self.largest, max_turns=self.turns - 1)
        game.reset(num_players=1)
        messages = [{"role": "user", "content": f"1 to {self.largest}?"}]
        async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key) as client:
            guesses = 0
            while True:
                guesses += 1
                answer = await client.chat.completions.create(
                    model=episode.model, messages=messages, max_tokens=8
                )
                said = answer.choices[0].message.content or ""
                done, _ = game.step(said)
                if done:
                    break
                _, seen = game.state.observations[0][-1][:2]
                hint = "invalid" if "invalid" in seen.lower() else seen.split()[-1].strip(".")
                messages += [
                    {"role": "assistant", "content": said},
                    {"role": "user", "content": hint},
                ]
        reward = float((game.state.rewards or {}).get(0, 0.0))
        return {"reward": float(reward == 1.0), "textarena": reward, "guesses": float(guesses)}
