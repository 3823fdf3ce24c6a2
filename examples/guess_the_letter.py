"""A game of several turns with the `openai` client, for the task `endpoint`: guess a letter.

    jetrl train model=DIRECTORY task=endpoint task.options.harness=examples/guess_the_letter.py:Game

The model sees `a to g?` and answers with a letter; then it hears `earlier` or `later`, until it has
found the letter or used its turns. With 7 letters and 3 turns, bisection always finds it.
"""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


class Game:
    """Plays games with the first `count` letters and at most `turns` guesses."""

    def __init__(self, count: int = 7, turns: int = 3) -> None:
        self.letters, self.turns = ALPHABET[:count], turns
        # One client for all episodes: a new one takes longer than an answer of a small model.
        self.client = AsyncOpenAI(base_url="http://127.0.0.1", api_key="none")

    def rows(self, split: str) -> list[dict[str, Any]]:
        """Return a game for each letter; there are no others to hold out."""
        return [{"letter": letter} for letter in self.letters]

    async def play(self, episode: Any) -> dict[str, float]:
        client = self.client.with_options(base_url=episode.base_url, api_key=episode.api_key)
        letter = episode.row["letter"]
        said = f"{self.letters[0]} to {self.letters[-1]}?"
        messages = []
        for turn in range(1, self.turns + 1):
            messages.append({"role": "user", "content": said})
            answer = await client.chat.completions.create(
                model=episode.model, messages=messages, max_tokens=4
            )
            guess = answer.choices[0].message.content or ""
            if guess == letter:
                return {"reward": 1.0, "turns": turn}
            messages.append({"role": "assistant", "content": guess})
            known = len(guess) == 1 and guess in self.letters
            said = "invalid" if not known else "later" if guess < letter else "earlier"
        return {"reward": 0.0, "turns": self.turns}
