"""Decode in CUDA graphs on a Hopper GPU: the same tokens and bits as forwards called one by one."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from small_models import config, make_policy, outcome
from tests.training.shared import count_different

from jetrl import Policy, RolloutEngine, SamplingParams
from jetrl.errors import RunStopped
from jetrl.kernels import decode as reference
from jetrl.kernels.decode_state import DecodeState, Drawn
from jetrl.rollout.decode import GraphForwards
from jetrl.session.parity import random_prompts

pytestmark = pytest.mark.gpu

CONFIG = config(vocab_size=5000, max_position_embeddings=8192, eos_token_id=7)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return make_policy(CONFIG)


@pytest.fixture(scope="module")
def prompts(policy: Policy) -> list[list[int]]:
    return [*random_prompts(policy, 10, 100, seed=3), [5] * 3000]


def test_state_moves_as_the_reference_says() -> None:
    generator = torch.Generator().manual_seed(0)
    slots, width, rows = 300, 9, 257

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    cpu = DecodeState.empty(slots, width, torch.device("cpu"))
    for name, high in {
        "token": 50,
        "position": 500,
        "key": 2**62,
        "active": 2,
        "offset": 99,
    }.items():
        getattr(cpu, name).copy_(integers(high, slots))
    cpu.limit.copy_(cpu.position + 1 + integers(3, slots))
    cpu.tables.copy_(integers(10**6, slots, width))
    cpu.seed.copy_(2**62 + 12345 + torch.arange(len(cpu.seed)))
    cpu.stops[:4] = torch.tensor([3, 4, 5, 6])
    gpu = DecodeState(*(getattr(cpu, f).cuda() for f in cpu.__dataclass_fields__))
    which = torch.randperm(slots, generator=generator)[:rows]
    blank = torch.zeros(3, 300).int(), torch.zeros(3, 300), torch.zeros(1).int()
    outs = [Drawn(*(x.to(d, copy=True) for x in blank)) for d in ("cpu", "cuda")]
    for _ in range(3):
        a, b = (reference.next_inputs(s, which.to(s.token.device), 64) for s in (cpu, gpu))
        for name in a.__dataclass_fields__:
            assert torch.equal(getattr(a, name), getattr(b, name).cpu()), name
        tokens, logprobs = integers(50, rows), torch.randn(rows, generator=generator)
        lse = torch.where(integers(20, rows) == 0, torch.nan, logprobs + 1)
        for state, out in zip((cpu, gpu), outs, strict=True):
            d = state.token.device
            reference.take_draws(state, which.to(d), tokens.to(d), logprobs.to(d), lse.to(d), out)
        for name in cpu.__dataclass_fields__:
            assert torch.equal(getattr(cpu, name), getattr(gpu, name).cpu()), name
        for name in ("tokens", "logprobs", "count"):
            assert torch.equal(getattr(outs[0], name), getattr(outs[1], name).cpu()), name


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"top_p": 0.8, "top_k": 50},
        {"min_p": 0.1, "temperature": 0.7},
        {"top_p": 0.8, "truncated_logprobs": False},
    ],
    ids=str,
)
def test_graphs_are_eager_forwards_are_the_trainers(
    policy: Policy, prompts: Any, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(n=3, max_tokens=70, seed=1, **options)
    graphs = RolloutEngine(policy).generate(prompts, params)
    assert count_different(policy, prompts, graphs, params) == 0
    monkeypatch.setattr(GraphForwards, "prepare", lambda *_: None)
    monkeypatch.setattr(GraphForwards, "run", GraphForwards.forward)
    assert outcome(RolloutEngine(policy).generate(prompts, params)) == outcome(graphs)


def test_nothing_depends_on_sizes_or_on_how_far_the_host_is_ahead(
    policy: Policy, prompts: Any
) -> None:
    params, few = SamplingParams(n=2, max_tokens=200, seed=2, ignore_eos=True), prompts[:10]
    wanted = outcome(RolloutEngine(policy).generate(few, params))
    for sizes in ({"max_batch_size": 1}, {"max_batch_size": 3}, {"max_prefill_tokens": 64}):
        assert outcome(RolloutEngine(policy, **sizes).generate(few, params)) == wanted
    for repeats, ahead, pages in ((1, 0, None), (16, 2, None), (8, 1, 9), (3, 1, 7)):
        engine = RolloutEngine(policy, num_pages=pages, max_batch_size=16)
        engine._repeats, engine._ahead = repeats, ahead
        assert outcome(engine.generate(few, params)) == wanted
        assert pages is None or engine.stats.preemptions > 0


@pytest.mark.parametrize("vocab_size", [5000, 150_000])
def test_interrupted_and_used_again(prompts: Any, vocab_size: int) -> None:
    """Graphs of the larger vocabulary work in memory of many MiB, which torch gives back whole."""
    policy = make_policy({**CONFIG, "vocab_size": vocab_size})
    params = SamplingParams(n=2, max_tokens=90, seed=2)
    engine = RolloutEngine(policy)
    wanted = outcome(engine.generate(prompts, params))
    calls: list[Any] = []

    def interrupt(progress: Any) -> None:
        calls.append(progress)
        if len(calls) == 3:
            torch.cuda._sleep(10**9)  # The step behind it has not begun when the call is cut.
        if len(calls) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, params, progress=interrupt)
    assert engine.pages_in_use == 0
    assert outcome(engine.generate(prompts, params)) == wanted


def test_interrupted_where_segments_of_memory_grow() -> None:
    """With the allocator of the command line, memory of a graph that is given up is unmapped."""
    test = f"{__file__}::{test_interrupted_and_used_again.__name__}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", test],
        env={**os.environ, "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_logits_that_are_not_finite_stop_the_run(prompts: Any) -> None:
    policy = make_policy(CONFIG)
    engine = RolloutEngine(policy)
    params = SamplingParams(n=2, max_tokens=20, seed=2)
    wanted = outcome(engine.generate(prompts, params))
    table = policy.decoder.rotary_table
    kept = table[3010].clone()
    table[3010] = float("nan")  # met in decode only, by the samples of the last prompt
    with pytest.raises(RunStopped, match="not finite"):
        engine.generate(prompts, params)
    table[3010] = kept
    assert outcome(engine.generate(prompts, params)) == wanted
