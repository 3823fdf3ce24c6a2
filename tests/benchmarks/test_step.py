"""The benchmarks of a step, tried out on the CPU: their parts are those of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from benchmarks.flow import Choices, Flow, policy_of
from benchmarks.harness import Load, flops
from benchmarks.step import compare, main, measure
from benchmarks.step_parts import draw, tensor_digest, train
from tests.distributed.ranks import run_ranks

from benchmarks import step_parts
from jetrl.errors import UserError
from jetrl.memory import device as device_memory
from jetrl.memory.device import DeviceBytes
from jetrl.models.families import SHAPES, ModelConfig
from jetrl.rollout.options import RolloutStats
from jetrl.training.trainer import TrainedStep
from jetrl.types import Completion

LOAD = Load(prompts=2, samples=2, prompt_length=20, response_length=12)
CHOICES = Choices("tiny", "cpu", None, 1e-3, None, None, {})


def test_flops_of_a_step_by_hand() -> None:
    """Every product of the tiny model, token by token."""
    config = ModelConfig.from_hf(SHAPES["tiny"])
    layer = 256 * (2 + 2 * 1) * 128 + 2 * 128 * 256 + 3 * 256 * 512
    layers, head = 2 * layer, 256 * 256
    pairs = sum(range(1, 33))  # of a query and a key, in a sequence of 32 tokens
    attention = 2 * 2 * (2 * 128) * 2 * pairs  # layers, two products, width, multiply and add
    forward = 2 * (4 * 32 * layers + 4 * 12 * head) + 4 * attention
    counted = flops(config, LOAD)
    # The formula counts half a square where there is a triangle with its diagonal.
    assert counted["old_logprobs"] == pytest.approx(forward, rel=1 / 32)
    assert counted["update"] == pytest.approx(3 * forward + 0.5 * 4 * attention, rel=1 / 32)
    drawn = 2 * (layers * (2 * 20 + 4 * 12) + head * 4 * 12)
    assert drawn < counted["rollout"] < drawn + 4 * attention * 33 / 32


def test_what_is_known_of_a_step_is_given_after_each_phase(capsys: Any) -> None:
    choices, known = replace(CHOICES, adapter_rank=4), []
    policy = policy_of("unified", choices)
    row = measure(policy, TAIL, choices, limit=1e12, known=known.append)
    warm, rollout = known
    assert warm["missing"] == ["rollout", "update"]
    assert "seconds" not in warm
    assert rollout["missing"] == ["update"]
    assert "missing" not in row
    for name in ("seconds", "tokens_per_s", "mfu"):
        assert rollout[name].keys() == {"rollout"}
        assert rollout[name]["rollout"] == row[name]["rollout"]
    same = rollout.keys() - {"missing", "seconds", "tokens_per_s", "mfu", "peak_gib"}
    assert {name: row[name] for name in same} == {name: rollout[name] for name in same}
    lines = capsys.readouterr().err.splitlines()
    phases = [line.split("] ")[1] for line in lines if line.startswith("[")]
    assert phases[-3:] == ["rollout", "gather", "update"]


def test_a_step_of_both_plans() -> None:
    base, row = (
        measure(policy_of(plan, CHOICES), LOAD, CHOICES, limit=1e12) for plan in ("bf16", "unified")
    )
    assert (row["different"], row["compared_tokens"]) == (0, 48)
    assert row["weights_changed"] > 0
    assert "old_logprobs" in base["seconds"]
    assert "old_logprobs" not in row["seconds"]
    assert row["step_s"] == pytest.approx(sum(row["seconds"].values()), abs=0.01)
    assert row["training_s"] == pytest.approx(
        sum(row["seconds"][part] for part in ("update", "optimizer", "requantize")), abs=0.01
    )
    assert compare(base, base)["step"] == 1.0


def test_a_row_of_an_earlier_run_is_compared_with(tmp_path: Path, capsys: Any) -> None:
    base = measure(policy_of("bf16", CHOICES), LOAD, CHOICES, limit=1e12)
    earlier = {"benchmark": "step", "device": "a card", "command": "jetrl bench step"}
    file = tmp_path / "bf16.json"
    file.write_text(json.dumps({**earlier, "date": "2026-11-21", "rows": [base]}))
    words = "--shape tiny --device cpu --plan unified --prompts 2 --samples 2 --prompt-length 20"
    main([*words.split(), "--response-length", "12", "--beside", str(file)])
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["bf16", "unified"]
    assert "times bf16: {'rollout':" in out
    file.write_text(json.dumps({"benchmark": "train", "device": "a card"}))
    with pytest.raises(UserError, match="jetrl bench step on a"):
        main(["--device", "cpu", "--beside", str(file)])


def test_words_that_do_not_fit_are_named(tmp_path: Path, capsys: Any) -> None:
    line = "--shape tiny --device cpu --layers 1 --plan bf16 --prompts 1 --response-length 8"
    words = line.split()
    with pytest.raises(UserError, match=r"train\.nosuch"):
        main([*words, "--train", "nosuch=1"])
    with pytest.raises(UserError, match=r"train\.lr"):
        main([*words, "--train", "lr"])
    with pytest.raises(UserError, match="no such file"):
        main([*words, "--beside", str(tmp_path / "none.json")])
    with pytest.raises(SystemExit):
        main([*words, "--load", "8x8x256"])
    assert "--load: invalid" in capsys.readouterr().err


TAIL = Load(prompts=3, samples=2, prompt_length=8, response_length=24, mean_length=8)


def test_a_digest_of_parts_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_parts, "_AT_ONCE", 100)
    tensor = torch.randn(7, 30)
    whole = tensor_digest("x", tensor)
    parts = [tensor_digest("x", tensor[a:b], 30 * a) for a, b in ((0, 3), (3, 3), (3, 7))]
    assert sum(parts) % 2**64 == whole
    assert tensor_digest("y", tensor) != whole
    for place in (0, 99, 100, 209):
        other = tensor.clone()
        other.view(-1).view(torch.int32)[place] ^= 1
        assert tensor_digest("x", other) != whole
    swapped = tensor.clone()
    swapped[[0, 1]] = tensor[[1, 0]]
    assert tensor_digest("x", swapped) != whole
    for dtype in (torch.uint8, torch.bfloat16, torch.float8_e4m3fn):
        tensor_digest("x", torch.zeros(3, 4).to(dtype))


def _step(load: Load, plan: str, exchange: bool = False) -> Any:
    choices = Choices("tiny", "cpu", 1, 1e-3, 40, None, {}, warm_micro_batches=2)
    return measure(policy_of(plan, choices), load, choices, 1e12, digest=True, exchange=exchange)


def test_a_step_has_the_same_digests_on_two_ranks() -> None:
    alone = _step(TAIL, "unified")
    assert alone["ranks"] == 1
    assert alone["digests"]["warm"] != alone["digests"]["step"]
    assert "exchange" not in alone
    for row in run_ranks(2, _step, TAIL, "unified", True):
        assert row["digests"] == alone["digests"]
        assert row["ranks"] == 2
        assert row["compared_tokens"] == alone["compared_tokens"] == TAIL.drawn
        assert row["different"] == alone["different"] == 0
        assert "gather" in row["seconds"]
        assert row["exchange"]["rounds"] > 0
        assert row["exchange"]["gb_sent_a_round"] >= 0
        assert set(row["planned_gib"]) == {"rollout", "update"}


class Engine:
    """An engine whose pages hold 40 GiB beside torch's tensors from a rollout to `free_cache`."""

    def __init__(self, device: torch.device) -> None:
        self.pages, self.stats = DeviceBytes(device), RolloutStats()

    def rollout(self) -> list[Completion]:
        self.pages.bytes = 40 * 2**30
        return []

    def free_cache(self) -> None:
        self.pages.bytes = 0


