from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetrl.kernels.allowed_tokens import RowFilters, allowed_tokens, exclude_tokens
from jetrl.kernels.logprob import log_softmax_parts
from jetrl.kernels.sampling import random_bits, sample
from jetrl.types import TokenFilter


def draw(logits: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    tokens, logprobs, lse = sample_rows(logits, **options)
    assert lse.isfinite().all()
    return tokens, logprobs


def sample_rows(
    logits: Tensor, temperature: float = 1.0, seed: int = 0, of_all: bool = False, **kept: Any
) -> tuple[Tensor, Tensor, Tensor]:
    count = len(logits)
    bits = random_bits(np.full(count, seed), np.arange(count), np.zeros(count, np.int64))
    filters = RowFilters.of([TokenFilter(**kept)] * count) if kept else None
    full = torch.full((count,), True) if of_all else None
    return sample(logits, torch.from_numpy(bits), torch.full((count,), temperature), filters, full)


def test_philox_known_answer() -> None:
    """Random123's published vectors for philox4x32-10: the first 53 of its first 64 bits."""
    zero = np.zeros(1, np.int64)
    assert random_bits(zero, zero, zero)[0] == (0x6627E8D5 << 32 | 0xE169C58D) >> 11
    ones = np.array([-1])
    assert random_bits(ones, ones, ones)[0] == (0x408F276D << 32 | 0x41C83B0E) >> 11
    key = np.array([0x299F31D0_A4093822], dtype=np.uint64)
    low = np.array([0x85A308D3_243F6A88], dtype=np.uint64)
    high = np.array([0x03707344_13198A2E], dtype=np.uint64)
    assert random_bits(key, low, high)[0] == (0xD16CFE09 << 32 | 0x94FDCCEB) >> 11


FILTERS = [
    (1.0, 1.0, 0, 0.0),
    (0.7, 0.9, 0, 0.0),
    (1.5, 1.0, 7, 0.0),
    (1.0, 0.5, 20, 0.0),
    (2.0, 0.95, 98, 0.0),
    (1.0, 1.0, 0, 0.1),
    (1.5, 0.9, 40, 0.3),
]


@pytest.mark.parametrize("temperature, top_p, top_k, min_p", FILTERS)
def test_draws_follow_the_renormalized_softmax(
    temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    """Draws stay within 6 standard deviations of chi-square against a dense float64 reference."""
    logits = torch.randn(98, generator=torch.Generator().manual_seed(5)) * 2
    logits[5] = logits[9] = logits[3]
    full = (logits.double() / temperature).softmax(-1)
    order = sorted(range(98), key=lambda i: (-full[i].item(), i))[: top_k or 98]
    kept, before, mass = torch.zeros_like(full), 0.0, sum(full[i].item() for i in order)
    for i in order:
        if before < top_p * mass and full[i] >= min_p * full.max():
            kept[i] = full[i]
        before += full[i].item()
    count = 60_000
    options = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    tokens, logprobs = draw(logits.repeat(count, 1), seed=11, **options)
    drawn, expected = torch.bincount(tokens, minlength=98), count * kept / kept.sum()
    assert not drawn[kept == 0].any()
    seen = expected >= 5
    chi = ((drawn - expected)[seen] ** 2 / expected[seen]).sum()
    freedom = int(seen.sum()) - 1
    assert abs(chi - freedom) <= 6 * (2 * freedom) ** 0.5
    own = (kept / kept.sum()).log()[tokens]
    assert torch.allclose(logprobs.double(), own, atol=2.0**-20), "of the kept tokens"
    again, logprobs = draw(logits.repeat(count, 1), seed=11, of_all=True, **options)
    assert torch.equal(again, tokens)
    assert torch.allclose(logprobs.double(), full.log()[tokens], atol=2.0**-20), "of all tokens"


LOGITS = st.one_of(
    st.sampled_from([0.0, 1.0, 2.0, -3.0]),  # ties
    st.sampled_from([-math.inf, -1e30, 1e30, 88.0]),
    st.floats(-8, 8, width=32),
)


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(
    logits=st.lists(LOGITS, min_size=1, max_size=12).filter(lambda row: max(row) > -math.inf),
    top_p=st.sampled_from([0.0, 1e-30, 0.25, 0.5, 0.75, 1.0]) | st.floats(0, 1, width=32),
    top_k=st.integers(0, 14),
    min_p=st.sampled_from([0.0, 1e-30, 0.25, 0.5, 1 - 2.0**-24]) | st.floats(0, 0.875, width=32),
)
def test_filters_keep_what_a_naive_filter_keeps(
    logits: list[float], top_p: float, top_k: int, min_p: float
) -> None:
    """A naive walk in NumPy over the tokens by falling weight, lower ids first among equals."""
    row = torch.tensor([logits])
    mass = log_softmax_parts(row, torch.ones(1, 1))[1][0].double().numpy()
    weights = np.rint(mass * 2.0**40).astype(np.int64)
    order = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    order = order[: top_k or len(logits)]
    needed = float(np.float32(top_p)) * float(weights[order].sum()) if top_p < 1 else math.inf
    kept, before = np.zeros_like(weights, dtype=bool), 0
    for rank, i in enumerate(order):
        if rank == 0 or (before < needed and weights[i] >= min_p * 2.0**40):
            kept[i] = True
        before += int(weights[i])
    token_filter = TokenFilter(top_p, top_k, min_p)
    filters = RowFilters.of([token_filter])
    (allowed,) = allowed_tokens(torch.from_numpy(weights)[None], filters)
    assert allowed.tolist() == kept.tolist()
    assert token_filter.keeps_all <= bool(allowed.all())
    # Neither the smallest nor the largest bits draw a token that the filters exclude.
    for bits in (0, 2**53 - 1):
        tokens, _, lse = sample(row.clone(), torch.tensor([bits]), torch.ones(1), filters)
        assert kept[tokens[0]]
        assert weights[tokens[0]] > 0
        assert lse.isfinite().all()


def test_temperature_zero_is_greedy_with_plain_logprobs() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, -1.0, -2.0]])
    tokens, logprobs = draw(logits, temperature=0.0)
    assert tokens.tolist() == [1, 0], "the lowest id among equals"
    assert torch.allclose(logprobs, logits.log_softmax(-1)[[0, 1], tokens], atol=2.0**-22)


