"""docs/rewards.md: its functions score as it says, and one that compares a group trains right."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import jetrl
from jetrl.errors import RunStopped
from jetrl.tasks import Scorer
from jetrl.tasks.dataset import Dataset

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
ROWS = [
    {"prompt": f"{n}+1=", "answer": str(n + 1), "kind": "sum" if n < 9 else "other"}
    for n in range(10)
]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("\n".join(blocks("python")))
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return tmp_path


def rewards(checker: Any, *texts: str, **options: Any) -> list[float | None]:
    given = {"checker": checker, "format": "text", **options}
    prompt = next(iter(Dataset("rows.jsonl", **given).prompts("train")))
    with Scorer("dataset", "rows.jsonl", given, workers=1, timeout_s=60) as scorer:
        results = scorer.score([(prompt, text) for text in texts])
    assert [result.failure for result in results] == [""] * len(texts)
    return [result.score.reward for result in results]


@pytest.mark.parametrize(
    "name, texts, expected",
    [
        ("right", ["1", "9"], [1.0, 0.0]),
        ("tagged", ["<think>a</think> b", "b"], [1.0, 0.0]),
        ("short", ["a" * 100, ""], [-0.1, 0.0]),
        ("shorter_than_most", ["a", "aa", "aaa", "aaaa"], [0.75, 0.5, 0.25, 0.0]),
        ("judged", ["because", "so"], [1.0, 0.0]),
        ("only_sums", ["+", "1"], [1.0, 0.0]),
        ("compute_score", ["1", "9"], [1.0, 0.0]),
    ],
)
def test_each_function_scores_as_the_page_says(
    mine: Path, name: str, texts: list[str], expected: list[float]
) -> None:
    assert rewards(f"mine.py:{name}", *texts) == expected


def test_the_weighted_sum_is_that_of_the_page(mine: Path) -> None:
    (options,) = (tomllib.loads(block)["task"]["options"] for block in blocks("toml"))
    assert rewards(texts := options["checker"], "1", weights=options["weights"]) == [1.5 - 0.0001]
    assert len(texts) == 3


def trained(name: str, reward: Any, steps: int) -> Any:
    return jetrl.train(
        "demo",
        data=ROWS,
        rewards=reward,
        task={"options": {"format": "text"}},
        run={"name": name},
        sft={"steps": 0},
        rollout={"prompts_per_step": 4, "samples_per_prompt": 8, "max_tokens": 8},
        train={"lr": 3e-3, "updates_per_step": 1},
        eval={"every": 0},
        report={"enabled": False},
        loop={"steps": steps},
    )


def test_a_reward_that_only_compares_a_group_trains(mine: Path) -> None:
    """Alone in a group a completion is shorter than none: nothing would be learned."""
    space: dict[str, Any] = {}
    exec("\n".join(blocks("python")), space)  # the page's own code

    def compared(completions, prompts, log_metric):
        log_metric("characters", sum(map(len, completions)) / len(completions))
        return space["shorter_than_most"](completions, prompts)

    result = trained("shorter", compared, steps=8)
    lines = (result.run_path / "metrics.jsonl").read_text().splitlines()
    lengths = [json.loads(line)["reward/part/characters"] for line in lines]
    assert lengths[-1] < 0.5 * lengths[0], lengths


def test_a_step_without_a_reward_stops_the_run_and_says_why(mine: Path) -> None:
    def nothing(completions):
        return [None] * len(completions)

    with pytest.raises(RunStopped, match="every reward function returned None for all 32 compl"):
        trained("nothing", nothing, steps=1)

    def broken(completions, prompts):
        return [1 / (len(set(prompts)) < 2)] * len(completions)  # the self-test asks one prompt

    words = "none of the step's 32 completions .* reward function broken raised ZeroDivisionError"
    with pytest.raises(RunStopped, match=words):
        trained("broken", broken, steps=1)
