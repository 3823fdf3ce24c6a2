"""Bad numbers and too little memory in whole runs on the CPU: what is said, kept and done."""

from __future__ import annotations

import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.e2e.small import metrics, task_of

import jetrl.precision.linear as linear
from jetrl import load_config, train
from jetrl.cli.main import main
from jetrl.errors import NonFiniteError
from jetrl.models import dense
from jetrl.models.policy import Policy
from jetrl.rollout.prefill import Prefill
from jetrl.runs import anomalies
from jetrl.runs.directory import RunDirectory
from jetrl.session import Session
from jetrl.session.step import Step
from jetrl.training import checkpoint
from jetrl.training.extras.critic import Critic
from jetrl.training.optimizer import Optimizer

TINY = """sft.steps=0 rollout.prompts_per_step=4 rollout.samples_per_prompt=4 rollout.max_tokens=5
eval.every=0 train.updates_per_step=1 train.warmup_steps=0 train.lr=1e-3 checkpoint.every=1
report.enabled=false model.config.num_hidden_layers=2 model.config.max_position_embeddings=32"""
SCORE = """return float(sum(map(ord, completion)) % 3)  # so that groups differ at once

    def demonstration(self, prompt):
        return prompt.answer"""
lines = functools.partial(metrics, phase="rl")


def settings(path: Path, *overrides: str, name: str = "run") -> Any:
    where = [f"task={task_of(path, SCORE)}", f"run.dir={path}", f"run.name={name}"]
    return load_config("demo", [*TINY.split(), *where, *overrides])


def masters(path: Path) -> bytes:
    return (path / "masters.safetensors").read_bytes()


@pytest.fixture
def bad_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Switches a fault on for the updates of some steps."""
    state = {"on": False}
    update = Session.update

    def choose(*steps: int) -> dict[str, bool]:
        def wrapped(session: Session, step: Step) -> Any:
            state["on"] = step.number in steps
            try:
                return update(session, step)
            finally:
                state["on"] = False

        monkeypatch.setattr(Session, "update", wrapped)
        return state

    return choose


@pytest.fixture
def bad_swiglu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The forward of the second layer's SwiGLU gives a NaN where gradients are wanted."""

    def install(state: dict[str, bool]) -> None:
        swiglu, calls = dense.swiglu, itertools.count(1)

        def faulty(gates: torch.Tensor) -> torch.Tensor:
            out = swiglu(gates)
            if state["on"] and torch.is_grad_enabled() and next(calls) % 2 == 0:
                out = out.clone()
                out[3, 5] = math.nan
            return out

        monkeypatch.setattr(dense, "swiglu", faulty)

    return install