@pytest.mark.parametrize("exact", [True, False])
def test_the_peak_of_a_phase_is_its_own(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages are the rollout's: they are given back before an update is measured."""
    peak = [0]

    def holds(gib: int, result: Any) -> Any:
        peak[0] = max(peak[0], gib * 2**30)
        return result

    monkeypatch.setattr(device_memory, "_COUNTS", device_memory._Counts())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: peak[0])
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device=None: peak.__setitem__(0, 2 * 2**30)
    )
    flow = Flow.__new__(Flow)
    gpu = torch.device("cuda", 0)
    flow.policy = cast(Any, SimpleNamespace(device=gpu, plan=SimpleNamespace(exact=exact)))
    flow.engine = engine = cast(Any, Engine(gpu))
    flow.peaks, flow.captured = {}, (0, 0.0)
    trained = TrainedStep({}, {"optimizer": 0.0, "requantize": 0.0})
    flow.trainer = cast(Any, SimpleNamespace(step=lambda samples: holds(12, trained)))
    monkeypatch.setattr(flow, "sample", lambda seed: holds(3, engine.rollout()))
    monkeypatch.setattr(flow, "gathered", lambda completions, seed: holds(2, []))
    monkeypatch.setattr(flow, "old_logprobs", lambda samples: holds(5, []))
    rollout = draw(flow)
    assert rollout.peaks == {"rollout": 43.0}
    own = {"update": 12.0} if exact else {"old_logprobs": 5.0, "update": 12.0}
    assert train(flow, rollout.samples).peaks == {**rollout.peaks, **own}
