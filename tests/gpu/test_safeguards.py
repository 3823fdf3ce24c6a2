"""Bad numbers and too little memory on a Hopper GPU, of the real allocator and kernels."""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_models import config, make_policy, scored
from tests.training.shared import rescored

from jetrl import RolloutEngine, SamplingParams
from jetrl.errors import NonFiniteError
from jetrl.session.parity import random_prompts
from jetrl.settings.loading import Settings
from jetrl.training.trainer import Trainer
from jetrl.types import Sample

pytestmark = pytest.mark.gpu

CONFIG = config(vocab_size=5000, max_position_embeddings=8192)


def settings(**train: Any) -> Settings:
    train = {"lr": 1e-4, "tokens_per_micro_batch": 65536} | train
    return Settings.model_validate({"train": train, "algorithm": {"aggregation": "token_mean"}})


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    policy = make_policy(CONFIG)
    prompts = random_prompts(policy, 64, 400, seed=1)
    params = SamplingParams(n=2, max_tokens=384, seed=3, ignore_eos=True)
    return scored(prompts, RolloutEngine(policy).generate(prompts, params))


@contextlib.contextmanager
def memory_limit(num_bytes: float) -> Iterator[None]:
    """PyTorch's allocator refuses to hold more."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(num_bytes / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def test_training_goes_on_when_memory_runs_out(samples: list[Sample]) -> None:
    whole = Trainer(make_policy(CONFIG), settings())
    whole.step(samples)  # the optimizer has its states from here on
    again = rescored(whole.policy, samples)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    expected = whole.step(again).metrics
    needed = torch.cuda.max_memory_allocated() - before
    del whole
    trainer = Trainer(make_policy(CONFIG), settings())
    trainer.step(samples)
    again = rescored(trainer.policy, samples)
    with memory_limit(torch.cuda.memory_allocated() + 0.65 * needed):
        metrics = trainer.step(again).metrics
        smaller = trainer.step(rescored(trainer.policy, samples)).metrics
    assert "memory/train_retries" not in smaller
    assert metrics["memory/train_retries"] >= 1
    assert metrics["mismatch/num_different"] == 0
    # WGrad's groups of 128 tokens fall elsewhere: E4M3 has 4 bits of significand, so each operand
    # is off by up to 2^-4 relative, independently; over thousands of tokens the norm hardly moves.
    assert metrics["policy/grad_norm"] == pytest.approx(expected["policy/grad_norm"], rel=2**-4)


def test_sampling_goes_on_when_memory_runs_out() -> None:
    """In a process of its own: what other tests left in torch's pools counts in the limit."""
    process = multiprocessing.get_context("spawn").Process(target=sample_in_less_memory)
    process.start()
    process.join()
    assert process.exitcode == 0, "its output says why"


def sample_in_less_memory() -> None:
    policy = make_policy(CONFIG)
    prompts = random_prompts(policy, 48, 64, seed=5)
    params = SamplingParams(n=4, max_tokens=64, seed=9, ignore_eos=True)
    expected = RolloutEngine(policy).generate(prompts, params)
    engine = RolloutEngine(policy, num_pages=512, max_prefill_tokens=8192)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert engine.generate(prompts, params) == expected
    needed = torch.cuda.max_memory_allocated() - before  # the pages are not among it
    engine = RolloutEngine(policy, num_pages=512, max_prefill_tokens=8192)
    gc.collect()
    with memory_limit(torch.cuda.memory_allocated() + 0.9 * needed):
        assert engine.generate(prompts, params) == expected
    assert engine.sizes.take_retries() >= 1


@pytest.mark.parametrize("action", ["stop", "skip"])
def test_an_update_that_is_not_finite_is_not_applied(samples: list[Sample], action: Any) -> None:
    policy = make_policy(CONFIG)
    trainer = Trainer(policy, settings(on_nonfinite=action))
    before = {name: p.detach().clone() for name, p in policy.master_weights().items()}
    hook = policy.master_weights()["layers.1.o.weight"].register_hook(lambda g: g * math.inf)
    if action == "stop":
        with pytest.raises(NonFiniteError, match=r"layers\.1\.o\.weight"):
            trainer.step(samples)
    else:
        assert trainer.step(samples).metrics["policy/skipped_updates"] == 1
    assert all(torch.equal(p, before[n]) for n, p in policy.master_weights().items())
    hook.remove()
    assert trainer.step(samples).metrics["policy/grad_norm"] > 0
