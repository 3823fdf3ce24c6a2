"""QK norm, rotary and the quantized cache write have the bits of the three references in a row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jetrl.kernels.attention.reference import quantize_keys_and_values
from jetrl.kernels.norm import rms_norm_ref
from jetrl.kernels.rotary import rotary, rotary_table

pytestmark = pytest.mark.gpu

EPS = 1e-6
HEADS = [(32, 8, 128), (14, 2, 64), (5, 1, 128)]


@pytest.fixture(scope="module")
def kernels():
    return pytest.importorskip("jetrl.kernels.rotary_hopper")


def inputs(tokens: int, heads: int, groups: int, head_dim: int):
    g = torch.Generator().manual_seed(tokens + heads)
    qkv = torch.randn(tokens, (heads + 2 * groups) * head_dim, generator=g).bfloat16()
    positions = torch.randint(0, 4000, (tokens,), generator=g)
    frequencies = 1e6 ** (-np.arange(head_dim // 2) / (head_dim // 2))
    table = rotary_table(frequencies, 4096)
    weights = tuple((1 + 0.1 * torch.randn(head_dim, generator=g)).bfloat16() for _ in range(2))
    return qkv, positions, table, weights


def reference(qkv, positions, table, weights, heads, groups, head_dim):
    q, k, v = qkv.unflatten(1, (-1, head_dim)).split([heads, groups, groups], dim=1)
    if weights is not None:
        q, k = rms_norm_ref(q, weights[0], EPS)[0], rms_norm_ref(k, weights[1], EPS)[0]
    return rotary(q, positions, table), rotary(k, positions, table), v


@pytest.mark.parametrize("kv_format", ["fp8", "int8", "int8+fp8", "fp8+int8", "bf16"])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("heads, groups, head_dim", HEADS)
@pytest.mark.parametrize("tokens", [1, 63, 300])
def test_bits_of_the_reference(
    kernels, tokens: int, heads: int, groups: int, head_dim: int, normed: bool, kv_format: str
) -> None:
    qkv, positions, table, weights = inputs(tokens, heads, groups, head_dim)
    qkv[::2, ::head_dim] *= 1000  # a channel above the others
    q, k, v = reference(qkv, positions, table, weights if normed else None, heads, groups, head_dim)
    cache = kernels.dense_cache(tokens, groups, head_dim, kv_format, "cuda")
    on_gpu = tuple(w.cuda() for w in weights) if normed else None
    ours = kernels.qk_norm_rotary_cache(
        qkv.cuda(), positions.cuda(), table.cuda(), on_gpu, EPS, heads, cache, None
    )
    assert torch.equal(ours.cpu(), q)
    assert_stored(cache, quantize_keys_and_values(k, v, kv_format))


def assert_stored(cache, expected) -> None:
    """Assert that a dense cache holds `quantize_keys_and_values`, where a NaN equals any NaN."""
    ours = (cache.k_codes, cache.k_scales), (cache.v_codes, cache.v_scales)
    for (codes, scales), (true_codes, true_scales) in zip(ours, expected, strict=True):
        assert codes.dtype == true_codes.dtype
        assert (scales is None) == (true_scales is None)
        for a, b in ((codes, true_codes), (scales, true_scales)):
            if a is not None:
                found, wanted = a[:, 0].cpu().float(), b.float()
                torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kv_format", ["fp8", "int8", "int8+fp8"])
@pytest.mark.parametrize("scales", ["fp32", "pow2"])
@pytest.mark.parametrize("heads, groups, head_dim", HEADS)
@pytest.mark.parametrize("tokens", [63, 300])
def test_codes_of_any_magnitude_are_the_quantizers(
    kernels, tokens: int, heads: int, groups: int, head_dim: int, scales: str, kv_format: str
) -> None:
    """Standard deviations from 1e-30 to 1e3, groups of zeros, NaN and Inf, codes between two."""
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, heads + 2 * groups, head_dim, generator=g)
    x *= 10.0 ** torch.randint(-30, 4, (tokens, heads + 2 * groups, 1), generator=g)
    x[3], x[4, :, 7], x[5, :, 8], x[6, :, 9] = 0, torch.nan, torch.inf, -torch.inf
    # 127 and halves of odd integers, which a scale of 1 leaves for INT8 to round to even.
    x[7] = torch.arange(head_dim) % 127 + 0.5
    x[7, :, 0] = 127
    x = x.bfloat16()
    k, v = x[:, heads : heads + groups], x[:, heads + groups :]
    table = torch.zeros(1, 2, head_dim // 2, device="cuda")
    table[:, 0] = 1  # no rotation
    positions = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    cache = kernels.dense_cache(tokens, groups, head_dim, kv_format, "cuda")
    kernels.qk_norm_rotary_cache(
        x.flatten(1).cuda(), positions, table, None, EPS, heads, cache, None, scales
    )
    # NaN and Inf make the other of the rotated pair NaN (0 * Inf): so they do in the reference.
    k = rotary(k, torch.zeros(tokens, dtype=torch.int64), table.cpu())
    assert_stored(cache, quantize_keys_and_values(k, v, kv_format, scales))


@pytest.mark.parametrize("kv_format", ["fp8", "int8"])
def test_pages_get_the_bytes_of_the_dense_array(kernels, kv_format: str) -> None:
    """Written at slots of pages, with padding tokens skipped and the other slots untouched."""
    tokens, heads, groups, head_dim, page = 100, 8, 2, 128, 64
    qkv, positions, table, weights = inputs(tokens, heads, groups, head_dim)
    arguments = (
        qkv.cuda(), positions.cuda(), table.cuda(), tuple(w.cuda() for w in weights), EPS, heads
    )  # fmt: skip
    dense = kernels.dense_cache(tokens, groups, head_dim, kv_format, "cuda")
    kernels.qk_norm_rotary_cache(*arguments, dense, None)
    shape = (5, page, groups, head_dim)
    paged = kernels.CacheSlots(
        *(torch.full(shape, 2.0, device="cuda").to(dense.k_codes.dtype) for _ in range(2)),
        *(torch.full(shape[:3], -1.0, device="cuda") for _ in range(2)),
    )
    slots = torch.randperm(5 * page, generator=torch.Generator().manual_seed(0))[:tokens].cuda()
    slots[::10] = -1
    kernels.qk_norm_rotary_cache(*arguments, paged, slots)
    kept = slots >= 0
    for name in ("k_codes", "v_codes", "k_scales", "v_scales"):
        flat = getattr(paged, name).flatten(0, 1)
        assert torch.equal(flat[slots[kept]].float(), getattr(dense, name)[kept, 0].float())
        untouched = torch.ones(len(flat), dtype=torch.bool, device="cuda")
        untouched[slots[kept]] = False
        assert len(flat[untouched].unique()) == 1 if flat.dtype == torch.float32 else True


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("heads, groups, head_dim", HEADS)
def test_backward(kernels, heads: int, groups: int, head_dim: int, normed: bool) -> None:
    """Against float64 autograd of the composition: one rounding to BF16."""
    tokens = 129
    qkv, positions, table, weights = inputs(tokens, heads, groups, head_dim)
    wide = qkv.double().requires_grad_()
    wide_weights = [w.double().requires_grad_() for w in weights]
    q, k, v = wide.unflatten(1, (-1, head_dim)).split([heads, groups, groups], dim=1)
    if normed:
        q, k = (
            x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * w
            for x, w in zip((q, k), wide_weights, strict=True)
        )
    cos, sin = table[positions].double().unsqueeze(2).unbind(1)

    def turn(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    g = torch.Generator().manual_seed(3)
    grads = [torch.randn(x.shape, generator=g).bfloat16() for x in (q, k, v)]
    torch.autograd.backward([turn(q), turn(k), v], [x.double() for x in grads])
    backward = pytest.importorskip("jetrl.kernels.rotary_backward_hopper")
    dqkv, dqw, dkw = backward.qk_norm_rotary_backward(
        *(x.cuda() for x in grads), qkv.cuda(), positions.cuda(), table.cuda(),
        tuple(w.cuda() for w in weights) if normed else None, EPS,
    )  # fmt: skip
    assert (dqkv.cpu() - wide.grad).norm() <= 2**-8 * wide.grad.norm()
    if normed:
        for ours, w in zip((dqw, dkw), wide_weights, strict=True):
            assert (ours.cpu() - w.grad).norm() <= 1e-5 * w.grad.norm()


def test_bad_layouts_are_refused(kernels) -> None:
    qkv, positions, table, _ = inputs(4, 8, 2, 128)
    cache = kernels.dense_cache(4, 2, 128, "fp8", "cuda")
    with pytest.raises(ValueError, match="1536 columns"):
        kernels.qk_norm_rotary_cache(
            qkv[:, :-128].contiguous().cuda(), positions.cuda(), table.cuda(), None, EPS, 8, cache,
            None,
        )  # fmt: skip
    with pytest.raises(ValueError, match="positions: int64"):
        kernels.qk_norm_rotary_cache(
            qkv.cuda(), positions.int().cuda(), table.cuda(), None, EPS, 8, cache, None
        )
