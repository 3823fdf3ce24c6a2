"""Whole runs on one, two, three and four ranks have the same results, byte for byte."""

from __future__ import annotations

import math
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.ranks import run_ranks
from tests.distributed.runs import STEPS_ALONE, results, run_small, same_bytes
from tests.e2e.small import before_call

from jetrl import load_config
from jetrl.cli.main import main
from jetrl.distributed.world import world
from jetrl.errors import NonFiniteError, RanksDiffer, RunStopped, Terminated
from jetrl.models.policy import Policy
from jetrl.precision import PrecisionPlan
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.sequence import NonFiniteLogits
from jetrl.runs.directory import RunDirectory
from jetrl.session import session as verbs
from jetrl.session import source
from jetrl.session.prompt_order import PromptOrder
from jetrl.session.ranks import compare_weights
from jetrl.training.mismatch import Difference, StepMismatchError
from jetrl.training.trainer import Trainer

THREE = [*STEPS_ALONE, "loop.steps=3"]
PARTIAL = [
    *STEPS_ALONE,
    "train.schedule=constant",
    "rollout.oversample=0.8",
    "rollout.max_tokens=12",
    "rollout.max_batch_size=7",  # so that some are cut off
    "loop.steps=4",
]

FILTERED = [
    *STEPS_ALONE,
    *("rollout.top_p=0.9", "rollout.top_k=5", "rollout.min_p=0.05", "rollout.temperature=0.8"),
    "model.config.initializer_range=0.3",  # so that each filter excludes tokens
    "algorithm.kl=0.01",
    "loop.steps=3",
]

_FLIPPED = "layers.0.down.0"


def test_a_run_has_the_same_results_on_three_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = Path(run_small(str(tmp_path), "alone"))
    path = Path(run_ranks(3, run_small, str(tmp_path), "ranks")[0])
    expected, found = results(alone), results(path)
    assert found["metrics"] == expected["metrics"]
    assert [name for name in expected if found.get(name) != expected[name]] == []
    assert found.keys() == expected.keys()
    last = RunDirectory.open(path).metrics("rl")[-1]
    assert last["distributed/size"] == 3
    assert 0 < last["distributed/wait_share"] < 1
    assert {file.name for file in (path / "ranks").iterdir()} == {"rank_1.txt", "rank_2.txt"}
    assert max(line.get("dynamic_sampling/rounds", 0) for line in expected["metrics"]) > 1
    # Commands of one process read a checkpoint of several.
    checkpoints = [run / "checkpoints" / "step_000005" for run in (alone, path)]
    assert (checkpoints[1] / "masters").is_dir()
    for checkpoint in checkpoints:
        assert main(["export", str(checkpoint), str(checkpoint.with_name("out"))]) == 0
    same_bytes(*(checkpoint.with_name("out") for checkpoint in checkpoints))
    next((checkpoints[1] / "masters").iterdir()).write_bytes(b"short")
    assert main(["export", str(checkpoints[1]), str(tmp_path / "out")]) == 2
    assert re.search(r"masters/shard-\S+ has \d+ bytes instead of", capsys.readouterr().err)


def _until(folder: str, steps: int) -> str:
    """Make or resume a run with a critic, up to a step."""
    ppo = ["algorithm.name=ppo", "critic.path=policy", "algorithm.dynamic_sampling=none"]
    words = [*STEPS_ALONE, *ppo, "train.schedule=constant", "checkpoint.every=1"]
    return run_small(folder, "cut", *words, f"loop.steps={steps}", resume=steps > 1)


def test_a_run_goes_on_at_any_number_of_ranks_with_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("alone", "ranks"):
        (tmp_path / name).mkdir()
    alone, ranks = (str(tmp_path / name) for name in ("alone", "ranks"))
    for steps, size in enumerate((4, 2, 1, 3), start=1):
        expected = _until(alone, steps)
        capsys.readouterr()
        found = _until(ranks, steps) if size == 1 else run_ranks(size, _until, ranks, steps)[0]
        told = capsys.readouterr().out
        assert ("resumed on 1 rank, was 2" in told) == (size == 1)
    assert results(Path(found)) == results(Path(expected))
    parts = [Path(run) / "checkpoints" / "step_000003" for run in (expected, found)]
    for file in ("masters.safetensors", "optimizer.safetensors", "critic.safetensors"):
        assert (parts[0] / file).read_bytes() == (parts[1] / file).read_bytes()  # of one process


