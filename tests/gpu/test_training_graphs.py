"""Updates as captured graphs have the bits of eager updates, on a GPU."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.loads import make_samples
from small_models import config, make_policy

from jetrl import Policy
from jetrl.memory.graphs import GraphCapture
from jetrl.settings.loading import load_config
from jetrl.training.graphs import UpdateGraphs
from jetrl.training.trainer import Trainer
from jetrl.types import Completion, Sample

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

# Tokens of each sequence: of three micro-batches per update, two have numbers of tokens that need
# rows of zeros, in the last group of 128 and beyond it.
LENGTHS = [700, 300, 517, 33, 129, 64, 900, 650, 411, 20]


def samples_of(policy: Policy, seed: int, lengths: Sequence[int]) -> list[Sample]:
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, policy.config.vocab_size, n).tolist() for n in lengths]
    with torch.no_grad():
        rows = policy.logprobs(texts)
    done = [
        Completion(tuple(text[4:]), tuple(row[3:].tolist()), "length")
        for text, row in zip(texts, rows, strict=True)
    ]
    rewards = rng.random(len(done)).tolist()
    made = make_samples([text[:4] for text in texts], done, rewards)
    return [dataclasses.replace(sample, group=0) for sample in made]


def trained(
    family: str, plan: str, graphs: str, lengths: Sequence[int] = LENGTHS, **train: Any
) -> tuple[list[Any], UpdateGraphs | None]:
    """Return the bits of gradients, weights and metrics of four updates, and their graphs."""
    policy = make_policy(config(family), plan)
    words = {"lr": 1e-3, "tokens_per_micro_batch": 1500, "graphs": graphs, **train}
    trainer = Trainer(policy, load_config(None, [f"train.{k}={v}" for k, v in words.items()]))
    seen: list[Any] = []
    apply = trainer.optimizer.apply

    def record(norm: torch.Tensor) -> None:
        seen.append({n: _bits(p.grad) for n, p in trainer.optimizer.masters.items()})
        apply(norm)

    trainer.optimizer.apply = record  # type: ignore[method-assign]
    for step in range(4):
        seen.append(trainer.step(samples_of(policy, step, lengths)).metrics)
    seen.append({n: _bits(p.detach()) for n, p in policy.master_weights().items()})
    seen.append({n: t.cpu() for n, t in policy.weights.quantized_tensors().items()})
    return seen, trainer._update.graphs


def _bits(x: torch.Tensor | None) -> torch.Tensor:
    assert x is not None
    return x.view(torch.int32).cpu()


def different(ours: list[Any], theirs: list[Any]) -> list[str]:
    found = []
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.keys() == b.keys()
        for name in a:
            equal = (
                torch.equal(a[name], b[name]) if torch.is_tensor(a[name]) else a[name] == b[name]
            )
            if not equal:
                found.append(f"record {number}: {name}")
    return found


@pytest.mark.parametrize("states", ["fp32", "compact"])
@pytest.mark.parametrize("family", ["smollm2", "qwen2", "qwen3"])
@pytest.mark.parametrize("plan", ["int8", "unified"])
def test_bits(family: str, plan: str, states: str) -> None:
    eager, none = trained(family, plan, "off", optimizer_states=states)
    captured, graphs = trained(family, plan, "on", optimizer_states=states)
    assert none is None
    assert graphs is not None
    assert graphs._decoder._graphs, "no micro-batch was captured"
    assert not different(captured, eager)


def test_shared_prompts_keep_their_bits() -> None:
    lengths = [400] * 8
    eager, _ = trained("smollm2", "int8", "off", lengths, share_prompts="true")
    captured, _ = trained("smollm2", "int8", "on", lengths, share_prompts="true")
    assert not different(captured, eager)


def test_bf16_of_whole_sizes_keeps_its_bits_but_for_norms() -> None:
    """Without rows of zeros, products of the library have the same sizes as eager ones."""
    lengths = [512, 512, 512, 512]
    eager, _ = trained("smollm2", "bf16", "off", lengths, tokens_per_micro_batch=1024)
    captured, graphs = trained("smollm2", "bf16", "on", lengths, tokens_per_micro_batch=1024)
    assert graphs is not None
    assert graphs._decoder._graphs
    first_eager, first_captured = eager[1], captured[1]
    assert first_eager["policy/loss"] == first_captured["policy/loss"]
    assert captured[-3]["policy/grad_norm"] == pytest.approx(
        eager[-3]["policy/grad_norm"], rel=1e-2
    )


def test_graphs_can_be_closed_while_others_are_captured() -> None:
    x = torch.zeros(1000, device="cuda")
    closed, kept = GraphCapture(x.device), GraphCapture(x.device)
    for _ in range(2):
        closed.capture(lambda: x + 1)
    pools = closed._pool.pools
    kept.warm_up(closed.close)
    assert pools == []
    late = GraphCapture(x.device)
    late.capture(lambda: x + 1)

    def work() -> None:
        late.close()
        x.add_(1)

    kept.capture(work)()
    assert (late._pool.pools, float(x.sum())) == ([], 1000.0)


def test_memory_is_counted_and_given_back() -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    policy = make_policy(config("smollm2"), "int8")
    capture = GraphCapture(policy.device)
    graphs = UpdateGraphs(policy, capture)
    trainer = Trainer(policy, load_config(None, ["train.tokens_per_micro_batch=1500"]))
    trainer._update = dataclasses.replace(trainer._update, graphs=graphs)
    for step in range(3):
        trainer.step(samples_of(policy, step, LENGTHS))
    assert capture._held.bytes > 2**20
    assert graphs.give_up("a test")
    assert capture._held.bytes == 0
    trainer.step(samples_of(policy, 3, LENGTHS))  # eagerly
    del trainer, graphs, capture, policy
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before + 2**24
