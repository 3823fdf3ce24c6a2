"""The study of a reward model's plans: its errors, its rule, and a tiny run on a CPU."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import reward_model
from jetrl.errors import UserError
from jetrl.models.tiny import make_tiny

ANSWER = "He has 48/2 = <<48/2=24>>24 clips.\nThat is 24+3 = <<24+3=27>>27.\n#### 27"


def test_an_error_changes_one_result_and_nothing_else() -> None:
    seen = set()
    for seed in range(200):
        wrong = reward_model.with_error(ANSWER, random.Random(seed))
        assert wrong is not None
        changed = [old != new for old, new in zip(ANSWER.split(), wrong.split(), strict=True)]
        assert sum(changed) == 1
        [result] = [word for word, is_other in zip(wrong.split(), changed, strict=True) if is_other]
        value, shown = result.rstrip(".").split("=")[-1].split(">>")
        assert value == shown
        seen.add((changed.index(True), int(value)))
    assert len({place for place, _ in seen}) == 2
    assert {abs(value - 24) for place, value in seen if value < 26 and place < 5} <= {*range(1, 13)}
    assert reward_model.with_error("#### 3", random.Random(0)) is None


def test_ranks_and_verdicts_follow_the_rule() -> None:
    a = np.array([0.1, 3.0, 2.0, 9.0])
    assert reward_model.rank_correlation(a, a**3 + 1) == pytest.approx(1)
    assert reward_model.rank_correlation(a, -a) == pytest.approx(-1)

    def verdict(changes: list[float], base: float = 0.8, rank: float = 0.995) -> dict[str, Any]:
        rows = [
            {"plan": plan, "accuracy": base, "accuracy_change": change, "rank_correlation": rank}
            for change in changes
            for plan in reward_model.PLANS
        ]
        return reward_model.verdicts(rows)[1]

    same = [0.001, -0.002, 0.0, 0.002, -0.001]
    assert (verdict(same)["verdict"], verdict(same)["keeps_order"]) == ("as bf16", True)
    assert not verdict(same, rank=0.98)["keeps_order"]
    assert verdict(same, base=0.99)["verdict"] == verdict(same[:4])["verdict"] == "nothing is shown"
    assert verdict([change - 0.03 for change in same])["verdict"] == "worse than bf16"
    assert verdict([-0.05, 0.05, 0.0, 0.01, -0.02])["verdict"] == "undecided"


def test_one_set_of_weights_is_scored_under_each_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    row = json.dumps({"question": "How many clips has he?", "answer": ANSWER})
    for split in ("train", "test"):
        (tmp_path / "data" / "gsm8k" / f"{split}.jsonl").write_text(f"{row}\n" * 9)
    monkeypatch.setattr(reward_model, "ROOT", tmp_path)
    model = make_tiny(tmp_path / "tiny", hidden_size=64, num_layers=1)
    out = tmp_path / "reward_model.json"
    words = ["--seeds", "1", "--steps", "2", "--pairs", "6", "--device", "cpu", "--out", str(out)]
    tiny = ["sft.examples_per_step=4", "train.tokens_per_micro_batch=4096", "sft.lr=1e-2"]
    tiny += ["task.options.format=text"]
    reward_model.main([str(model), *tiny, *words])
    found = json.loads(out.read_text())
    assert [row["plan"] for row in found["rows"]] == [*reward_model.PLANS]
    base, *others = found["rows"]
    assert (base["pairs"], base["accuracy_change"], base["other_order"]) == (6, 0, 0)
    assert base["rank_correlation"] == pytest.approx(1)
    assert base["score_std"] > 0, "two updates have moved the head from zero"
    assert all(row["mean_abs_score_change"] > 0 for row in others)
    assert {row["verdict"] for row in found["verdicts"]} == {"nothing is shown"}
    # The same command continues, another one is refused.
    longer = [model, *tiny, *words[2:], "--seeds", "1"]
    with pytest.raises(UserError, match=r"reward_model\.json: the file of another command"):
        reward_model.main([*map(str, longer), "--steps", "3"])
    found["rows"][0]["accuracy"] = 0.25
    out.write_text(json.dumps(found))
    reward_model.main([str(model), *tiny, *words])
    assert json.loads(out.read_text()) == found
