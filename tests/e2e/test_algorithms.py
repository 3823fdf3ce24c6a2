"""Algorithms and corrections in whole runs on the CPU, a few steps of a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.e2e.small import SMALL, without_last_checkpoint

from jetrl import load_config, train
from jetrl.errors import UserError
from jetrl.runs.directory import RunDirectory
from jetrl.runs.metrics import reproducible

TINY = [
    *SMALL,
    "task.options.max_operand=1",  # four sums: some of them are right at times
    "task.options.digits=1",
    "sft.steps=2",
    "sft.until=none",
    "rollout.prompts_per_step=3",
    "train.updates_per_step=2",
    "train.warmup_steps=0",
    "checkpoint.every=0",
    "loop.steps=2",
    "algorithm.aggregation=none",
]


def run(path: Path, *overrides: str) -> list[dict[str, Any]]:
    settings = load_config("demo", [*TINY, f"run.dir={path}", "run.name=run", *overrides])
    return RunDirectory.open(train(settings).run_path).metrics("rl")


def test_one_completion_a_prompt_is_no_group_that_teaches_nothing(tmp_path: Path) -> None:
    """REINFORCE++ normalises over all of a step."""
    alone = ["algorithm.name=reinforce_pp", "rollout.samples_per_prompt=1", "sft.steps=40"]
    lines = run(tmp_path, *alone, "rollout.prompts_per_step=8")
    assert any(line["policy/grad_norm"] > 0 for line in lines)
    assert all("reward/zero_std_groups" not in line for line in lines)
    assert "all completions got the same reward" not in (tmp_path / "run" / "log.txt").read_text()


def test_dapo_draws_again_and_counts_what_it_dropped(tmp_path: Path) -> None:
    learnt = ["sft.steps=60", "task.options.mistakes=0.0"]  # groups are right throughout
    lines = run(tmp_path, *learnt, "algorithm.name=dapo", "algorithm.dynamic_sampling_rounds=3")
    assert any(line["dynamic_sampling/rounds"] > 1 for line in lines)
    assert any(line["dynamic_sampling/dropped_groups"] > 0 for line in lines)
    assert all("reward/overlong_penalty" in line for line in lines)
    assert all(line["mismatch/num_different"] == 0 for line in lines)


def test_a_correction_of_the_mixed_flow(tmp_path: Path) -> None:
    lines = run(tmp_path, "precision.preset=mixed", "algorithm.correction=tis")
    for line in lines:
        assert line["mismatch/num_different"] > 0
        assert line["correction/weight_max"] <= 2
        assert line["correction/weight_mean"] != 1


def test_asked_for_by_name_it_weighs_one(tmp_path: Path) -> None:
    name = "algorithm.correction_under_exact_plan=true"
    lines = run(tmp_path, "algorithm.correction=icepop", name, "loop.steps=1")
    assert all(line["correction/weight_max"] == 1 for line in lines)
    assert all(line["correction/touched_fraction"] == 0 for line in lines)


@pytest.mark.parametrize(
    "overrides, advised",
    [
        (["precision.preset=mixed"], True),
        (["precision.preset=unified"], False),
        (["precision.preset=unified", "precision.weights_through_bf16=true"], True),
    ],
)
def test_a_mismatch_without_a_correction_is_said_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], advised: bool
) -> None:
    run(tmp_path, *overrides, "loop.steps=1", "sft.steps=0")
    assert ("consider precision.preset=int8" in capsys.readouterr().out) == advised


def test_ppo_resumes_with_its_critic(tmp_path: Path) -> None:
    own = ["algorithm.name=ppo", "critic.path=policy", "critic.lr=1e-3", "sft.steps=30"]
    overrides = [*TINY, *own, f"run.dir={tmp_path}", "checkpoint.every=1", "checkpoint.keep_last=2"]
    uncut = train(load_config("demo", [*overrides, "run.name=uncut"])).run_path
    cut = without_last_checkpoint(uncut, tmp_path / "cut")
    train(load_config("demo", [*overrides, "run.name=cut"]), resume=True)
    lines = [reproducible(RunDirectory.open(run).metrics("rl")[-1]) for run in (uncut, cut)]
    assert lines[0] == lines[1]
    assert lines[0]["critic/grad_norm"] > 0
    assert lines[0]["mismatch/num_different"] == 0


def test_a_reference_of_ones_own_measures(tmp_path: Path) -> None:
    train(load_config("demo", [*TINY, f"run.dir={tmp_path}", "run.name=first", "loop.steps=0"]))
    lines = run(tmp_path, f"reference.path={tmp_path / 'first' / 'model'}", "sft.steps=1")
    assert all(line["policy/kl_ref"] > 0 for line in lines)


RECORD = """
from jetrl.settings.algorithms import Algorithm
mine = Algorithm(
    "mine", "", "global", "clipped_ratio", "token_mean",
    options={{"clip": 0.2, "dynamic_sampling": {again}}}, compares_group={compares},
)
"""


def test_a_record_of_the_user_decides_what_is_sampled(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    name = f"algorithm.name={file}:mine"
    file.write_text(RECORD.format(again=True, compares=True))
    lines = run(tmp_path, name, "loop.steps=1", "algorithm.dynamic_sampling_rounds=2")
    assert "dynamic_sampling/rounds" in lines[-1]
    with pytest.raises(UserError, match="dynamic sampling replaces prompts"):
        run(tmp_path / "partial", name, "rollout.oversample=0.5")
    with pytest.raises(UserError, match=r"mine\.py:mine compares the completions of one prompt"):
        run(tmp_path / "one", name, "rollout.samples_per_prompt=1")
    file.write_text(RECORD.format(again=False, compares=False))
    alone = run(tmp_path / "alone", name, "rollout.samples_per_prompt=1", "loop.steps=1")
    assert "dynamic_sampling/rounds" not in alone[-1]


def test_a_loss_of_the_user(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def push(tokens, strength):\n"
        "    return -strength * tokens.advantages * tokens.trainer_logprobs\n"
    )
    lines = run(tmp_path, f"algorithm.name={file}:push", "algorithm.options.strength=0.5")
    assert all(line["policy/grad_norm"] >= 0 for line in lines)
