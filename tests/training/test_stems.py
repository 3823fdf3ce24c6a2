"""Prompts that are computed once for all of their samples: the same log-probs, less work."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.training.shared import make_policy, rescored, scalar_config, settings
from torch import Tensor

from jetrl.models.packed import ForwardInputs, Stems
from jetrl.models.policy import Policy
from jetrl.models.scalar_model import ScalarModel
from jetrl.precision.plan import PrecisionPlan
from jetrl.training.micro_batches import batch_logprobs
from jetrl.training.packing import pack, targets
from jetrl.training.trainer import Trainer
from jetrl.types import Batch


def batch_of(lengths: list[int], ids: list[int] | None, stems: list[int]) -> Batch:
    ends = np.cumsum([0, *lengths])
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, ends[-1])
    for i, (start, stem) in enumerate(zip(ends, stems, strict=False)):
        owner = ends[ids.index(ids[i])] if ids else start
        tokens[start : start + stem] = tokens[owner : owner + stem]
    mask = np.ones(ends[-1], dtype=np.bool_)
    for start, stem in zip(ends, stems, strict=False):
        mask[start : start + max(1, stem)] = False
    zeros = np.zeros(ends[-1], dtype=np.float32)
    return Batch(
        token_ids=tokens,
        positions=np.concatenate([np.arange(length) for length in lengths]),
        cu_seqlens=ends,
        loss_mask=mask,
        rollout_logprobs=zeros,
        advantages=zeros,
        sample_ids=np.arange(len(lengths)),
        stem_ids=None if ids is None else np.asarray(ids),
        stem_lengths=None if ids is None else np.asarray(stems),
    )


def group(sample, index: int, prompt: int, completions: list[int]):
    rng = np.random.default_rng(index)
    tokens = rng.integers(0, 32, prompt).tolist()
    return [sample(index, tokens, rng.integers(0, 32, n).tolist(), float(n)) for n in completions]


def test_samples_of_a_prompt_are_packed_beside_each_other(sample) -> None:
    samples = group(sample, 0, 130, [30, 20, 10]) + group(sample, 1, 256, [4, 50])
    whole, shared = pack(samples, 400), pack(samples, 400, share_prompts=True)
    # Whole: 306 of 400 tokens, 260, 160 + 150 and 140. With stems: 256 + 50 + 4, then 128 and the
    # rest of each sample.
    assert [b.sample_ids.tolist() for b in whole] == [[4], [2, 3], [0, 1]]
    assert [b.sample_ids.tolist() for b in shared] == [[3, 4], [0, 1, 2]]
    assert [b.num_tokens for b in shared] == [566, 450]
    assert [b.num_computed_tokens for b in shared] == [310, 194]
    assert shared[1].stem_lengths.tolist() == [128, 128, 128]


def test_a_stem_is_repeated_where_a_batch_is_full(sample) -> None:
    batches = pack(group(sample, 0, 128, [100] * 5), 340, share_prompts=True)
    assert [b.num_computed_tokens for b in batches] == [328, 328, 228]
    assert sorted(i for b in batches for i in b.sample_ids.tolist()) == list(range(5))


SHAPES = [140, 129, 300, 257, 131, 20]
IDS, STEMS = [0, 0, 2, 2, 0, 5], [128, 128, 256, 256, 128, 0]


def gradient(policy: Policy, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    logprobs, _ = batch_logprobs(policy, batch)
    weights = torch.linspace(-1, 1, len(logprobs))
    (logprobs * weights).sum().backward()
    masters = policy.master_weights()
    gradients = {name: p.grad.clone() for name, p in masters.items() if p.grad is not None}
    for p in masters.values():
        p.grad = None
    return logprobs.detach(), gradients


@pytest.mark.parametrize("preset", ["unified", "bf16", "fp32"])
def test_log_probs_have_the_same_bits_and_gradients_the_same_sums(preset: str) -> None:
    policy = make_policy(preset, max_position_embeddings=512)
    shared, whole = batch_of(SHAPES, IDS, STEMS), batch_of(SHAPES, None, STEMS)
    whole.token_ids[:] = shared.token_ids
    logprobs, gradients = gradient(policy, shared)
    expected, whole_gradients = gradient(policy, whole)
    # float32 GEMMs of the library have other bits for other numbers of rows.
    if preset == "fp32":
        assert (logprobs - expected).abs().max() < 1e-5
    else:
        assert torch.equal(logprobs, expected)
    # Gradients of equal tokens are added before they are rounded, in place of after: a rounding to
    # BF16 (2**-9) or E4M3 (2**-4) of each of a layer's products, of which one norm is made.
    tolerance = {"fp32": 1e-5, "bf16": 2.0**-6}.get(preset, 2.0**-3)
    assert gradients.keys() == whole_gradients.keys()
    for name, g in gradients.items():
        other = whole_gradients[name]
        assert (g - other).norm() <= tolerance * other.norm(), name


def test_values_of_a_scalar_model_have_the_same_bits() -> None:
    shared, whole = batch_of(SHAPES, IDS, STEMS), batch_of(SHAPES, None, STEMS)
    score = scalar_config(vocab_size=32, max_position_embeddings=512)
    model = ScalarModel.from_config(score, PrecisionPlan.preset("unified"), seed=0)

    def values(stems: Stems | None) -> Tensor:
        rows = torch.from_numpy(targets(shared))
        ends = torch.from_numpy(whole.cu_seqlens)
        return model.values(ForwardInputs.of(shared), ends, rows, stems=stems)

    assert torch.equal(values(Stems.of(shared)), values(None))


def test_a_step_compares_all_tokens_and_trains(sample) -> None:
    """An exact plan would stop the step if a token's log-prob were not the sampler's."""
    policy = make_policy(max_position_embeddings=512)
    samples = group(sample, 0, 130, [7, 5, 9]) + group(sample, 1, 140, [4, 6, 3])
    chosen = settings({"share_prompts": True, "tokens_per_micro_batch": 600})
    metrics = Trainer(policy, chosen).step(rescored(policy, samples)).metrics
    assert metrics["mismatch/num_different"] == 0
    assert metrics["policy/grad_norm"] > 0
