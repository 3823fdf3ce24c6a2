"""Graphs of an update: replays at fixed addresses have the bits of eager updates."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from tests.training.conftest import make_sample
from tests.training.shared import config, make_policy, rescored, settings
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import jetrl.kernels.norm
import jetrl.training.optimizer
from jetrl.errors import UserError
from jetrl.memory.graphs import captures_updates
from jetrl.models.families import ModelConfig
from jetrl.precision.plan import PrecisionPlan
from jetrl.training.graphs import StaticGradients, UpdateGraphs, training_graphs
from jetrl.training.trainer import Trainer

HOST = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal"}


class Log(TorchDispatchMode):
    """Keeps all operations of work, as a CUDA graph keeps kernels and their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.name() not in HOST, f"{func.name()}: a graph cannot wait for a value"
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, out in self.operations:
            made = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(made), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    @torch.no_grad()
    def forget(self) -> None:
        """Spoil all that work computed: a capture computes nothing."""
        # Memory that is an argument before it is a result is not of this work.
        given: set[int] = set()
        made: dict[int, torch.Tensor] = {}
        for _, args, kwargs, out in self.operations:
            arguments = {_storage(x) for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)}
            given |= arguments - made.keys()
            made |= {_storage(x): x for x in tree_leaves(out) if _storage(x) not in given}
        for x in made.values():
            with torch.autograd._unsafe_preserve_version_counter(x):
                x.fill_(float("nan") if x.is_floating_point() else 1)


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


class Recorded:
    """Captures on a CPU: `memory.graphs.GraphCapture` by a log of operations."""

    def __init__(self) -> None:
        self.counts = Counter[str]()

    def begin(self) -> None:
        self.counts["begin"] += 1

    def end(self) -> None:
        self.counts["end"] += 1

    def close(self) -> None:
        self.counts["close"] += 1

    def warm_up(self, work: Any) -> Any:
        return work()

    def capture(self, work: Any) -> Any:
        log = Log()
        with log, pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "numpy", _no_numpy)
            work()
        self.counts["graphs"] += 1
        log.forget()

        def replay() -> None:
            self.counts["replays"] += 1
            log.replay()

        return replay

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()


def _no_numpy(*_: Any) -> None:
    raise AssertionError("a graph cannot wait for a value")


@pytest.fixture(autouse=True)
def root_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's root is not an operation of torch, which the log would see."""
    for module in (jetrl.kernels.norm, jetrl.training.optimizer):
        monkeypatch.setattr(module, "square_root", torch.sqrt)


