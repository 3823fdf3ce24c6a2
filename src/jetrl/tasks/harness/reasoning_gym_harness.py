"""A harness for any data set of reasoning-gym: one question, one answer, its own score.

It runs in the harness process, perhaps under another Python, so it imports nothing of jetrl.
"""

from __future__ import annotations

import re
from typing import Any

from openai import AsyncOpenAI
from reasoning_gym import create_dataset

TEST_OFFSET = 1 << 30  # question i of a data set with seed s is that of seed s + i
INSTRUCTION = "Give only the final answer, between <answer> and </answer>."
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


class Harness:
    """Asks the questions of a data set; `options` are the data set's own.

    Args:
        instruction: Text after the question. Without one, the whole answer is scored.
    """

    def __init__(
        self,
        name: str,
        size: int = 1000,
        test_size: int = 100,
        seed: int = 0,
        instruction: str = INSTRUCTION,
        **options: Any,
    ) -> None:
        starts = {"train": (size, seed), "test": (test_size, seed + TEST_OFFSET)}
        self._data = {
            split: create_dataset(name, size=count, seed=start, **options)
            for split, (count, start) in starts.items()
        }
        self._instruction = instruction

    def rows(self, split: str) -> list[dict[str, Any]]:
        questions = enumerate(self._data[split])
        return [{"split": split, "index": i, "question": q["question"]} for i, q in questions]

    async def play(self, episode: Any) -> float:
        data = self._data[episode.row["split"]]
        entry = data[episode.row["index"]]
        question = f"{entry['question']}\n\n{self._instruction}".strip()
        async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key) as client:
            answer = await client.chat.completions.create(
                model=episode.model, messages=[{"role": "user", "content": question}]
            )
        said = answer.choices[0].message.content or ""
        if not self._instruction:
            return float(data.score_answer(said, entry))
        found = _ANSWER.findall(said)
        return float(data.score_answer(found[-1].strip() if found else None, entry))
