"""Log-probs and sampling on the GPU: one row, one set of bits, on both sides of the flow."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from jetrl.kernels.allowed_tokens import RowFilters, filtered_logits
from jetrl.kernels.logprob import chosen_logprobs_ref
from jetrl.kernels.sampling import random_bits, sample
from jetrl.precision.gemm import bf16_matmul
from jetrl.precision.gradients import Gradients
from jetrl.types import TokenFilter

pytestmark = pytest.mark.gpu

KERNELS = "jetrl.kernels.logprob_triton"
VOCABULARY = [1000, 4096, 151936]


def logits_and_chosen(rows: int, vocabulary: int, std: float = 3.0):
    g = torch.Generator("cuda").manual_seed(rows + vocabulary)
    logits = torch.randn(rows, vocabulary, generator=g, device="cuda") * std
    logits[:, 5] += 10
    return logits, torch.randint(0, vocabulary, (rows,), generator=g, device="cuda")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocabulary", VOCABULARY)
def test_close_to_the_reference(kernels, vocabulary: int, temperature: float) -> None:
    """The log-sum-exp and the log-probs agree to 4e-6 plus float32 of the log-prob."""
    logits, chosen = logits_and_chosen(33, vocabulary)
    ours = kernels.chosen_logprobs(logits, chosen, temperature)
    reference = chosen_logprobs_ref(logits, chosen, torch.full((33, 1), temperature, device="cuda"))
    torch.testing.assert_close(ours[0], reference[0], rtol=2**-22, atol=4e-6)
    torch.testing.assert_close(ours[1][0], reference[1][0], rtol=1e-5, atol=1e-4)
    z = logits.double() / temperature
    probabilities, below = z.softmax(-1), z - z.amax(-1, keepdim=True)
    mean, square = (probabilities * below).sum(-1), (probabilities * below**2).sum(-1)
    # The variance is square - mean^2, with terms that are off by 2**-17: numerator and total.
    assert ((ours[1][1] - (square - mean**2)).abs() <= 3 * 2.0**-17 * square).all()


def test_gradient_of_the_logits(kernels) -> None:
    logits, chosen = logits_and_chosen(17, 1000)
    logits.requires_grad_()
    upstream = torch.randn(17, device="cuda")
    kernels.chosen_logprobs(logits, chosen, 0.7)[0].backward(upstream)
    wide = logits.detach().double().requires_grad_()
    picked = (wide / 0.7).log_softmax(-1).gather(1, chosen[:, None]).squeeze(1)
    picked.backward(upstream.double())
    assert (logits.grad - wide.grad).norm() <= 1e-5 * wide.grad.norm()


@pytest.mark.parametrize("rows", [1, 100, 333])
def test_head_in_chunks_equals_the_whole(kernels, rows: int) -> None:
    vocabulary, width = 8192, 512
    g = torch.Generator("cuda").manual_seed(rows)
    hidden = torch.randn(rows, width, generator=g, device="cuda").bfloat16()
    master = torch.randn(vocabulary, width, generator=g, device="cuda") * 0.1
    weight = master.bfloat16()
    chosen = torch.randint(0, vocabulary, (rows,), generator=g, device="cuda")
    upstream = torch.randn(rows, generator=g, device="cuda")
    results = []
    for chunk, again in ((None, False), (128, True), (64, True), (64, False)):
        h, m = hidden.clone().requires_grad_(), master.clone().requires_grad_()
        logprobs, moments = kernels.lm_head_logprobs(
            h, m, weight, chosen, 0.9, chunk, again, gradients=Gradients()
        )
        logprobs.backward(upstream)
        results.append((logprobs, moments, h.grad, m.grad))
    for other in results[1:]:
        assert torch.equal(results[0][0], other[0])
        assert torch.equal(results[0][1], other[1])
    wide_h, wide_w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    expected = ((wide_h @ wide_w.t()) / 0.9).log_softmax(-1).gather(1, chosen[:, None]).squeeze(1)
    expected.backward(upstream.double())
    for logprobs, _, dhidden, dmaster in results:
        torch.testing.assert_close(logprobs, expected.float(), rtol=1e-5, atol=1e-4)
        assert (dhidden - wide_h.grad).norm() <= 2**-7 * wide_h.grad.norm()
        assert (dmaster - wide_w.grad).norm() <= 2**-8 * wide_w.grad.norm()
    m = master.clone().requires_grad_()
    m.grad = there = torch.ones_like(m)
    sums = Gradients()
    chunked = kernels.lm_head_logprobs(hidden, m, weight, chosen, 0.9, 128, gradients=sums)[0]
    chunked.backward(upstream)
    assert m.grad is there, "added to in place"
    torch.testing.assert_close(there - 1, dmaster, rtol=1e-3, atol=1e-5)


def test_nan_and_hopeless_rows(kernels) -> None:
    logits, chosen = logits_and_chosen(4, 5000)
    logits[1, 77] = float("nan")
    logits[2] = -float("inf")
    logits[3, 1:] = -float("inf")
    chosen[3] = 0
    logprobs, moments = kernels.chosen_logprobs(logits, chosen, 1.0)
    assert logprobs.isfinite().tolist() == [True, False, False, True]
    assert logprobs[3] == 0
    assert moments[:, 3].tolist() == [0, 0]
    assert draw(logits, 0)[2].isfinite().tolist() == [True, False, False, True]


def draw(logits, seed, temperature=1.0, **kept):
    rows = len(logits)
    counter = np.arange(rows)
    bits = torch.from_numpy(random_bits(np.full(rows, seed), counter, counter))
    filters = None
    if kept:
        filters = RowFilters(
            *(x.to(logits.device) for x in RowFilters.of([TokenFilter(**kept)] * rows))
        )
    temperatures = torch.full((rows,), temperature, device=logits.device)
    return sample(logits.clone(), bits.to(logits.device), temperatures, filters)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 0.0},
        {"top_p": 0.8},
        {"top_k": 20, "top_p": 0.9},
        {"min_p": 0.1, "temperature": 0.6},
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", ["normal", "ties", "peaked", "flat"])
@pytest.mark.parametrize("vocabulary", VOCABULARY)
def test_sampler_draws_the_reference_token_with_the_trainer_logprob(
    kernels, vocabulary: int, spread: str, options
) -> None:
    """At most one of 64 rows draws another token than on the CPU, at a border of two."""
    x, _ = logits_and_chosen(64, vocabulary)
    logits = {"normal": x, "ties": x.round(), "peaked": 20 * x, "flat": 0 * x}[spread]
    tokens, logprobs, _ = draw(logits, 3, **options)
    expected, _, _ = draw(logits.cpu(), 3, **options)
    assert int((tokens.cpu() != expected).sum()) <= 1
    temperature = options.get("temperature", 1.0) or 1.0
    kept = TokenFilter(**{k: v for k, v in options.items() if k != "temperature"})
    filtered = filtered_logits(logits.clone(), tokens, temperature, kept)
    trainer, _ = kernels.chosen_logprobs(filtered, tokens, temperature)
    assert torch.equal(logprobs, trainer)


@pytest.mark.parametrize("kept", [TokenFilter(0.8), TokenFilter(1.0, 20, 0.05)], ids=str)
def test_filtered_head_is_the_renormalized_softmax(kernels, kept: TokenFilter) -> None:
    """Chosen tokens are random, so most are outside the set, which then has one token more."""
    g = torch.Generator("cuda").manual_seed(6)
    rows, vocabulary, size = 200, 5000, 256
    hidden = torch.randn(rows, size, generator=g, device="cuda").bfloat16()
    master = torch.randn(vocabulary, size, generator=g, device="cuda") * 0.1
    weight = master.bfloat16()
    chosen = torch.randint(0, vocabulary, (rows,), generator=g, device="cuda")
    upstream = torch.randn(rows, generator=g, device="cuda")
    results = []
    for chunk, again in ((128, True), (64, True), (64, False)):
        h, m = hidden.clone().requires_grad_(), master.clone().requires_grad_()
        filtered = partial(filtered_logits, temperature=0.9, token_filter=kept)
        options: Any = {"gradients": Gradients(), "kept": filtered}
        logprobs, moments = kernels.lm_head_logprobs(
            h, m, weight, chosen, 0.9, chunk, again, **options
        )
        logprobs.backward(upstream)
        results.append((logprobs.detach(), moments, h.grad, m.grad))
    for other in results[1:]:
        assert torch.equal(results[0][0], other[0])
        assert torch.equal(results[0][1], other[1])
    wide_h, wide_w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = bf16_matmul(hidden, weight, torch.float32)
    outside = filtered_logits(logits, chosen, 0.9, kept).isneginf()
    assert outside.sum(-1).min() > 0
    z = ((wide_h @ wide_w.t()) / 0.9).masked_fill(outside, -torch.inf)
    expected = z.log_softmax(-1).gather(1, chosen[:, None]).squeeze(1)
    expected.backward(upstream.double())
    for logprobs, _, dhidden, dmaster in results:
        torch.testing.assert_close(logprobs, expected.detach().float(), rtol=1e-5, atol=1e-4)
        assert (dhidden - wide_h.grad).norm() <= 2**-7 * wide_h.grad.norm()
        assert (dmaster - wide_w.grad).norm() <= 2**-8 * wide_w.grad.norm()