def samples_of(policy: Any, seed: int, longest: int = 40) -> list[Any]:
    rng = np.random.default_rng(seed)
    made = []
    for i in range(6):
        prompt = rng.integers(0, 32, 2 + int(rng.integers(4))).tolist()
        completion = rng.integers(0, 32, 1 + int(rng.integers(longest))).tolist()
        made.append(make_sample(i // 3, prompt, completion, float(rng.integers(3))))
    return rescored(policy, made)


def run(kind: str, preset: str, captures: Recorded | None, **changes: Any) -> list[Any]:
    """Return the bits of gradients, weights and metrics of four steps, of several micro-batches."""
    changes = {"num_hidden_layers": 2, **changes}
    policy = make_policy(preset, model_type=kind, **changes)
    trainer = Trainer(policy, settings({"tokens_per_micro_batch": 60}))
    if captures is not None:
        graphs = UpdateGraphs(policy, captures)
        trainer._update = dataclasses.replace(trainer._update, graphs=graphs)
    seen: list[Any] = []
    apply = trainer.optimizer.apply

    def record(norm: torch.Tensor) -> None:
        seen.append({n: bits(p.grad) for n, p in trainer.optimizer.masters.items()})
        apply(norm)

    trainer.optimizer.apply = record  # type: ignore[method-assign]
    for step in range(4):
        seen.append(trainer.step(samples_of(policy, step)).metrics)
    seen.append({n: bits(p.detach()) for n, p in policy.master_weights().items()})
    seen.append({n: t.clone() for n, t in policy.weights.quantized_tensors().items()})
    return seen


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.clone().view(torch.int32)


def same(ours: list[Any], theirs: list[Any]) -> None:
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.keys() == b.keys()
        for name in a:
            equal = (
                torch.equal(a[name], b[name]) if torch.is_tensor(a[name]) else a[name] == b[name]
            )
            assert equal, f"record {step}: {name}"


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
@pytest.mark.parametrize("preset", ["int8", "unified"])
def test_replays_have_the_bits_of_eager_updates(kind: str, preset: str) -> None:
    captures = Recorded()
    changes = {"tie_word_embeddings": kind == "qwen3"}
    same(run(kind, preset, captures, **changes), run(kind, preset, None, **changes))
    # Three segments, forward and backward, for one number of rows; the norm; requantization.
    assert captures.counts["graphs"] == 2 * 3 + 2
    assert captures.counts["replays"] > 3 * 6
    assert captures.counts["begin"] == captures.counts["end"] == 3


def test_sums_start_without_a_bit_of_their_own() -> None:
    policy = make_policy("int8", tie_word_embeddings=False)
    static = StaticGradients(policy, list(policy.master_weights().values()))
    static.attach()
    for name, master in policy.master_weights().items():
        assert master.grad is not None
        assert not master.grad.any()
        # -0 + -0 is -0; rows of the embedding that no token reads stay +0, as without graphs.
        assert bool(master.grad.signbit().all()) == (name != "embed.weight"), name
    with static.kept():
        policy.decoder.embed.grad += 1.0
    assert not policy.decoder.embed.grad.any()
    policy.decoder.embed.grad = torch.zeros_like(policy.decoder.embed)
    with pytest.raises(AssertionError, match=r"moved: \[\(32, 128\)\]"):
        static.check()


class NoRoom(Recorded):
    def capture(self, work: Any) -> Any:
        if self.counts["graphs"] == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return super().capture(work)


def test_without_room_for_graphs_updates_continue_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    captures = NoRoom()
    same(run("qwen3", "int8", captures), run("qwen3", "int8", None))
    assert captures.counts["close"] == 1
    assert captures.counts["replays"] == 0
    assert "train.graphs is off from now on" in caplog.text


REFUSED = [
    ({}, "int8", {"gpus": 2}, "several GPUs"),
    ({}, "int8", {"frozen": True}, "adapters"),
    ({"activation_checkpointing": True}, "int8", {}, "activation_checkpointing"),
    ({}, "integer", {}, "precision.preset = integer"),
    ({}, "fp32", {}, "precision.preset = fp32"),
    ({}, "nvfp4", {}, "precision.preset = nvfp4"),
    ({}, "fp4", {}, "precision.preset = fp4"),
    ({}, "int8", {"config": "olmo"}, "OlmoeForCausalLM"),
]


@pytest.mark.parametrize(("train", "preset", "given", "words"), REFUSED)
def test_updates_that_cannot_be_captured(
    train: dict[str, Any], preset: str, given: dict[str, Any], words: str
) -> None:
    given = {"gpus": 1, "frozen": False, **given}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 64}
    kind = {"model_type": "olmoe", **experts} if given.pop("config", None) else {}
    model, plan = ModelConfig.from_hf(config(**kind)), PrecisionPlan.preset(preset)

    def captured(graphs: str) -> bool:
        return captures_updates(settings({**train, "graphs": graphs}).train, model, plan, **given)

    assert not captured("off")
    assert not captured("auto")
    with pytest.raises(UserError, match=rf"train.graphs = on: .*{words}"):
        captured("on")


@pytest.mark.parametrize(
    ("preset", "same"), [("int8", True), ("unified", True), ("jet", True), ("bf16", False)]
)
def test_auto_captures_what_keeps_its_bits(preset: str, same: bool) -> None:
    given = (ModelConfig.from_hf(config()), PrecisionPlan.preset(preset), 1, False)
    assert captures_updates(settings({"graphs": "auto"}).train, *given) == same
    assert captures_updates(settings({"graphs": "on"}).train, *given)


def test_a_cpu_captures_nothing() -> None:
    policy = make_policy("int8")
    assert training_graphs(policy, settings({"graphs": "auto"}).train) is None
    with pytest.raises(UserError, match=r"train.graphs = on: only .* capture updates"):
        training_graphs(policy, settings({"graphs": "on"}).train)
