"""Tasks mixed: each prompt keeps its own task, in a scorer's process too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jetrl.errors import UserError
from jetrl.tasks import Scorer, get_task, read_prompts

SUMS = {"name": "arithmetic", "options": {"digits": 1}}
MINUS = {"name": "arithmetic", "label": "minus", "weight": 3, "options": {"operators": "-"}}


def rows(tmp_path: Path) -> dict[str, object]:
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": f"is {n} odd?", "answer": str(n)}) for n in range(10)]
    file.write_text("\n".join(lines))
    return {"name": "dataset", "path": str(file), "label": "rows"}


def test_prompts_are_of_their_tasks_and_scored_by_them(tmp_path: Path) -> None:
    tasks = [SUMS, MINUS, {**rows(tmp_path), "system_prompt": "Be brief."}]
    mix = get_task("mix", tasks=tasks)
    prompts = read_prompts(mix, "train")
    assert [p.task for p in prompts] == sorted(
        (p.task for p in prompts), key=["arithmetic", "minus", "rows"].index
    )
    first = {p.task: p for p in reversed(prompts)}
    assert mix.weights == {"arithmetic": 1.0, "minus": 3.0, "rows": 1.0}
    assert first["minus"].id.startswith("minus/")
    assert mix.stops(first["minus"]) == ("\n",)
    assert mix.stops(first["rows"]) == ()
    assert first["rows"].messages[0] == {"role": "system", "content": "Be brief."}
    assert mix.demonstration(first["minus"]) == first["minus"].answer
    assert mix.alphabet is None
    items = [(p, p.answer if p.task != "rows" else f"#### {p.answer}") for p in first.values()]
    with Scorer("mix", None, {"tasks": tasks}, workers=1) as scorer:
        assert [scored.score.reward for scored in scorer.score(items)] == [1.0, 1.0, 1.0]
        assert [s.score.reward for s in scorer.score([(p, "8") for p, _ in items])] == [0.0] * 3
    assert get_task("mix", tasks=tasks[:2]).alphabet == "0123456789+=-"


def test_files_of_a_mix_have_their_own_names(tmp_path: Path) -> None:
    first, second = tmp_path / "easy.jsonl", tmp_path / "hard.jsonl"
    for file in (first, second, tmp_path / "more" / "easy.jsonl"):
        file.parent.mkdir(exist_ok=True)
        file.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 20)
    tasks = [{"name": str(first)}, {"name": "dataset", "path": str(second)}]
    mix = get_task("mix", tasks=tasks)
    assert {prompt.task for prompt in read_prompts(mix, "train")} == {"easy", "hard"}
    again = {"name": str(tmp_path / "more" / "easy.jsonl")}
    with pytest.raises(UserError, match=r"tasks\[2\]: a second task called 'easy'; give one a `l"):
        get_task("mix", tasks=[*tasks, again])
    assert [*get_task("mix", tasks=[*tasks, {**again, "label": "more"}]).tasks][2] == "more"


@pytest.mark.parametrize(
    "tasks, message",
    [
        ([], "give one"),
        ([{"weight": 1}], r"tasks\[0\].name is missing"),
        ([SUMS, {**MINUS, "weigth": 2}], r"tasks\[1\].weigth: no such key; did you mean weight\?"),
        ([SUMS, {**MINUS, "weight": -1}], r"tasks\[1\].weight = -1: should be greater"),
        ([SUMS, {**MINUS, "weight": float("nan")}], r"tasks\[1\].weight = nan"),
        ([{**SUMS, "weight": 0}, {**MINUS, "weight": 0}], "all weights are 0"),
        ([SUMS, SUMS], r"tasks\[1\]: a second task called 'arithmetic'; give one a `label`"),
        ([SUMS, {**MINUS, "label": "my/arithmetic"}], r"tasks\[1\]: a second task called 'arithm"),
        ([{**SUMS, "label": "a_b"}, {**MINUS, "label": "a b"}], "a second task called 'a_b'"),
        ([{**SUMS, "label": "mix"}], r"tasks\[0\]: 'mix' is the name of the whole mix; give it a"),
        ([SUMS, {"name": "gsm9k"}], r"tasks\[1\]: unknown task 'gsm9k'; did you mean gsm8k\?"),
        ([{"name": "arithmetic", "options": {"digit": 2}}], r"tasks\[0\]: .*did you mean digits"),
        ([{"name": "mix"}], "a mix in a mix"),
        ([{**SUMS, "system_prompt": "Add."}], r"system_prompt, but its prompt .* is plain text"),
    ],
)
def test_bad_mixes(tasks: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_prompts(get_task("mix", tasks=tasks), "train")
