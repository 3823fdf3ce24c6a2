"""Digests of runs: the definition, and the result of a comparison by digest."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest

from jetrl.errors import UserError
from jetrl.runs.digest import (
    START,
    Digest,
    Line,
    check_chain,
    fields_of,
    last_digest,
    match_digests,
    next_digest,
)
from jetrl.runs.overview import compare_runs, digest_in_words
from jetrl.types import Completion, Prompt, PromptInputs, Sample, Score


def sample(prompt: tuple[int, ...], tokens: dict[int, float], reward: float | None) -> Sample:
    return Sample(
        prompt=Prompt(id="p", text="x"),
        group=0,
        inputs=PromptInputs(prompt),
        completion=Completion(tuple(tokens), tuple(tokens.values()), "stop", "text"),
        score=Score(reward),
    )


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_a_digest_is_that_of_the_definition() -> None:
    samples = [sample((5, 6), {1: -0.5, 2: -0.25}, 1.0), sample((7,), {3: -1.5}, None)]
    metrics = {
        "policy/loss": 0.1,
        "critic/loss": float("nan"),
        "draft_head/loss": 3.0,
        "policy/grad_norm": 2.0,
        "timing/step_s": 9.0,
    }
    fields = fields_of(samples, metrics, ["a 2x3 00ff", "b  01"])
    assert fields == {
        "prompts": sha(struct.pack("<5i", 2, 5, 6, 1, 7))[:16],
        "tokens": sha(struct.pack("<5i", 2, 1, 2, 1, 3))[:16],
        "logprobs": sha(struct.pack("<i2fif", 2, -0.5, -0.25, 1, -1.5))[:16],
        "rewards": sha(struct.pack("<dQ", 1.0, 0x7FF8000000000000))[:16],
        "losses": sha(b"critic/loss nan\npolicy/loss 0x1.999999999999ap-4\n")[:16],
        "grad_norms": sha(b"policy/grad_norm 0x1.0000000000000p+1\n")[:16],
        "weights": sha(b"a 2x3 00ff\nb  01\n")[:16],
    }
    assert list(fields_of((), metrics, [])) == ["losses", "grad_norms", "weights"]
    assert {"run": sha(b"jetrl digest 1\n")} == START
    digest = next_digest(START, ("rl", 3), {"tokens": "12", "weights": "34"})
    text = f"{START['run']}\nrl 3\ntokens 12\nweights 34\n"
    assert digest == {"run": sha(text.encode()), "tokens": "12", "weights": "34"}


def chain(*values: int, sft: int = 0) -> dict[Line, Digest]:
    """The digests of supervised updates, and of steps whose tokens and weights are the values."""
    lines: dict[Line, Digest] = {}
    before = START
    for update in range(1, sft + 1):
        before = lines["sft", update] = next_digest(before, ("sft", update), {"losses": "0" * 16})
    for step, value in enumerate(values, start=1):
        fields = {"prompts": "0" * 16, "tokens": f"{value:016x}", "weights": f"{value:016x}"}
        before = lines["rl", step] = next_digest(before, ("rl", step), fields)
    return lines


def test_a_digest_that_does_not_follow_is_named() -> None:
    check_chain(chain(1, 2, 3, sft=2), "m")
    for line, name in (("rl", 2), "tokens"), (("rl", 2), "run"), (("sft", 1), "losses"):
        lines = chain(1, 2, 3, sft=2)
        lines[line] = {**lines[line], name: "f" * len(lines[line][name])}
        with pytest.raises(UserError, match=rf"^m: the digest of (supervised )?step {line[1]} "):
            check_chain(lines, "m")
    lines = chain(1, 2, 3)
    del lines["rl", 1]
    with pytest.raises(UserError, match=r"step 2 does not follow.* has lost lines$"):
        check_chain(lines, "m")
    check_chain({**chain(1), ("rl", 2): {}, ("rl", 3): {}}, "m")


def test_the_first_step_and_field_that_differ_are_found() -> None:
    first = chain(1, 2, 3, sft=1)
    assert match_digests(first, chain(1, 2, 3, sft=1)) == (True, ("rl", 3), (), ())
    assert match_digests(first, chain(1, 2, 3, 4, sft=1)) == (True, ("rl", 3), (), ())
    fields = ("tokens", "weights")
    assert match_digests(first, chain(1, 5, 3, sft=1)) == (False, ("rl", 2), fields, ())
    assert match_digests(first, chain(1, 2, sft=1)) == (False, ("rl", 3), (), ("other",))
    assert match_digests(first, chain(1, 2, 3, sft=2)) == (False, ("sft", 2), (), ("first",))
    without = {**chain(1, sft=1), ("rl", 2): {}, ("rl", 3): {}}
    assert match_digests(first, without) == (None, ("rl", 2), (), ("other",))
    assert match_digests(without, without) == (None, ("rl", 2), (), ("first", "other"))
    assert match_digests(without, chain(7, sft=1)) == (False, ("rl", 1), fields, ())
    assert match_digests({}, first).same is None


def test_the_digest_of_a_run_is_that_of_its_last_step() -> None:
    lines = chain(1, 2, sft=3)
    records = [{"phase": p, "step": s, "digest": d} for (p, s), d in lines.items()]
    assert last_digest(records) == lines["rl", 2]["run"]
    evaluated = [*records[:3], {"step": 0, "eval/arithmetic/mean": 0.5}]
    assert last_digest(evaluated) == lines["sft", 3]["run"]
    assert last_digest([*records, {"step": 3}]) == "", "its last step has none"
    assert last_digest([]) == ""


def with_digests(run: Path, digests: dict[Line, Digest]) -> Path:
    file = run / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if digest := digests.get((line.get("phase", "rl"), line["step"])):
            line["digest"] = digest
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.mark.parametrize(
    "other, same, words",
    [
        (chain(1, 2, 3), True, r"o: the same digest as f after step 3: [0-9a-f]{64}"),
        (
            chain(1, 4, 5),
            False,
            r"o: the digest differs from f's at step 2, first in tokens \(also weights\)",
        ),
        (chain(1, 2), False, "o: not compared with f by digest: no digest of step 3 in o "),
        ({}, False, "o: not compared with f by digest: no digest of step 1 in o "),
    ],
)
def test_a_comparison_says_it_in_a_sentence(
    make_run, other: dict[Line, Digest], same: bool, words: str
) -> None:
    first = with_digests(make_run("f", steps=3), chain(1, 2, 3))
    found = compare_runs([first, with_digests(make_run("o", steps=3), other)], check_digests=True)
    assert found.same_digest == same
    assert found.same, "the metrics are the same"
    assert re.match(words, digest_in_words(found.runs[1], found.runs[0]))


def test_steps_that_one_run_lacks_are_named(make_run, synthetic: SimpleNamespace) -> None:
    long = with_digests(make_run("long", steps=3), chain(1, 2, 3))
    short = with_digests(make_run("short", steps=2), chain(1, 2))
    found = compare_runs([long, short])
    said = digest_in_words(found.runs[1], found.runs[0])
    assert said == "short: not the same steps as long: short has no step 3"
    assert compare_runs([short, long]).same_digest
    empty = make_run("empty", steps=0)
    found = compare_runs([empty, short])
    assert "empty: no steps" in digest_in_words(found.runs[1], found.runs[0])
    assert not found.same_digest
    file = short / "metrics.jsonl"
    digest = chain(1, 2)["rl", 2]["tokens"]
    file.write_text(file.read_text().replace(digest, digest[::-1]))
    assert not compare_runs([long, short]).same_digest
    with pytest.raises(UserError, match=r"metrics\.jsonl: the digest of step 2 does not follow"):
        compare_runs([long, short], check_digests=True)
    file.write_text(file.read_text().replace(digest[::-1], "no"))
    with pytest.raises(UserError, match=r"line 3: digest\.tokens = 'no'"):
        compare_runs([long, short])