def test_rows_may_differ_in_their_settings() -> None:
    logits = torch.tensor([[0.0, 5.0, 0.0]] * 3)
    bits = torch.full((3,), 2**53 - 1)
    temperature, filters = torch.tensor([0.0, 1.0, 1.0]), [TokenFilter(top_k=k) for k in (0, 1, 0)]
    tokens, logprobs, _ = sample(logits, bits, temperature, RowFilters.of(filters))
    assert tokens.tolist() == [1, 1, 2], "greedy, top-1, and the last token for the largest draw"
    plain = sample(logits, bits, torch.ones(3))[1]
    assert logprobs[1] == 0, "the only token"
    assert logprobs[2] == plain[2], "no filter"
    of_all = torch.tensor([False, True, True])
    _, logprobs, _ = sample(logits, bits, temperature, RowFilters.of(filters), of_all)
    assert logprobs[1] == torch.log_softmax(logits[1], -1)[1]
    assert logprobs[2] == plain[2]


def test_a_greedy_row_and_a_row_without_a_softmax_are_not_filtered() -> None:
    logits = torch.tensor([[0.0, 5.0, 0.0], [0.0, torch.nan, 0.0], [0.0, torch.inf, 0.0]])
    filters = RowFilters.of([TokenFilter(top_k=1)] * 3)
    kept = exclude_tokens(logits.clone(), torch.tensor([0.0, 1.0, 1.0]), filters)
    assert not kept.isneginf().any()
    chosen = torch.tensor([2, -1, 0])
    kept = exclude_tokens(torch.zeros(3, 3), torch.ones(3), filters, chosen)
    assert (kept == 0).tolist() == [[True, False, True], [True, False, False], [True, False, False]]


def test_rows_without_a_finite_softmax_have_no_finite_lse() -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = torch.nan
    logits[2] = -torch.inf
    assert sample_rows(logits)[2].isfinite().tolist() == [True, False, False]
