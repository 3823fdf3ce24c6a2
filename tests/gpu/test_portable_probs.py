"""The portable kernels of log-probs and sampling on a GPU: the bits of their references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kernels.interpreted_probs import (
    differences,
    different,
    logits_of,
    sample_differences,
    special_rows,
)

from jetrl.kernels.logprob import chosen_logprobs_ref
from jetrl.kernels.portable import logprob, sampling
from jetrl.kernels.sampling import sample_ref

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("std", [0.01, 3.0, 40.0])
@pytest.mark.parametrize(
    "rows, vocabulary",
    [(5, 1), (3, 7), (16, 1024), (17, 1025), (8, 4097), (33, 50257), (40, 151936), (3, 262144)],
)
def test_bits_of_the_references(rows: int, vocabulary: int, std: float) -> None:
    """A failure names the cases and how many values differ."""
    assert differences(logits_of(rows, vocabulary, std, "cuda")) == {}


@pytest.mark.parametrize("vocabulary", [2, 1000, 4096, 151936])
def test_special_rows(vocabulary: int) -> None:
    assert differences(special_rows(vocabulary, "cuda")) == {}
    twice = special_rows(vocabulary, "cuda").repeat(2, 1)  # blocks of many rows
    assert sample_differences(twice) == {}


def test_bits_of_the_reference_on_a_cpu() -> None:
    logits = logits_of(4, 20000, 3.0, "cpu")
    chosen, temperature = torch.tensor([1, 2, 3, 19999]), torch.full((4, 1), 0.7)
    given = (logits, chosen, temperature)
    ours = logprob.exact_logprobs(*(x.cuda() for x in given))
    for mine, theirs in zip(ours, chosen_logprobs_ref(*given), strict=True):
        assert different(mine.cpu(), theirs) == 0
    row = torch.full((4,), 0.9)
    drawn = (logits, torch.arange(4) * 2**50, row, row, torch.arange(4) * 7, True)
    sampled = sampling.sample(*(x.cuda() if torch.is_tensor(x) else x for x in drawn))
    for mine, theirs in zip(sampled, sample_ref(*drawn), strict=True):
        assert different(mine.cpu(), theirs) == 0


@pytest.mark.parametrize("filtered", [False, True])
def test_sampling_can_be_captured(filtered: bool) -> None:
    """A graph gives the tokens of new logits and bits."""
    rows, vocabulary = 24, 5000
    logits = logits_of(rows, vocabulary, 3.0, "cuda")
    bits = torch.zeros(rows, dtype=torch.int64, device="cuda")
    ones = torch.ones(rows, device="cuda")
    given: tuple[Any, ...] = (logits, bits, ones, ones * 0.8, bits + 50, filtered)
    sampling.sample(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = sampling.sample(*given)
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        logits.copy_(torch.randn(rows, vocabulary, generator=g))
        bits.copy_(torch.randint(0, 2**53, (rows,), generator=g))
        graph.replay()
        found = [different(*both) for both in zip(results, sample_ref(*given), strict=True)]
        assert found == [0, 0, 0], "tokens, log-probs, lse"
