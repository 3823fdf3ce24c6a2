"""`benchmarks.plan_error` on a tiny model, and the rule by which it compares two plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import plan_error
from jetrl.cli.main import main

TEXT = "".join(
    json.dumps({"prompt": f"{i} + {i} = ", "completion": str(2 * i)}) + "\n" for i in range(200)
)
SHAPE = [
    "--hidden-size",
    "64",
    "--intermediate-size",
    "128",
    "--num-layers",
    "1",
    "--head-dim",
    "64",
]
SHAPE += ["--num-heads", "2", "--num-kv-heads", "1", "--vocab-size", "300", "--dtype", "float32"]


def test_errors_follow_the_formats(tmp_path: Path) -> None:
    text, plain, out = (tmp_path / name for name in ("rows.jsonl", "plain.txt", "out.json"))
    text.write_text(TEXT)
    plain.write_text(TEXT)
    model = str(tmp_path / "model")
    assert main(["init", model, *SHAPE, "--tokenizer", "bpe", "--text", str(text)]) == 0
    rows = ["--row", "int8 grad_output=int8", "--row", "integer", "--row", "fp32"]
    sizes = ["--tokens", "50", "--length", "17", "--gradients", "1"]
    texts = ["--text", str(text), "--text", str(plain)]
    plan_error.main([model, *rows, *sizes, *texts, "--out", str(out)])
    found = json.loads(out.read_text())
    assert found["tokens"] == {"rows.jsonl": 34, "plain.txt": 34}
    *others, fp32 = (found["rows"][i : i + 2] for i in (0, 2, 4))
    for row in fp32:  # sums in another order: log-probs of 5 to a few units of 2**-23 times 5
        assert max(map(abs, row["kl_each"])) < 3e-7
        assert row["gradient_error"] < 1e-4
    for rows in others:
        for row in rows:
            assert 3e-7 < min(row["kl_each"]) < max(row["kl_each"]) < 1e-4
            assert 1e-3 < row["gradient_error"] < 0.5
            assert len(row["kl_each"]) == 2
    last = found["comparisons"][-1]
    assert (last["plan"], last["kl_verdict"]) == ("fp32", "no worse")
    assert last["gradient_error_verdict"] == "no worse"


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ((0.02, 0.03, 0.02, 0.03), "no worse"),
        ((0.2, 0.3, 0.2, 0.3), "worse"),
        ((-0.5, 0.6, -0.3, 0.4), "undecided"),
        ((-0.2, -0.1, -0.3, -0.2), "no worse"),
    ],
)
def test_the_rule_needs_a_difference_and_its_error(
    changes: tuple[float, ...], verdict: str
) -> None:
    base = [1.0, 2.0, 1.0, 2.0]
    first = [{"plan": "int8", "kl_each": base[:2]}, {"plan": "int8", "kl_each": base[2:]}]
    ours = [b + c for b, c in zip(base, changes, strict=True)]
    rows = [{"plan": "integer", "kl_each": ours[:2]}, {"plan": "integer", "kl_each": ours[2:]}]
    found = plan_error.compared(rows, first)
    assert found["kl_verdict"] == verdict
    assert found["kl_change_percent"] == pytest.approx(100 * sum(changes) / 6, abs=0.01)
    assert "gradient_error_verdict" not in found
