"""The portable kernels of log-probs and sampling on a GPU: the bits of their references."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.kernels.interpreted_probs import (
    differences,
    different,
    filter_differences,
    logits_of,
    sample_differences,
    special_rows,
)

from jetrl.kernels.allowed_tokens import RowFilters
from jetrl.kernels.logprob import chosen_logprobs_ref
from jetrl.kernels.portable import logprob
from jetrl.kernels.sampling import sample
from jetrl.precision.backend import selected_backend

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def of_defined_plans() -> Iterator[None]:
    """Other plans sample by kernels whose log-probs differ from a CPU's."""
    with selected_backend(defined=True):
        yield


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
    assert sample_differences(twice) | filter_differences(twice) == {}


def test_bits_of_the_reference_on_a_cpu() -> None:
    logits = logits_of(4, 20000, 3.0, "cpu")
    chosen, temperature = torch.tensor([1, 2, 3, 19999]), torch.full((4, 1), 0.7)
    given = (logits, chosen, temperature)
    ours = logprob.exact_logprobs(*(x.cuda() for x in given))[:2]
    for mine, theirs in zip(ours, chosen_logprobs_ref(*given), strict=True):
        assert different(mine.cpu(), theirs) == 0
    row = torch.full((4,), 0.9)
    drawn = (torch.arange(4) * 2**50, row, RowFilters(row, torch.arange(4) * 7, row / 100))
    bits, temperature, filters = drawn
    on_gpu = RowFilters(*(x.cuda() for x in filters))
    sampled = sample(logits.cuda(), bits.cuda(), temperature.cuda(), on_gpu)
    for mine, theirs in zip(sampled, sample(logits, *drawn), strict=True):
        assert different(mine.cpu(), theirs) == 0


@pytest.mark.parametrize("of_all", [False, True])
@pytest.mark.parametrize("filtered", [False, True])
def test_sampling_can_be_captured(filtered: bool, of_all: bool) -> None:
    """A graph gives the tokens of new logits and bits."""
    rows, vocabulary = 24, 5000
    logits = logits_of(rows, vocabulary, 3.0, "cuda")
    bits = torch.zeros(rows, dtype=torch.int64, device="cuda")
    ones = torch.ones(rows, device="cuda")
    filters = RowFilters(ones * 0.8, bits + 50, ones * 0.01) if filtered else None
    given: tuple[Any, ...] = (bits, ones, filters, ones > 0 if of_all else None)
    buffer = logits.clone()
    sample(buffer, *given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = sample(buffer.copy_(logits), *given)
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        logits.copy_(torch.randn(rows, vocabulary, generator=g))
        bits.copy_(torch.randint(0, 2**53, (rows,), generator=g))
        graph.replay()
        on_cpu = RowFilters(*(x.cpu() for x in filters)) if filters is not None else None
        expected = sample(
            logits.cpu(), bits.cpu(), ones.cpu(), on_cpu, ones.cpu() > 0 if of_all else None
        )
        pairs = zip(results, expected, strict=True)
        found = [different(ours.cpu(), theirs) for ours, theirs in pairs]
        assert found == [0, 0, 0], "tokens, log-probs, lse"
