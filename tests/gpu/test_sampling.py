"""The threshold search of top_k and top_p keeps what the sorting reference keeps."""

from __future__ import annotations

import pytest
import torch

from jetrl.kernels.sampling import _keep_most_probable, sample

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
kernels = pytest.importorskip("jetrl.kernels.sampling_hopper")

pytestmark = pytest.mark.gpu

weights_of = kernels.row_weights


@triton.jit
def _weights_kernel(
    logits, temperature, row_max, out, columns, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = logits + row.to(tl.int64) * columns
    t, m = tl.load(temperature + row), tl.load(row_max + row)
    weights = weights_of(start, at, columns, t, m)
    tl.store(out + row.to(tl.int64) * columns + at, weights, mask=at < columns)


def integer_weights(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    out = torch.empty(logits.shape, dtype=torch.int64, device="cuda")
    row_max = (logits / temperature[:, None]).amax(1)
    grid = (len(logits), triton.cdiv(logits.shape[1], kernels.BLOCK))
    _weights_kernel[grid](
        logits, temperature, row_max, out, logits.shape[1],
        kernels.BLOCK, num_warps=kernels.NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("vocabulary", [98, 4096, 151936])
@pytest.mark.parametrize("spread", ["normal", "ties", "peaked", "flat"])
def test_draws_among_what_the_reference_keeps(vocabulary: int, spread: str) -> None:
    rows = 60
    g = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(rows, vocabulary, device="cuda", generator=g) * 3
    if spread == "ties":
        logits = logits.round()
    if spread == "peaked":
        logits = logits * 20
    if spread == "flat":
        logits = logits * 0
    bits = torch.randint(0, 2**53, (rows,), device="cuda", generator=g)
    temperature = torch.where(torch.arange(rows, device="cuda") % 3 == 0, 0.7, 1.0)
    top_p = torch.tensor([0.95, 0.5, 1.0, 1e-6, 0.999], device="cuda").repeat(12)
    top_k = torch.tensor([0, 50, 1, 0, 1000, 97, vocabulary + 5], device="cuda").repeat(9)[:rows]
    kept = _keep_most_probable(integer_weights(logits, temperature), top_p, top_k)
    cumulative = kept.cumsum(-1)
    total = cumulative[:, -1:]
    target = ((bits[:, None].double() * 2.0**-53) * total.double()).long()
    wanted = (cumulative <= torch.minimum(target, total - 1)).sum(-1)
    tokens, logprobs, lse = sample(logits, bits, temperature, top_p, top_k, True)
    assert torch.equal(tokens, wanted)
    assert torch.isfinite(lse).all()
    free, whole, _ = sample(logits, bits, temperature, top_p, top_k, False)
    same = tokens == free  # whatever is kept, the log-prob is of the full distribution
    assert torch.equal(logprobs[same], whole[same])


def test_logits_whose_rows_lie_apart_are_refused() -> None:
    logits = torch.randn(3, 128, device="cuda")[:, :98]
    bits, top_k = torch.zeros(2, 3, dtype=torch.int64, device="cuda")
    ones = torch.ones(3, device="cuda")
    with pytest.raises(ValueError, match="logits is float32 \\[3, 98\\], contiguous"):
        sample(logits, bits, ones, ones, top_k, False)