RARE = {
    "ppo": ["algorithm.name=ppo", "critic.path=policy", "algorithm.dynamic_sampling=none"],
    "pass-rate": [
        *("algorithm.kl=0.05", "algorithm.calibrate_clip_every=2", "data.order=pass_rate"),
        *("rollout.speculation=head", "draft_head.share=1.0", "draft_head.tokens_per_update=16"),
    ],
    "alike": [
        "precision.preset=alike",
        "data.batch=shuffle_r1",
        "task.workers=3",
        "precision.wgrad_input=1x128",
    ],
    "replayed": ["data.replay_steps=1"],
    "recorded": ["data.replay_steps=1", "data.rollouts=replayed"],
    "turns": [
        f"task.name={Path(__file__).with_name('turns_task.py')}:Counter",
        "task.options={}",
        "task.workers=1",
        "model.config.vocab_size=14",
        "rollout.max_tokens=24",
    ],
}


def _rare(folder: str) -> list[str]:
    steps = [*STEPS_ALONE, "loop.steps=2"]
    return [run_small(folder, name, *steps, *words) for name, words in RARE.items()]


def test_rare_parts_of_a_run_have_the_same_results_on_two_ranks(tmp_path: Path) -> None:
    for name in ("alone", "two"):
        (tmp_path / name).mkdir()
    alone = _rare(str(tmp_path / "alone"))
    for one, two in zip(alone, run_ranks(2, _rare, str(tmp_path / "two"))[0], strict=True):
        assert results(Path(two)) == results(Path(one))
    two, again = (RunDirectory.open(tmp_path / "two" / name) for name in ("replayed", "recorded"))
    assert two.metrics("rl")[-1]["digest"] == again.metrics("rl")[-1]["digest"]
    assert two.metrics("rl")[-1]["partial_rollout/earlier_tokens"] > 0
    turns = RunDirectory.open(tmp_path / "alone" / "turns")
    records = [record for step in (1, 2) for record in turns.rollouts(step)]
    assert {len(record["turns"]) for record in records} >= {2, 3}
    assert any("half of a character" in record["failure"] for record in records)


@pytest.mark.parametrize("adapter", [[], ["adapter.kind=lora", "adapter.rank=4"]], ids=len)
def test_filtered_sampling_has_the_same_results_on_two_ranks(
    tmp_path: Path, adapter: list[str]
) -> None:
    words = [*FILTERED, *adapter]
    alone = Path(run_small(str(tmp_path), "alone", *words))
    two = Path(run_ranks(2, run_small, str(tmp_path), "two", *words)[0])
    assert results(two) == results(alone)
    for line in RunDirectory.open(two).metrics("rl"):
        assert line["mismatch/num_different"] == 0 < line["mismatch/num_tokens"]
        assert line["policy/entropy"] < math.log(5)  # of the tokens that top_k leaves
    last = RunDirectory.open(two).metrics("rl")[-1]
    assert (last["distributed/size"], last["policy/kl_ref"] > 0) == (2, True)


def _terminated(folder: str, on_ranks: tuple[int, ...], name: str) -> str:
    """Return how a run ends with SIGTERM on some ranks in the sampling of step 3, and go on."""
    if world().rank in on_ranks:
        before_call(source, "sample_prompts", 3, lambda: signal.raise_signal(signal.SIGTERM))
    try:
        run_small(folder, name, *THREE)
    except Terminated as end:
        return type(end).__name__
    return "not at all"


def _stopped_and_resumed(folder: str) -> list[str]:
    ends = [_terminated(folder, (0, 1), "both"), _terminated(folder, (1,), "one")]
    for name in ("both", "one"):
        run_small(folder, name, *THREE, resume=True)
    return ends


