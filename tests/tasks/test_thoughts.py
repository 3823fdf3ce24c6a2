"""Every verifier reads the answer behind the thoughts, and none while a thought is open.

golden_thoughts.jsonl: `gold`, `completion` and whether it is `right`.
"""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from jetrl.models.tiny import train_bpe_tokenizer
from jetrl.session.sampling import encode_prompts
from jetrl.tasks import get_task
from jetrl.tasks.answers import check_math
from jetrl.tasks.dataset import get_checker
from jetrl.types import Prompt

LINES = Path(__file__).with_name("golden_thoughts.jsonl").read_text("utf-8").splitlines()
GOLDEN = [json.loads(line) for line in LINES]
SEVEN = Prompt(id="0", text="?", answer="7")
OPENED = dataclasses.replace(SEVEN, in_thought=True)
TAGS = "<answer>(.*?)</answer>"
FORM = "<think>.*?</think>\\s*<answer>(.*?)</answer>"


@pytest.mark.parametrize("case", GOLDEN, ids=[case["completion"][:40] for case in GOLDEN])
def test_values_are_read_behind_thoughts(case):
    assert check_math(case["gold"], case["completion"]).reward == case["right"]


@pytest.mark.parametrize(
    "checker, pattern, completion, right",
    [
        ("exact", None, "<think>8</think> 7", 1),
        ("exact", None, "8</think>\n7\n", 1),
        ("exact", None, "<think>7", 0),
        ("regex", TAGS, "<think><answer>8</answer></think><answer>7</answer>", 1),
        ("regex", TAGS, "<think><answer>7</answer></think>", 0),
        ("regex", TAGS, "<think>perhaps <answer>7</answer>", 0),
        ("regex", ".*", "<think>7", 0),
        ("regex", FORM, "<think>3+4</think> <answer>7</answer>", 1),  # asks for the thought
        ("regex", FORM, "<answer>7</answer>", 0),
    ],
)
def test_texts_are_read_behind_thoughts(checker, pattern, completion, right):
    score = get_checker(checker, pattern)(SEVEN, completion)
    assert getattr(score, "reward", score) == right


@pytest.mark.parametrize("completion, right", [("3+4 is 7", 0), ("8</think>7", 1)])
@pytest.mark.parametrize("checker", ["math", "exact", "regex", "gsm8k", "math500", "mmlu_pro"])
def test_a_thought_may_be_opened_by_the_prompt(checker, completion, right):
    if checker in ("math500", "gsm8k", "mmlu_pro"):
        task, prompt = get_task(checker), OPENED
        if checker == "mmlu_pro":
            completion = completion.replace("7", "Answer: B").replace("8", "Answer: C")
            prompt = dataclasses.replace(OPENED, answer="B")
        assert task.score(prompt, completion).reward == right
        assert (task.vote(prompt, completion) is not None) == right
        return
    check = get_checker(checker, "7" if checker == "regex" else None)
    score = check(OPENED, completion)
    assert getattr(score, "reward", score) == right


def test_answers_of_reasoning_gym_are_read_behind_thoughts():
    pytest.importorskip("reasoning_gym")
    task = get_task("reasoning_gym:chain_sum", size=1)
    (prompt,) = task.prompts("train")
    said = f"<answer>{prompt.answer}</answer>"
    assert task.score(prompt, f"<think><answer>x</answer></think>{said}").reward == 1
    for completion in (f"<think>{said}", f"<think>{said}</think>"):
        score = task.score(prompt, completion)
        assert score.reward < 1
        assert score.parts["answered"] == 0
    bare = get_task("reasoning_gym:chain_sum", size=1, format="text")
    assert bare.score(prompt, f"<think>x</think> {prompt.answer}").reward == 1


OPENING = "{% for m in messages %}{{ m['content'] }}{% endfor %}A:"


@pytest.mark.parametrize(
    "template, begun, in_thought",
    [
        (OPENING, "", False),
        (OPENING + "<think>\n", "", True),
        (OPENING + "<think>\n\n</think>\n\n", "", False),
        (OPENING, "<think>\nSo, ", True),
        (OPENING, "<think>\nSo.</think> ", False),
        (OPENING + "[THINK]", "", True),
    ],
)
def test_prompts_say_whether_they_open_a_thought(template, begun, in_thought, tmp_path):
    (tmp_path / "text.txt").write_text("so the answer is A: <think> </think>\n" * 20)
    tokenizer = train_bpe_tokenizer([tmp_path / "text.txt"], 300)
    tokenizer.chat_template = template
    asked = [{"role": "user", "content": "Think between <think> and </think>. 3+4? <think>"}]
    asked += [{"role": "assistant", "content": begun}] if begun else []
    row = {"prompt": asked, "answer": "7"}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    config = SimpleNamespace(max_position_embeddings=4096)
    model = SimpleNamespace(tokenizer=tokenizer, plain_text="replies", config=config, tower=None)
    task = get_task("dataset", path=str(tmp_path / "rows.jsonl"))
    (encoded, *_) = encode_prompts(model, task, "train")
    assert encoded.prompt.in_thought is in_thought
    assert task.score(encoded.prompt, "#### 7").reward == (not in_thought)
