"""Decode in CUDA graphs on a Hopper GPU: the same tokens and bits as forwards called one by one."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from small_models import config

from jetrl import Policy, RolloutEngine, SamplingParams
from jetrl.errors import RunStopped
from jetrl.kernels import decode as reference
from jetrl.kernels.decode_state import DecodeState, Drawn
from jetrl.kernels.sampling import random_bits
from jetrl.precision import PrecisionPlan
from jetrl.rollout.decode_forward import GraphForwards
from jetrl.session.parity import random_prompts

pytestmark = pytest.mark.gpu

CONFIG = config(vocab_size=5000, max_position_embeddings=8192, eos_token_id=7)


def make_policy(preset: str = "unified", **changes: Any) -> Policy:
    plan = PrecisionPlan.preset(preset)
    return Policy.from_config({**CONFIG, **changes}, plan, seed=0, device="cuda")


@pytest.fixture(scope="module")
def policy() -> Policy:
    return make_policy()


@pytest.fixture(scope="module")
def prompts(policy: Policy) -> list[list[int]]:
    return [*random_prompts(policy, 10, 100, seed=3), [5] * 3000]


def outcome(completions: Any) -> list[Any]:
    return [(c.token_ids, c.logprobs, c.finish_reason) for c in completions]


def count_different(policy: Policy, prompts: Any, completions: Any, n: int, t: float) -> int:
    owners = [prompts[i // n] for i in range(len(completions))]
    pairs = list(zip(owners, completions, strict=True))
    with torch.no_grad():
        trainer = policy.logprobs([[*p, *c.token_ids] for p, c in pairs], t)
    different = 0
    for (prompt, completion), logprobs in zip(pairs, trainer, strict=True):
        ours = torch.tensor(completion.logprobs)
        theirs = logprobs[len(prompt) - 1 :].cpu()
        different += int((ours.view(torch.int32) != theirs.view(torch.int32)).sum())
    return different


def test_random_bits_are_the_references() -> None:
    state = DecodeState.empty(1000, 4, torch.device("cuda"))
    generator = np.random.default_rng(0)
    keys = generator.integers(0, 2**63, 1000)
    positions = generator.integers(0, 200, 1000)
    state.key.copy_(torch.from_numpy(keys))
    state.position.copy_(torch.from_numpy(positions))
    state.active.fill_(1)
    for seed in (0, 1, 2**62 + 12345, 2**63 - 1):
        state.seed.fill_(seed)
        inputs = reference.next_inputs(state, torch.arange(1000, device="cuda"), 64)
        wanted = random_bits(np.full(1000, seed), keys, positions + 1)
        assert np.array_equal(inputs.bits.cpu().numpy(), wanted)


def test_state_moves_as_the_reference_says() -> None:
    generator = torch.Generator().manual_seed(0)
    slots, width, rows = 300, 9, 257

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    cpu = DecodeState.empty(slots, width, torch.device("cpu"))
    for name, high in {"token": 50, "position": 500, "key": 2**62, "active": 2}.items():
        getattr(cpu, name).copy_(integers(high, slots))
    cpu.limit.copy_(cpu.position + 1 + integers(3, slots))
    cpu.tables.copy_(integers(10**6, slots, width))
    cpu.stops[:4] = torch.tensor([3, 4, 5, 6])
    gpu = DecodeState(*(getattr(cpu, f).cuda() for f in cpu.__dataclass_fields__))
    which = torch.randperm(slots, generator=generator)[:rows]
    outs = [
        Drawn(
            torch.zeros(3, 300, dtype=torch.int32, device=d),
            torch.zeros(3, 300, device=d),
            torch.zeros(1, dtype=torch.int32, device=d),
        )
        for d in ("cpu", "cuda")
    ]
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
    [{"temperature": 0.7}, {"temperature": 0.0}, {"top_p": 0.8, "top_k": 50}],
    ids=str,
)
def test_graphs_are_eager_forwards_are_the_trainers(
    policy: Policy, prompts: Any, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(n=3, max_tokens=70, seed=1, **options)
    graphs = RolloutEngine(policy).generate(prompts, params)
    assert count_different(policy, prompts, graphs, 3, params.temperature or 1.0) == 0
    monkeypatch.setattr(GraphForwards, "prepare", lambda *_: None)

    monkeypatch.setattr(GraphForwards, "run", GraphForwards.forward)
    assert outcome(RolloutEngine(policy).generate(prompts, params)) == outcome(graphs)


@pytest.mark.parametrize("preset", ["jet", "bf16"])
def test_other_plans_decode_in_graphs(preset: str, prompts: Any) -> None:
    policy = make_policy(preset)
    params = SamplingParams(n=2, max_tokens=30, seed=1)
    out = RolloutEngine(policy).generate(prompts, params)
    different = count_different(policy, prompts, out, 2, 1.0)
    assert different == 0 if policy.plan.exact else different >= 0


def test_batch_1_and_256_draw_the_same(policy: Policy, prompts: Any) -> None:
    params = SamplingParams(n=24, max_tokens=40, seed=5)
    together = RolloutEngine(policy, max_batch_size=256).generate(prompts, params)
    few = SamplingParams(n=2, max_tokens=40, seed=5)
    alone = RolloutEngine(policy, max_batch_size=1).generate(prompts, few)
    for p in range(len(prompts)):
        mine = outcome(together)[p * 24 : p * 24 + 2]
        assert mine == outcome(alone)[p * 2 : p * 2 + 2]


def test_nothing_depends_on_how_far_the_host_is_ahead(policy: Policy, prompts: Any) -> None:
    params, few = SamplingParams(n=2, max_tokens=200, seed=2, ignore_eos=True), prompts[:10]
    wanted = outcome(RolloutEngine(policy).generate(few, params))
    for repeats, ahead, pages in ((1, 0, None), (16, 2, None), (8, 1, 9), (3, 1, 7)):
        engine = RolloutEngine(policy, num_pages=pages, max_batch_size=16)
        engine._repeats, engine._ahead = repeats, ahead
        assert outcome(engine.generate(few, params)) == wanted
        assert pages is None or engine.stats.preemptions > 0


def test_new_weights_are_used_by_old_graphs(prompts: Any) -> None:
    policy = make_policy()
    params = SamplingParams(n=2, max_tokens=40, seed=2)
    engine = RolloutEngine(policy)
    before = outcome(engine.generate(prompts, params))
    assert engine.stats.graphs > 0
    assert 0 < engine.stats.capture_s < engine.stats.seconds
    graphs = engine._pool._decode
    with torch.no_grad():
        for master in policy.master_weights().values():
            master.mul_(1.05)
    policy.requantize()
    after = outcome(engine.generate(prompts, params))
    assert engine._pool._decode is graphs
    assert engine.stats.graphs == 0
    assert after != before
    assert after == outcome(RolloutEngine(policy).generate(prompts, params))


@pytest.mark.parametrize("vocab_size", [5000, 150_000])
def test_interrupted_and_used_again(prompts: Any, vocab_size: int) -> None:
    """Graphs of the larger vocabulary work in memory of many MiB, which torch gives back whole."""
    policy = make_policy(vocab_size=vocab_size)
    params = SamplingParams(n=2, max_tokens=90, seed=2)
    engine = RolloutEngine(policy)
    wanted = outcome(engine.generate(prompts, params))
    calls = 0

    def interrupt(progress: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            torch.cuda._sleep(10**9)  # The step behind it has not begun when the call is cut.
        if calls == 4:
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
    policy = make_policy()
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