def test_a_nan_forward_stops_the_run_names_the_operation_and_can_be_replayed(
    tmp_path: Path, bad_at: Any, bad_swiglu: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    bad_swiglu(bad_at(2))
    first = r"output of layers\.1\.swiglu, first in row 3"
    with pytest.raises(NonFiniteError, match=first) as stop:
        train(settings(tmp_path, "loop.steps=2"))
    assert stop.value.exit_code == 4
    run = tmp_path / "run"
    assert f"jetrl replay {run}" in str(stop.value)
    assert [r["step"] for r in lines(run)] == [1]
    assert RunDirectory.open(run).rollout_steps() == [1, 2]
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for folder in ("replay-left", "checkpoints/.writing-step_000002"):  # of killed processes
        (run / folder).mkdir()
        (run / folder / "gone").symlink_to("nowhere")
    capsys.readouterr()
    again = ["replay", "--trust-task", str(run)]
    assert main(again) == 4  # the fault is still there: it happens again
    assert "output of layers.1.swiglu, first in row 3" in capsys.readouterr().out
    assert not (run / "replay-left").exists()
    assert main([*again, "--json"]) == 4
    found = json.loads(capsys.readouterr().out)
    assert (found["finite"], found["step"]) == (False, 2)
    bad_at()  # and with the fault mended it does not
    assert main([*again, "--plan", "bf16"]) == 0
    assert "every value is finite up to step 2" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_replay_of_a_finished_run_says_that_there_is_nothing_to_replay(
    tmp_path: Path, bad_at: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    train(settings(tmp_path, "loop.steps=1"))
    capsys.readouterr()
    assert main(["replay", "--trust-task", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.startswith("nothing to replay: the run is finished")


def test_a_nan_on_the_way_back_is_named_too(
    tmp_path: Path, bad_at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, dgrad, calls = bad_at(2), linear.dgrad, itertools.count(1)

    def faulty(*args: Any) -> Any:
        dx = dgrad(*args)
        # Backward comes to lm_head, then down, gate_up, o and qkv of the last layer: 9 an update.
        return dx * math.nan if next(calls) % 9 == 3 and state["on"] else dx

    monkeypatch.setattr(linear, "dgrad", faulty)
    with pytest.raises(NonFiniteError, match=r"gradient of (the output of )?layers\.1\.post_norm"):
        train(settings(tmp_path, "loop.steps=2"))


def test_skipped_updates_leave_no_trace_and_the_run_goes_on(
    tmp_path: Path, bad_at: Any, bad_swiglu: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    bad_swiglu(bad_at(2, 3))
    skip = "train.on_nonfinite=skip"
    result = train(settings(tmp_path, "loop.steps=4", skip))
    found = lines(result.run_path)
    assert [r["step"] for r in found] == [1, 2, 3, 4]
    assert [r.get("policy/skipped_updates", 0) for r in found] == [0, 1, 1, 0]
    assert ["policy/loss" in r for r in found] == [True, False, False, True]
    checkpoints = result.run_path / "checkpoints"
    assert masters(checkpoints / "step_000003") != masters(checkpoints / "step_000004")
    assert RunDirectory.open(result.run_path).state() == "finished"
    assert "step 2: 1 update not finite and skipped" in capsys.readouterr().out
    assert "layers.1.swiglu" in (result.run_path / "log.txt").read_text()
    train(settings(tmp_path, "loop.steps=2", skip, name="cut"))
    resumed = train(settings(tmp_path, "loop.steps=4", skip, name="cut"), resume=True)
    assert lines(resumed.run_path) == found
    assert masters(resumed.checkpoint_path) == masters(result.checkpoint_path)


def test_a_critic_that_goes_wrong_is_named_and_the_policy_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    update = Critic.update

    def spoiled(critic: Critic, index: int, micro_batches: Any) -> Any:
        with monkeypatch.context() as patch:
            if critic.optimizer.num_updates == 1 and not spoilt:
                spoilt.append(1)
                scores = critic.model.decoder.scores
                patch.setattr(critic.model.decoder, "scores", lambda x: scores(x) * math.inf)
            return update(critic, index, micro_batches)

    spoilt: list[int] = []
    monkeypatch.setattr(Critic, "update", spoiled)
    ppo = ["algorithm.name=ppo", "critic.path=policy", "train.on_nonfinite=skip"]
    found = lines(train(settings(tmp_path, "loop.steps=3", *ppo)).run_path)
    assert [r.get("critic/skipped_updates", 0) for r in found] == [0, 1, 0]
    assert ["critic/loss" in r for r in found] == [True, False, True]
    assert all("policy/loss" in r and "policy/skipped_updates" not in r for r in found)
    assert "step 2: 1 update of the critic not finite and skipped" in capsys.readouterr().out
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "the first such value is the gradient of the output of score" in log


@pytest.fixture
def bad_adamw(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An update of AdamW, counted from 1 over all optimizers, makes a NaN of finite gradients."""

    def install(call: int, weight: str, value: float = math.nan) -> None:
        apply, calls = Optimizer.apply, itertools.count(1)

        def spoiling(optimizer: Optimizer, total_norm: torch.Tensor) -> None:
            apply(optimizer, total_norm)
            if next(calls) == call:
                with torch.no_grad():
                    optimizer.masters[weight].view(-1)[7] = value

        monkeypatch.setattr(Optimizer, "apply", spoiling)

    return install


def test_a_bad_weight_is_found_when_it_is_sampled_from(
    tmp_path: Path, bad_adamw: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    every = ("loop.steps=3", "checkpoint.every=2")
    bad_adamw(1, "layers.1.down.weight", math.inf)
    with pytest.raises(NonFiniteError, match=r"In step 2, .*master weight layers\.1\.down\.weight"):
        train(settings(tmp_path, *every))
    bad_adamw(1, "layers.1.down.weight", math.inf)
    assert main(["replay", "--trust-task", str(tmp_path / "run")]) == 4
    assert "master weight layers.1.down.weight, first in row 0 (1 of" in capsys.readouterr().out


DOWN = "layers.1.down.weight"
PPO = "algorithm.name=ppo critic.path=policy"


@pytest.mark.parametrize(
    "words, call, weight, kept",
    [
        ("loop.steps=4", 2, DOWN, 1),  # a middle step
        ("loop.steps=1", 1, DOWN, None),  # the last one
        ("loop.steps=2 adapter.kind=lora", 2, "layers.1.down.lora_B", 1),
        (f"loop.steps=2 {PPO}", 4, "score.weight", 1),  # after each update comes the critic's
        ("loop.steps=0 sft.steps=2 sft.examples_per_step=4", 2, DOWN, 1),
    ],
)
def test_a_nan_that_adamw_makes_is_in_no_checkpoint_and_no_model(
    words: str, call: int, weight: str, kept: int | None, tmp_path: Path, bad_adamw: Any
) -> None:
    bad_adamw(call, weight)
    chosen = settings(tmp_path, *words.split())
    with pytest.raises(NonFiniteError, match=rf"after step \d .*{weight}.*Lower train\.lr") as stop:
        train(chosen)
    assert stop.value.exit_code == 4
    run = tmp_path / "run"
    folders = sorted((run / "checkpoints").rglob("step_*"))
    assert [path.name for path in folders][-1:] == ([f"step_{kept:06d}"] if kept else [])
    assert (f"{folders[-1]} is good" if kept else "no checkpoint before it") in str(stop.value)
    for path in folders:
        for file in path.glob("*.safetensors"):
            assert all(bool(t.isfinite().all()) for t in load_file(file).values())
    assert not (run / "model").exists()
    bad_adamw(0, weight)  # no update: the run continues from what was kept
    resumed = train(chosen, resume=True)
    stored = load_file(next(resumed.model_path.glob("*.safetensors")))
    assert all(bool(tensor.isfinite().all()) for tensor in stored.values())


def test_a_checkpoint_with_a_nan_is_neither_resumed_from_nor_exported(
    tmp_path: Path, bad_adamw: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Versions before the check wrote such checkpoints."""
    bad_adamw(2, DOWN)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "nonfinite", lambda tensors: "")
        with pytest.raises(NonFiniteError, match=r"no model is written: .*down_proj.*NaN"):
            train(settings(tmp_path, "loop.steps=2"))
    with pytest.raises(NonFiniteError, match=r"step_000002 has a NaN.*down.*remove its folder"):
        train(settings(tmp_path, "loop.steps=2"), resume=True)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 4
    assert "no model is written" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_warm_up_is_guarded_and_kept(
    tmp_path: Path, bad_swiglu: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad_swiglu({"on": True})
    message = r"sft/grad_norm is nan.*layers\.1\.swiglu.*Lower sft\.lr"
    words = (f"run.dir={tmp_path}/runs", "sft.steps=2", "sft.examples_per_step=4")
    with pytest.raises(NonFiniteError, match=message):
        train(settings(tmp_path, *words))
    monkeypatch.chdir(tmp_path)
    assert main(["replay", "--trust-task", "run"]) == 4
    assert "layers.1.swiglu" in capsys.readouterr().out


def test_too_little_memory_costs_time_and_not_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both sides run out in the first step; the next attempt starts with the sizes found."""
    plain = train(settings(tmp_path, "loop.steps=1", name="plain"))
    forward, logprobs = Prefill.forward, Policy.train_logprobs

    def small_forward(runner: Any, step: Any, sequences: Any) -> Any:
        if sum(chunk.length for chunk in step.chunks) > 12:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(runner, step, sequences)

    def small_logprobs(policy: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if len(inputs) > 64:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")
        return logprobs(policy, inputs, *args, **kwargs)

    monkeypatch.setattr(Prefill, "forward", small_forward)
    monkeypatch.setattr(Policy, "train_logprobs", small_logprobs)
    prefill = "rollout.max_prefill_tokens=20"
    result = train(settings(tmp_path, "loop.steps=2", prefill, name="small"))
    records = RunDirectory.open(result.run_path).metrics("rl")
    for retries in ("memory/rollout_retries", "memory/train_retries"):
        assert records[0][retries] >= 1
        assert retries not in records[1]
    assert all(r["mismatch/num_different"] == 0 for r in records)
    first = [path / "rollouts/step_000001.jsonl" for path in (plain.run_path, result.run_path)]
    assert first[0].read_bytes() == first[1].read_bytes()
    said = capsys.readouterr().out
    assert "step 1: out of memory in rollout" in said
    assert "step 1: out of memory in training" in said
    log = (result.run_path / "log.txt").read_text()
    assert "gradients are the same up to the order of sums" in log

    resumed = train(settings(tmp_path, "loop.steps=3", prefill, name="small"), resume=True)
    last = RunDirectory.open(resumed.run_path).metrics("rl")[-1]
    assert last["step"] == 3
    assert not {"memory/rollout_retries", "memory/train_retries"} & last.keys()


def test_anomalies_are_said_and_counted_and_rollouts_of_some_steps_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(anomalies, "ENOUGH", 2)
    monkeypatch.setattr(anomalies, "SPIKE", 1.0)
    step, calls = Optimizer.gradient_norm, itertools.count(1)

    def spiking(optimizer: Optimizer) -> torch.Tensor:
        return step(optimizer) * (1e4 if next(calls) == 4 else 1)

    monkeypatch.setattr(Optimizer, "gradient_norm", spiking)
    result = train(settings(tmp_path, "loop.steps=5", "rollout.keep_every=2"))
    assert [r.get("policy/anomalies", 0) for r in lines(result.run_path)] == [0, 0, 0, 1, 0]
    assert "step 4: gradient norm" in capsys.readouterr().out
    assert RunDirectory.open(result.run_path).rollout_steps() == [1, 2, 4, 5]