def test_a_signal_to_any_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert run_ranks(2, _stopped_and_resumed, folder) == [["StepGivenUp"] * 2] * 2
    expected = results(Path(run_small(folder, "alone", *THREE)))
    for name in ("both", "one"):
        found = RunDirectory.open(tmp_path / name)
        assert [attempt.reason for attempt in found.attempts()] == ["SIGTERM", ""]
        assert results(found.path) == expected


def _trouble(folder: str) -> list[str]:
    """Return how runs end in which rank 1 alone meets something."""
    ends = []

    def end_of(name: str, kind: type[Exception]) -> None:
        with pytest.raises(kind) as raised:
            run_small(folder, name, *STEPS_ALONE)
        ends.append(str(raised.value))

    def not_finite() -> None:
        error = NonFiniteLogits(0)
        error.token_ids = (1, 2)
        raise error

    def one_prompt_less() -> None:
        draw = PromptOrder.draw
        PromptOrder.draw = lambda self, step, count: draw(self, step, count)[1:]  # type: ignore

    original = RolloutEngine.generate, PromptOrder.draw
    if world().rank == 1:
        before_call(RolloutEngine, "generate", 2, not_finite)
    end_of("nan", NonFiniteError)
    RolloutEngine.generate = original[0]  # type: ignore[method-assign]
    if world().rank == 1:
        before_call(Trainer, "step", 2, one_prompt_less)
    end_of("prompts", RanksDiffer)
    PromptOrder.draw = original[1]  # type: ignore[method-assign]

    def differs(self: Any, samples: Any, step: int) -> None:
        counts = {"num_different": 1.0, "num_tokens": 9.0, "max_abs_logprob_diff": 0.25}
        metrics = {f"mismatch/{name}": value for name, value in counts.items()}
        raise StepMismatchError("unified", samples, [Difference(1, 2, -0.5, -0.25)], metrics)

    def not_located(*_: Any, **given: Any) -> str:
        if world().rank == 1:
            raise NonFiniteError("no forward any more")
        return "first in a layer"

    Trainer.step, verbs.located = differs, not_located  # type: ignore
    end_of("mismatch", RunStopped)
    return ends


def test_what_one_rank_meets_ends_all_with_its_message(tmp_path: Path) -> None:
    ends = run_ranks(2, _trouble, str(tmp_path))
    assert ends[0] == ends[1]
    assert ends[0][0].startswith("sampling met logits that are not finite")
    assert ends[0][1].startswith("rank 1 differs from rank 0 in the prompts of step 3")
    assert ends[0][2].startswith("step 1: ")
    assert ends[0][2].endswith("; first in a layer")


def _flipped() -> str:
    config = load_config("demo", ["model.config.num_hidden_layers=1"]).model.config
    assert isinstance(config, dict)
    policy = Policy.from_config(config, PrecisionPlan.preset("unified"))
    compare_weights("at the start", policy)
    if world().rank == 0:
        policy.weights.quantized_tensors()[_FLIPPED].view(torch.uint8).view(-1)[77] += 1
    with pytest.raises(RanksDiffer) as raised:
        compare_weights("after step 4", policy)
    return str(raised.value)


def test_a_flipped_bit_is_found_by_the_majority() -> None:
    messages = run_ranks(3, _flipped)
    words = "rank 0 differs from the other ranks in 1 of "
    assert [message.startswith(words) for message in messages] == [True] * 3, messages
    assert f"after step 4, first in {_FLIPPED}" in messages[0]


def _partial(folder: str) -> list[str]:
    whole = run_small(folder, "whole", *PARTIAL)
    cut = run_small(folder, "cut", *PARTIAL, "loop.steps=3")
    run_small(folder, "cut", *PARTIAL, resume=True)
    return [whole, cut]


def test_partial_rollouts_are_repeated_and_resumed_on_as_many_ranks(tmp_path: Path) -> None:
    whole, cut = map(Path, run_ranks(2, _partial, str(tmp_path))[0])
    expected = results(whole)
    assert expected["metrics"][2]["partial_rollout/unfinished"] > 0  # of the checkpoint
    assert results(cut) == expected
    alone = Path(run_small(str(tmp_path), "cut", *PARTIAL, "loop.steps=5", resume=True))
    assert len(RunDirectory.open(alone).metrics("rl")) == 5
