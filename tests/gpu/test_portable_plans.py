"""Plans other than `integer` by the kernels of `run.backend = triton`, also on a Hopper GPU."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import pytest
import torch
from linears import adapted_policy, assert_gradients_are_near, gradients
from small_models import FAMILIES, config, make_policy

from jetrl import Policy
from jetrl.kernels.attention.layout import KeyValueCodes, QueryTiles
from jetrl.kernels.attention.reference import quantize_keys_and_values
from jetrl.precision import PrecisionPlan
from jetrl.precision.backend import backend_for, selected_backend
from jetrl.precision.quantize import dequantize
from jetrl.session.parity import check_policy, failures, locate, measure, random_prompts

pytestmark = pytest.mark.gpu

LENGTHS = [200, 1, 63, 64, 65, 192, 193, 1023, 1025, 2111]
# Those with E4M3 need compute capability 8.9.
PLANS = {
    "int8": PrecisionPlan.preset("int8").replace(grad_output="int8"),
    "bf16": PrecisionPlan.preset("bf16").replace(pinned_sums=True),
    "int8 with FP8 gradients": PrecisionPlan.preset("int8"),
    **{name: PrecisionPlan.preset(name) for name in ("unified", "jet")},
}


@pytest.fixture(autouse=True)
def triton() -> Iterator[None]:
    with selected_backend("triton"):
        yield


def skip_without(dtype: torch.dtype) -> None:
    """Skip what this GPU, or the one that kernels are arranged for, has no products of."""
    arranged = os.environ.get("TRITON_OVERRIDE_ARCH")
    if dtype == torch.float8_e4m3fn and arranged == "sm80":
        pytest.skip(f"no E4M3 on {arranged}")
    if not backend_for(torch.device("cuda")).takes(dtype):
        pytest.skip(f"no {dtype} on this GPU")


def batch(heads: int, groups: int, head_dim: int, kv: str) -> tuple[torch.Tensor, KeyValueCodes]:
    g = torch.Generator("cuda").manual_seed(head_dim)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(sum(LENGTHS), *shape, device="cuda", generator=g)

    q, k = (1.5 * normal(heads, head_dim)).bfloat16(), normal(groups, head_dim).bfloat16()
    v = (normal(groups, head_dim) * normal(groups, 1).exp2()).bfloat16()
    (k_codes, k_scales), (v_codes, v_scales) = quantize_keys_and_values(k, v, kv)
    return q, KeyValueCodes(k_codes, k_scales, v_codes, v_scales)


def tiles_of(device: str = "cuda") -> QueryTiles:
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]
    return QueryTiles.packed(starts, device)


@pytest.mark.hopper
@pytest.mark.parametrize("heads, groups, head_dim", [(8, 2, 128), (9, 3, 64), (16, 1, 64)])
@pytest.mark.parametrize("kv", ["bf16", "int8", "fp8", "int8+fp8"])
def test_attention_has_hoppers_bits(heads: int, groups: int, head_dim: int, kv: str) -> None:
    from jetrl.kernels.attention import forward, forward_triton

    q, codes = batch(heads, groups, head_dim, kv)
    skip_without(codes.v.dtype)
    tiles = tiles_of()
    staged = forward_triton.stage_keys(codes, tiles)
    for split in (1024, 256):
        ours, lse = forward_triton.attend_tiles(q, staged, tiles, split)
        theirs, their_lse = forward.attend_tiles(q, staged, tiles, split)
        assert torch.equal(ours, theirs)
        assert torch.equal(lse, their_lse)
        again, _ = forward_triton.attend_tiles(q, staged, tiles, split)
        assert torch.equal(ours, again)


@pytest.mark.hopper
def test_prefill_writes_hoppers_codes() -> None:
    from jetrl.kernels.attention import forward, forward_triton

    skip_without(torch.float8_e4m3fn)
    q, codes = batch(8, 2, 128, "int8")
    pages = KeyValueCodes(
        *(x[:2112].unflatten(0, (33, 64)).contiguous() for x in (codes.k, codes.k_scales)),
        *(x[:2112].unflatten(0, (33, 64)).contiguous() for x in (codes.v, codes.v_scales)),
    )
    tiles = QueryTiles.paged([300], [2100], [range(33)], "cuda")
    for scales in ("fp32", "pow2"):
        ours = forward_triton.attend_prefill_quantized(q[:300], pages, tiles, scales)
        theirs = forward.attend_prefill_quantized(q[:300], pages, tiles, scales)
        assert torch.equal(ours.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
        assert torch.equal(ours.scales, theirs.scales)


@pytest.mark.parametrize("kept", [0, 2**31], ids=["recomputed", "stored"])
@pytest.mark.parametrize("kv, head_dim", [("bf16", 64), ("int8", 128)])
def test_gradients_of_small_tiles_are_those_of_large_ones(
    kv: str, head_dim: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jetrl.kernels.attention import backward, forward_triton

    if backend_for(torch.device("cuda")).capabilities[-1] < (9, 0):
        pytest.skip("the large tiles need 227 KB of shared memory")
    q, codes = batch(8, 2, head_dim, kv)
    tiles = tiles_of()
    o, lse = forward_triton.attend_batch(q, codes, tiles)
    do = torch.randn_like(q)
    monkeypatch.setattr(backward, "STORED_DS_BYTES", kept)
    small = backward.attention_backward(do, q, codes, o, lse, tiles)
    again = backward.attention_backward(do, q, codes, o, lse, tiles)
    with selected_backend("hopper"):
        large = backward.attention_backward(do, q, codes, o, lse, tiles)
    for ours, same, theirs in zip(small, again, large, strict=True):
        assert torch.equal(ours, same)
        # Both round P, dS and the result to BF16; sums differ in their order only.
        assert (ours.float() - theirs.float()).norm() <= 2.0**-8 * theirs.float().norm()


@pytest.mark.parametrize("n, k", [(1152, 896), (6144, 4096), (151_936, 1024), (576, 1472)])
def test_bf16_products_are_batch_invariant(n: int, k: int) -> None:
    from jetrl.precision.triton.float_tiles import MANY_ROWS, bf16_matmul

    g = torch.Generator("cuda").manual_seed(n)
    x, w = (torch.randn(rows, k, device="cuda", generator=g).bfloat16() for rows in (700, n))
    whole = bf16_matmul(x, w, torch.float32)
    for rows in (slice(0, 1), slice(3, 20), slice(60, 70), slice(64, 128), slice(13, 700)):
        assert torch.equal(bf16_matmul(x[rows], w, torch.float32), whole[rows]), rows
    # Products are exact, and each of K / depth steps of a sum is at least as good as chains of
    # float32 additions that truncate: 2**-23 of the absolute values per addition of 16 products.
    sample = slice(0, 64)
    true = x[sample].double() @ w.double().T
    size = x[sample].double().abs() @ w.double().abs().T
    additions = math.ceil(k / MANY_ROWS.depth) * MANY_ROWS.depth / 16 + 16
    assert ((whole[sample].double() - true).abs() <= additions * 2.0**-23 * size).all()


@pytest.mark.parametrize("n, k", [(1152, 896), (24_576, 4096), (576, 1472)])
def test_fp8_products_are_batch_invariant(n: int, k: int) -> None:
    from jetrl.precision.triton.float_tiles import fp8_matmul
    from jetrl.precision.triton.quantize import quantize_rows, quantize_weight

    skip_without(torch.float8_e4m3fn)
    g = torch.Generator("cuda").manual_seed(n)
    x = torch.randn(700, k, device="cuda", generator=g).bfloat16()
    w = quantize_weight(torch.randn(n, k, device="cuda", generator=g))
    whole = fp8_matmul(quantize_rows(x), w, torch.float32)
    for rows in (slice(0, 1), slice(3, 20), slice(60, 70), slice(64, 128), slice(13, 700)):
        assert torch.equal(fp8_matmul(quantize_rows(x[rows]), w, torch.float32), whole[rows]), rows
    a, b = dequantize(quantize_rows(x)).double(), dequantize(w).double()
    true, size = a @ b.T, a.abs() @ b.abs().T
    # A block of 128 loses at most 2**-13 of its absolute values (Hopper keeps 14 bits of a sum).
    assert ((whole.double() - true).abs() <= 2.0**-10 * size).all()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_are_the_trainers(family: str, plan: str) -> None:
    skip_without(PLANS[plan].backward_format.dtype)
    p = make_policy(config(family), PLANS[plan])
    prompts = random_prompts(p, 12, 80, seed=2) + random_prompts(p, 2, 1500, seed=3)
    result = measure(p, prompts=prompts, samples=3, max_tokens=80, temperature=0.8)
    where = locate(p, *result.first_different) if result.first_different else None
    assert (result.different, where) == (0, None)
    assert failures(check_policy(p)) == []


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("batch", [3, 64])
def test_sampled_logprobs_with_adapters_are_the_trainers(plan: str, batch: int) -> None:
    skip_without(PLANS[plan].backward_format.dtype)
    p = adapted_policy(PLANS[plan])
    prompts = random_prompts(p, 12, 80, seed=2)
    result = measure(
        p, prompts=prompts, samples=3, max_tokens=60, max_batch_size=batch, gradients=True
    )
    where = locate(p, *result.first_different) if result.first_different else None
    assert (result.different, where) == (0, None)
    assert failures(check_policy(p)) == []


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_of_adapters_follow_the_reference(plan: str) -> None:
    skip_without(PLANS[plan].backward_format.dtype)
    ours, theirs = (adapted_policy(PLANS[plan], device=device) for device in ("cuda", "cpu"))
    assert_gradients_are_near(ours, theirs, 0.25)


@pytest.mark.hopper
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", ["qwen3", "smollm2"])
def test_logprobs_and_gradients_are_as_near_fp32_as_hoppers(family: str, plan: str) -> None:
    """Orders of sums differ, so roundings do: the error may grow by chance, but not by a fifth."""
    skip_without(PLANS[plan].backward_format.dtype)
    g = torch.Generator().manual_seed(5)
    sequences = [torch.randint(0, 1000, (n,), generator=g).tolist() for n in (200, 7, 300)]

    def logprobs(policy: Policy) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat(policy.logprobs(sequences))

    ours = make_policy(config(family), PLANS[plan])
    exact = make_policy(config(family), "fp32")
    error = (logprobs(ours) - logprobs(exact)).norm()
    found, true = gradients(ours), gradients(exact)
    with selected_backend("hopper"):
        theirs = make_policy(config(family), PLANS[plan])
        assert error <= 1.2 * (logprobs(theirs) - logprobs(exact)).norm()
        other = gradients(theirs)
    for name in true:
        assert (found[name] - true[name]).norm() <= 1.2 * (other[name] - true[name]).norm(), name


def test_unpinned_bf16_takes_equal_lengths() -> None:
    """Sequences of one length take `attend_equal_lengths`, which has the bits of `attend_batch`."""
    from jetrl.kernels import triton as kernels

    q, codes = batch(8, 2, 64, "bf16")
    length, rows = 130, slice(0, 3 * 130)
    q, k, v = q[rows].contiguous(), codes.k[rows].contiguous(), codes.v[rows].contiguous()
    o, *kept = kernels.attend_equal_lengths(q, k, v, length)
    tiles = QueryTiles.packed([0, 130, 260, 390], "cuda")
    expected, lse = kernels.attend_batch(q, KeyValueCodes(k, None, v, None), tiles)
    assert torch.equal(o, expected)
    assert torch.equal(kept[0], lse)
    do = torch.randn_like(q)
    found = kernels.attend_equal_lengths_backward(do, q, k, v, o, tuple(kept), length)
    codes = KeyValueCodes(k, None, v, None)
    for ours, theirs in zip(
        found, kernels.attention_backward(do, q, codes, o, lse, tiles), strict=True
    ):
        assert torch.equal(ours, theirs)
    p = make_policy(config(), "bf16")
    assert len(gradients(p)) == len(p.master_weights())
