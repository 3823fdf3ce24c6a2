"""Runs of algorithm.name = opd: the KL to the teacher falls, and what does not fit is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.distributed.ranks import run_ranks
from tests.e2e.small import SMALL, metrics, trained, without_last_checkpoint

from jetrl import load_config
from jetrl.cli.main import main
from jetrl.errors import UserError
from jetrl.loop import sft
from jetrl.models.tiny import make_tiny
from jetrl.runs.directory import RunDirectory
from jetrl.session import RunResult

WORDS = [
    *SMALL,
    "sft.until=none",
    "train.lr=3e-3",
    "train.warmup_steps=0",
    "train.schedule=constant",
    "train.updates_per_step=2",
]
OPD = ["sft.steps=0", "algorithm.name=opd", "algorithm.aggregation=none", "loop.steps=12"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def teacher(folder: Path) -> Path:
    """A model of two layers after supervised updates; the students have one layer."""
    words = ["sft.steps=30", "sft.lr=3e-3", "model.config.num_hidden_layers=2", "loop.steps=0"]
    settings = load_config("demo", [*WORDS, *words, f"run.dir={folder}", "run.name=teacher"])
    path = sft(settings).model_path
    assert path is not None
    return path


def distilled(folder: str, name: str, teacher: str, *overrides: str, resume: bool = False) -> Any:
    words = [*WORDS, *OPD, f"teacher.path={teacher}"]
    return trained(words, Path(folder), name, *overrides, resume=resume)


def lines_of(result: RunResult) -> list[dict[str, Any]]:
    return RunDirectory.open(result.run_path).metrics("rl")


@pytest.fixture(scope="module")
def student(folder: Path, teacher: Path) -> RunResult:
    return distilled(str(folder), "student", str(teacher))


def test_the_kl_falls_and_no_token_differs(student: RunResult) -> None:
    lines = lines_of(student)
    kl = [line["teacher/kl"] for line in lines]
    assert kl[-1] < 0.5 * kl[0]
    assert all(value >= 0 for value in kl)
    assert all(line["mismatch/num_different"] == 0 for line in lines)
    assert all("reward/zero_std_groups" not in line for line in lines)


def test_a_cut_run_resumes_with_the_same_bits(
    student: RunResult, teacher: Path, tmp_path: Path
) -> None:
    without_last_checkpoint(student.run_path, tmp_path / "cut")
    resumed = distilled(str(tmp_path), "cut", str(teacher), resume=True)
    assert resumed.digest == student.digest
    assert metrics(resumed.run_path) == metrics(student.run_path)


def _digest(folder: str, name: str, teacher: str) -> str:
    return distilled(
        folder, name, teacher, "loop.steps=3", "train.tokens_per_micro_batch=48"
    ).digest


def test_ranks_have_the_bits_of_one_process(teacher: Path, tmp_path: Path) -> None:
    alone = _digest(str(tmp_path), "alone", str(teacher))
    assert run_ranks(2, _digest, str(tmp_path), "two", str(teacher)) == [alone, alone]


def test_the_drawn_token_mixed_with_a_reward(folder: Path, teacher: Path) -> None:
    words = ["teacher.kl=token", "teacher.reward=0.5", "rollout.prompts_per_step=8"]
    lines = lines_of(distilled(str(folder), "token", str(teacher), *words, "loop.steps=16"))
    kl = [line["teacher/kl"] for line in lines]
    assert sum(kl[-4:]) < 0.8 * sum(kl[:4])


def test_the_teacher_may_see_the_answer(folder: Path, teacher: Path, student: RunResult) -> None:
    words = ['teacher.prompt="{answer}={prompt}"', "loop.steps=1"]
    told = distilled(str(folder), "told", str(teacher), *words)
    first, plain = lines_of(told)[0], lines_of(student)[0]
    assert first["digest"]["tokens"] == plain["digest"]["tokens"]
    assert first["teacher/kl"] != plain["teacher/kl"]
    for field in ("hint", "prompt.x", "answer.__class__", "answer:9"):
        message = rf"a template has \{{prompt\}} and \{{answer\}}, not '{field}'"
        with pytest.raises(UserError, match=message):
            distilled(str(folder), "hint", str(teacher), f'teacher.prompt="{{{field}}}"')
    for text, message in (("{", "teacher.prompt = '{': "), ("", r"teacher\.prompt is empty")):
        with pytest.raises(UserError, match=message):
            distilled(str(folder), "hint", str(teacher), f'teacher.prompt="{text}"')
    with pytest.raises(UserError, match="do not fit in the 64 tokens of the teacher's context"):
        distilled(str(folder), "long", str(teacher), f'teacher.prompt="{{prompt}}{"1" * 60}"')


def test_another_vocabulary_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    make_tiny(tmp_path / "other", alphabet="0123456789+-*", hidden_size=64, num_layers=1)
    with pytest.raises(UserError, match=r"teacher\.path = .*other: its tokenizer is not the pol"):
        distilled(str(folder), "other", str(tmp_path / "other"))


def test_other_end_tokens_are_warned_of(
    folder: Path, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    for name in ("config.json", "generation_config.json"):
        if (other / name).is_file():
            config = json.loads((other / name).read_text())
            (other / name).write_text(json.dumps(config | {"eos_token_id": [1, 3]}))
    words = [*WORDS, *OPD, f"run.dir={folder}", "run.name=dry", f"teacher.path={other}"]
    assert main(["train", "demo", *words, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "the teacher ends its answers with ['<eos>', '1'], the policy with ['<eos>']" in said


@pytest.mark.parametrize(
    "words, message",
    [
        ("algorithm.name=grpo teacher.path=x", "grpo has no teacher; leave it out"),
        ("algorithm.name=opd", r"needs a teacher: set teacher\.path"),
        ("algorithm.name=opd teacher.path=x rollout.top_p=0.9", "use kl=token"),
        (
            "algorithm.name=opd teacher.path=x teacher.reward=1.0 rollout.samples_per_prompt=1",
            "it compares the completions of one prompt",
        ),
        ("teacher.weight=2.0", r"teacher\.weight = 2\.0 has no effect without teacher\.path"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(words: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config("demo", ["algorithm.aggregation=none", *words.split()])


def test_a_defined_plan_refuses_a_teacher(folder: Path, teacher: Path) -> None:
    with pytest.raises(UserError, match=r"teacher\.path: its operations are not defined"):
        distilled(str(folder), "defined", str(teacher), "precision.preset=integer")
