"""Pages whose memory is given back for an update: the addresses stay, and with them the graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import config, make_policy, outcome, scored

from jetrl import RolloutEngine, SamplingParams
from jetrl.memory.device import bytes_outside_torch
from jetrl.session.parity import random_prompts
from jetrl.settings.loading import Settings
from jetrl.training.trainer import Trainer

pytestmark = pytest.mark.gpu

CONFIG = config(vocab_size=5000, max_position_embeddings=8192)
PAGES = 512


@pytest.fixture(scope="module")
def mapped() -> Any:
    """The class, of a module that only a GPU's installation can import."""
    from jetrl.rollout.mapped_memory import MappedMemory

    return MappedMemory


def test_memory_comes_again_at_its_addresses(mapped: Any) -> None:
    size = 2**31 + 2**20 + 3  # offsets beyond 32 bits with a sign
    memory = mapped(size, torch.device("cuda"))
    before = bytes_outside_torch()
    addresses, freed = set(), []
    for turn in range(50):
        assert not memory.mapped
        memory.map()
        bytes = memory.tensor()
        assert bytes.shape == (size,)
        assert bytes_outside_torch() >= before + size
        addresses.add(bytes.data_ptr())
        bytes.fill_(turn)
        assert bytes[-1].item() == turn
        torch.cuda.synchronize()
        while_mapped, _ = torch.cuda.mem_get_info()
        memory.unmap()
        memory.unmap()  # nothing is left to do
        freed.append(torch.cuda.mem_get_info()[0] - while_mapped)
        if turn >= 2 and max(freed) >= size:
            break
    assert len(addresses) == 1
    assert max(freed) >= size, "beside other processes on the card one of fifty would show it"
    memory.map()
    del memory
    bytes.zero_()  # which keeps it
    assert bytes[-1].item() == 0
    assert bytes_outside_torch() > before
    del bytes
    assert bytes_outside_torch() == before


def test_too_much_is_out_of_memory(mapped: Any) -> None:
    before = bytes_outside_torch()
    memory = mapped(2**38, torch.device("cuda"))
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to map 256\.00 GiB"):
            memory.map()
        assert not memory.mapped
    assert bytes_outside_torch() == before


@pytest.mark.parametrize("kv", ["fp8", "int8", "bf16"])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.8}], ids=str)
def test_after_an_update_the_graphs_are_the_same(kv: str, options: dict[str, Any]) -> None:
    """Two updates of the masters; in between a trainer's forward and backward use the memory."""
    policy = make_policy(CONFIG, kv=kv)
    prompts = [*random_prompts(policy, 10, 100, seed=3), [5] * 1500]
    params = SamplingParams(n=3, max_tokens=60, seed=1, **options)
    settings = {"train": {"lr": 1e-3}, "algorithm": {"aggregation": "token_mean"}}
    trainer = Trainer(policy, Settings.model_validate({**settings, "rollout": options}))
    engine = RolloutEngine(policy, num_pages=PAGES)
    completions = engine.generate(prompts, params)
    assert engine.stats.graphs > 0
    assert 0 < engine.stats.capture_s < engine.stats.seconds
    for _ in range(2):
        before = bytes_outside_torch()
        assert engine._pool._cache is not None
        engine.free_cache()
        assert bytes_outside_torch() <= before - engine._pool._cache.num_bytes
        metrics = trainer.step(scored(prompts, completions)).metrics
        assert metrics["mismatch/num_different"] == 0
        last, completions = completions, engine.generate(prompts, params)
        assert engine.stats.graphs == 0
        assert outcome(completions) != outcome(last)
        fresh = RolloutEngine(policy, num_pages=PAGES)
        assert outcome(fresh.generate(prompts, params)) == outcome(completions)
        assert fresh.stats.graphs > 0


def test_no_memory_for_the_pages_halves_the_sizes(
    mapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_policy(CONFIG)
    prompts = random_prompts(policy, 10, 100, seed=3)
    params = SamplingParams(n=2, max_tokens=40, seed=1)
    engine = RolloutEngine(policy, max_batch_size=16)
    expected = outcome(engine.generate(prompts, params))
    engine.free_cache()
    really, refused = mapped.map, []

    def map(self: Any) -> None:
        if not refused:
            refused.append(self)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to map it")
        really(self)

    monkeypatch.setattr(mapped, "map", map)
    assert outcome(engine.generate(prompts, params)) == expected
    assert engine.sizes.take_retries() == 1
    assert engine.stats.graphs > 0, "of the smaller batch"
    engine.free_cache()
    assert outcome(engine.generate(prompts, params)) == expected
    assert engine.stats.graphs == 0


def test_an_engine_that_goes_leaves_nothing() -> None:
    policy = make_policy(CONFIG)
    before = bytes_outside_torch()
    engine = RolloutEngine(policy, num_pages=PAGES)
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=9, ignore_eos=True))
    assert bytes_outside_torch() > before
    del engine
    assert bytes_outside_torch() == before
