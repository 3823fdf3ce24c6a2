"""Training from recorded rollouts has the bits of the recorded run; replayed steps are exact."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.small import SMALL, demo, metrics, task_of, trained, without_last_checkpoint

from jetrl import load_config
from jetrl.cli.main import main
from jetrl.errors import UserError
from jetrl.runs.directory import RunDirectory
from jetrl.session import RunResult
from jetrl.session.recorded import RecordedRollouts, ReplayBuffer, read_samples
from jetrl.session.sampling import EncodedPrompt
from jetrl.training.mismatch import effective_sizes
from jetrl.types import PromptInputs

# Rewards that differ in every group: with equal ones all gradients are 0, and all bits equal.
SCORE = """return float(sum(map(ord, completion)) % 5)

    def demonstration(self, prompt):
        return prompt.answer
"""
WORDS = [
    *SMALL,
    "sft.steps=2",
    "sft.until=none",
    "loop.steps=3",
    "train.lr=1e-3",
    "train.warmup_steps=0",
]
run = partial(trained, WORDS)


@pytest.fixture(autouse=True, scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    WORDS.append(f"task={task_of(tmp_path_factory.mktemp('task'), SCORE)}")
    yield
    WORDS.pop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def recorded(folder: Path) -> RunResult:
    return run(folder, "recorded")


def steps_of(result: RunResult) -> list[dict[str, Any]]:
    return RunDirectory.open(result.run_path).metrics("rl")


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("rollout.oversample=1.0", "rollout.max_batch_size=9", "rollout.max_tokens=10"),
        ("algorithm.name=dapo", "algorithm.overlong_buffer=2"),
        ("data.replay_steps=1",),
    ],
    ids=["grpo", "oversample", "dapo", "replayed"],
)
def test_recorded_rollouts_give_the_bits_of_the_run_that_recorded_them(
    folder: Path, recorded: RunResult, words: tuple[str, ...]
) -> None:
    name = f"first-{len(words)}-{words[0]}" if words else "recorded"
    first = run(folder, name, *words) if words else recorded
    again = run(folder, f"again-{name}", *words, f"data.rollouts={name}")
    assert first.digest == again.digest != ""
    files = [r.checkpoint_path / "masters.safetensors" for r in (first, again)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert all(line["throughput/rollout_tokens_per_s"] == 0 for line in steps_of(again))
    compared = [
        (line["mismatch/num_tokens"], line["mismatch/num_different"]) for line in steps_of(again)
    ]
    assert all(tokens > 0 and different == 0 for tokens, different in compared)
    assert main(["compare", str(first.run_path), str(again.run_path), "--same"]) == 0


def test_other_weights_train_off_policy_with_exact_ratios(
    folder: Path, recorded: RunResult
) -> None:
    """With another rate the second step's tokens are another policy's, and the ratio says so."""
    other = run(folder, "faster", f"data.rollouts={recorded.run_path}", "train.lr=3e-3")
    first, second, _ = steps_of(other)
    assert first["digest"]["logprobs"] == steps_of(recorded)[0]["digest"]["logprobs"]
    assert first["mismatch/num_tokens"] > 0
    assert "replay/effective_tokens" not in first
    assert second["mismatch/num_tokens"] == 0
    assert second["partial_rollout/earlier_tokens"] == 1
    assert 0 < second["replay/effective_sequences"] < second["replay/effective_tokens"] < 1
    # Another model in the first step: its log-probs are not those recorded.
    other = run(folder, "other", f"data.rollouts={recorded.run_path}", "sft.steps=0")
    assert steps_of(other)[0]["mismatch/num_tokens"] == 0


def test_a_plan_that_is_not_exact_is_refused_off_policy(folder: Path) -> None:
    first = run(folder, "mixed", "precision.preset=mixed", "algorithm.correction=tis")
    same = ["precision.preset=mixed", "algorithm.correction=tis", "data.rollouts=mixed"]
    assert run(folder, "mixed-again", *same).digest == first.digest
    with pytest.raises(UserError, match=r"in step 2 .* need an exact plan, unlike mixed"):
        run(folder, "mixed-faster", *same, "train.lr=3e-3")
    with pytest.raises(UserError, match=r"replay_steps = 1: the plan 'mixed' is not exact"):
        run(folder, "mixed-replay", *same[:2], "data.replay_steps=1")


def changed(change: Callable[[list[dict[str, Any]]], object]) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        change(lines)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    return act


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


@pytest.mark.parametrize(
    "act, message",
    [
        (cut_short, "step_000002.jsonl: line 16 is incomplete"),
        (Path.unlink, "no rollouts of step 2, and loop.steps = 3: set loop.steps=1"),
        (
            changed(lambda lines: lines.pop()),
            "its prompts, tokens, logprobs, rewards are not those",
        ),
        (
            changed(lambda lines: lines[3].update(reward=7.0)),
            "its rewards are not those that step 2",
        ),
        (changed(lambda lines: lines[3]["logprobs"].pop()), "line 4: it has .* log-probs"),
        (changed(lambda lines: lines[3].update(prompt=None)), "line 4: .*exactly one of text"),
    ],
    ids=["cut", "gone", "lost", "reward", "logprob", "prompt"],
)
def test_damaged_rollouts_are_named(
    tmp_path: Path, recorded: RunResult, act: Callable[[Path], None], message: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(recorded.run_path, copy)
    act(copy / "rollouts" / "step_000002.jsonl")
    with pytest.raises(UserError, match=message):
        run(tmp_path, "again", "data.rollouts=copy")


def test_rollouts_of_other_prompts_tokenizers_and_distributions_are_refused(
    tmp_path: Path, recorded: RunResult
) -> None:
    rollouts = f"data.rollouts={recorded.run_path}"
    with pytest.raises(UserError, match=r"rollout\.temperature = 1\.0, and this run has 0\.5"):
        run(tmp_path, "cooler", rollouts, "rollout.temperature=0.5")
    with pytest.raises(UserError, match="is not a training prompt of this run's task"):
        run(tmp_path, "task", rollouts, "task=arithmetic")
    with pytest.raises(UserError, match=r"a completion has 6 tokens: set rollout\.max_tokens=6"):
        run(tmp_path, "short", rollouts, "rollout.max_tokens=5")
    with pytest.raises(UserError, match="this run itself"):
        run(recorded.run_path.parent, "recorded", "data.rollouts=recorded", resume=True)
    with pytest.raises(UserError, match="no such run directory"):
        run(tmp_path, "none", "data.rollouts=nothing")


def test_another_tokenizer_is_named_with_the_first_token(
    tmp_path: Path, recorded: RunResult
) -> None:
    class Other:
        """A policy whose tokens have other numbers."""

    own = demo(WORDS, tmp_path, f"data.rollouts={recorded.run_path}", "rollout.max_tokens=6")
    sample = read_samples(RunDirectory.open(recorded.run_path), 1)[0]
    moved = tuple(token + 1 for token in sample.inputs.token_ids)
    with pytest.raises(UserError, match=r"another tokenizer, .*: token 0 is \d+ there, \d+ here"):
        RecordedRollouts(own, Other(), [EncodedPrompt(sample.prompt, PromptInputs(moved))])


@pytest.fixture(scope="module")
def replayed(folder: Path) -> RunResult:
    return run(
        folder, "replayed", "data.replay_steps=2", "loop.steps=4", "train.updates_per_step=2"
    )


def test_replayed_steps_are_trained_with_their_samplers_log_probs(replayed: RunResult) -> None:
    lines = steps_of(replayed)
    assert all(line["mismatch/num_different"] == 0 for line in lines)
    shares = [line.get("partial_rollout/earlier_tokens", 0.0) for line in lines]
    counts = [line["mismatch/num_tokens"] for line in lines]
    for step, share in enumerate(shares):
        earlier = sum(counts[max(0, step - 2) : step])
        assert share == pytest.approx(earlier / (earlier + counts[step]))
    assert [line.get("replay/effective_tokens", 1.0) < 1 for line in lines] == [False, *[True] * 3]
    run = RunDirectory.open(replayed.run_path)
    assert [len(run.rollouts(step)) for step in run.rollout_steps()] == [16] * 4


def test_no_replay_has_the_bits_of_before(folder: Path, recorded: RunResult) -> None:
    assert run(folder, "zero", "data.replay_steps=0").digest == recorded.digest
    assert run(folder, "one", "data.replay_steps=1").digest != recorded.digest


def test_a_cut_run_resumes_with_its_buffer(replayed: RunResult, tmp_path: Path) -> None:
    words = ["data.replay_steps=2", "loop.steps=4", "train.updates_per_step=2"]
    cut = without_last_checkpoint(replayed.run_path, tmp_path / "cut")
    resumed = run(tmp_path, "cut", *words, resume=True)
    assert metrics(resumed.run_path) == metrics(replayed.run_path)
    assert resumed.digest == replayed.digest
    # `jetrl replay` repeats the last steps with the buffer too, in a copy.
    shutil.rmtree(sorted((cut / "checkpoints").glob("step_*"))[-1])
    assert main(["replay", str(cut), "--trust-task"]) == 0
    # The buffer is read back from the rollouts, if they are those that the step trained on.
    first = cut / "rollouts" / "step_000001.jsonl"
    changed(lambda lines: lines[3].update(reward=7.0))(first)
    with pytest.raises(UserError, match="its rewards are not those that step 1"):
        run(tmp_path, "cut", *words, resume=True)
    first.unlink()
    with pytest.raises(UserError, match="no rollouts of step 1"):
        run(tmp_path, "cut", *words, resume=True)


def test_the_buffer_mixes_groups_and_forgets(recorded: RunResult) -> None:
    steps = [read_samples(RunDirectory.open(recorded.run_path), step) for step in (1, 2, 3)]
    buffer = ReplayBuffer(load_config("demo", ["data.replay_steps=1"]))
    assert buffer.with_earlier(steps[0]) is steps[0]
    buffer.add(1, steps[0])
    buffer.add(2, steps[1])
    mixed = buffer.with_earlier(steps[2])
    assert [sample.group for sample in mixed] == [i // 4 for i in range(32)]
    assert [bool(s.completion.versions) for s in mixed[::4]] == [False, True] * 4
    assert {v for s in mixed for v in s.completion.versions} == {2}
    assert [s.completion.token_ids for s in mixed[4:8]] == [
        s.completion.token_ids for s in steps[1][:4]
    ]


def test_effective_sizes_are_those_of_kong() -> None:
    rng = np.random.default_rng(0)
    trainer, rollout = rng.normal(size=(2, 12)).astype(np.float32)
    lengths = np.array([3, 4, 5])
    sizes = effective_sizes(trainer, rollout, lengths)
    w = np.exp(trainer.astype(np.float64) - rollout)
    assert sizes["replay/effective_tokens"] == pytest.approx(w.sum() ** 2 / (w * w).sum() / 12)
    w = np.array([part.prod() for part in np.split(w, [3, 7])])
    assert sizes["replay/effective_sequences"] == pytest.approx(w.sum() ** 2 / (w * w).sum() / 3)
    same = effective_sizes(trainer, trainer, lengths)
    assert set(same.values()) == {1.0}


@pytest.mark.parametrize(
    "words, message",
    [
        ("data.replay_steps=1 rollout.keep_every=2", "needs rollout.keep_every=1"),
        ("data.replay_steps=1 algorithm.name=rloo", "unbounded importance ratio"),
        (
            "data.replay_steps=1 algorithm.calibrate_clip_every=2 train.updates_per_step=2",
            "needs data.replay_steps = 0, not 1",
        ),
    ],
)
def test_settings_that_do_not_go_with_replay_are_refused(words: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config("demo", words.split())
