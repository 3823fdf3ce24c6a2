"""FP8 GEMM on Hopper: both libraries, one result; a row's bits at any number of rows."""

from __future__ import annotations

import pytest
import torch

from jetrl.models.families import SHAPES as MODELS
from jetrl.precision.gemm import fp8_matmul
from jetrl.precision.quantize import QTensor, quantize

pytestmark = pytest.mark.gpu

# (N, K): the linears of Qwen3-8B, then K/128 odd (scale padding) and a small model's
SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (1152, 896), (896, 4864)]
ROWS = [
    *range(1, 18),
    31,
    32,
    33,
    63,
    64,
    65,
    100,
    127,
    128,
    129,
    200,
    255,
    256,
    257,
    384,
    511,
    512,
]


@pytest.fixture(scope="module")
def gemm():
    return pytest.importorskip("jetrl.precision.hopper.gemm")


@pytest.fixture(scope="module")
def kernels():
    return pytest.importorskip("jetrl.precision.hopper.quantize")


def random(rows: int, columns: int, seed: int, std: float = 1.0) -> torch.Tensor:
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, columns, generator=g, device="cuda").mul_(std)
    return x.mul_(1 + 9 * (torch.rand(rows, 1, generator=g, device="cuda") > 0.9)).bfloat16()


def backends(gemm) -> list[str]:
    return ["cublas", "deep_gemm"] if gemm.deep_gemm_installed() else ["cublas"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_have_the_same_bits_at_every_m_and_in_both_libraries(gemm, kernels, shape) -> None:
    n, k = shape
    x = random(16384, k, 0)
    weight = kernels.quantize_weight(random(n, k, 1, 0.02))
    whole = gemm.fp8_matmul_hopper(kernels.quantize_rows(x), weight, backend="cublas")
    bad = []
    for rows in [*ROWS, 4096, 16384]:
        a = kernels.quantize_rows(x[:rows])
        for backend in backends(gemm):
            out = gemm.fp8_matmul_hopper(a, weight, backend=backend)
            if not torch.equal(out, whole[:rows]):
                bad.append((backend, rows, int((out != whole[:rows]).sum())))
    assert not bad, f"(library, rows, different elements): {bad}"


def layers() -> list[tuple[int, int]]:
    """Return (N, K) of each linear of all families."""
    found = set()
    for m in MODELS.values():
        hidden, inner, size = m["hidden_size"], m["intermediate_size"], m["head_dim"]
        heads, groups = m["num_attention_heads"], m["num_key_value_heads"]
        found |= {((heads + 2 * groups) * size, hidden), (hidden, heads * size)}
        found |= {(2 * inner, hidden), (hidden, inner)}
    return sorted(found)


@pytest.mark.parametrize("shape", [*layers(), (1152, 896), (896, 4864), (128, 128)], ids=str)
def test_few_rows_have_the_bits_of_the_library(gemm, kernels, shape) -> None:
    """Ours at every number of rows of a decode step against cuBLAS at 128, eagerly and replayed."""
    n, k = shape
    x = random(128, k, 20)
    weight = kernels.quantize_weight(random(n, k, 21, 0.02))
    whole = gemm.fp8_matmul_hopper(kernels.quantize_rows(x), weight, backend="cublas")
    bad = []
    for rows in [*range(1, 65), 65, 100, 128]:
        out = gemm.fp8_matmul_hopper(kernels.quantize_rows(x[:rows]), weight, backend="triton")
        if not torch.equal(out, whole[:rows]):
            bad.append((rows, int((out != whole[:rows]).sum())))
    assert not bad, f"(rows, different elements): {bad}"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [gemm.fp8_matmul_hopper(kernels.quantize_rows(x[:33]), weight) for _ in range(4)]
    for _ in range(3):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(out, whole[:33]) for out in outs)


@pytest.mark.parametrize("codes", ["any", "subnormal", "mostly zero"])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 12288), (24576, 4096)], ids=str)
def test_few_rows_of_any_codes_and_scales(gemm, kernels, shape, codes: str) -> None:
    """Every finite code, and scales over 2**40: all backends accumulate and round alike."""
    n, k = shape
    g = torch.Generator("cuda").manual_seed(3)

    def fill(q: QTensor) -> None:
        drawn = torch.randint(256, q.shape, generator=g, device="cuda", dtype=torch.uint8)
        drawn = torch.where(drawn & 127 == 127, drawn ^ 1, drawn)
        if codes == "subnormal":
            drawn &= 0x87
        if codes == "mostly zero":
            drawn *= torch.rand(q.shape, generator=g, device="cuda") > 0.9
        q.codes.copy_(drawn.view(torch.float8_e4m3fn))
        power = torch.randint(-20, 20, q.scales.shape, generator=g, device="cuda").float()
        q.scales.copy_(power.exp2() * (1 + torch.rand(power.shape, generator=g, device="cuda")))

    a = kernels.quantize_rows(random(64, k, 22))
    weight = kernels.quantize_weight(random(n, k, 23))
    fill(a)
    fill(weight)
    expected = gemm.fp8_matmul_hopper(a, weight, backend="triton")
    for backend in backends(gemm):
        assert torch.equal(gemm.fp8_matmul_hopper(a, weight, backend=backend), expected)


@pytest.mark.parametrize("tokens", [1, 63, 129, 1000, 4096, 16384])
@pytest.mark.parametrize("shape", [(4096, 4096), (1152, 896)], ids=str)
def test_wgrad_is_near_the_product_and_the_same_in_both_libraries(
    gemm, kernels, shape, tokens
) -> None:
    """The error is that of two factors in E4M3, with a margin of 1.5 dB.

    Each factor's is 2**-4 / sqrt(3), tests/precision/test_linear.py.
    """
    n, k = shape
    dy, x = random(tokens, n, 2), random(tokens, k, 3)
    a, b = kernels.quantize_tokens(dy).mT, kernels.quantize_squares(x).mT
    first = gemm.fp8_matmul_hopper(a, b, backend="cublas")
    for backend in backends(gemm):
        assert torch.equal(gemm.fp8_matmul_hopper(a, b, backend=backend), first)
    true = dy.float().mT @ x.float()
    assert (first - true).norm() <= 1.19 * 2**-4 * (2 / 3) ** 0.5 * true.norm()


@pytest.mark.parametrize("shape", [(128, 128), (1152, 896)], ids=str)
def test_a_product_is_added_in_float32(shape) -> None:
    from jetrl.precision.hopper.add import add_products

    product = random(*shape, 4)
    total = torch.randn(*shape, device="cuda")
    expected = total + product.float()
    assert torch.equal(add_products(product[None], None), product.float())
    assert add_products(product[None], total) is total
    assert torch.equal(total, expected)
    with pytest.raises(ValueError, match="float16"):
        add_products(product[None].half(), total)


@pytest.mark.parametrize("scales", ["fp32", "pow2"])
@pytest.mark.parametrize("rows", [1, 63, 129])
def test_close_to_the_exact_reference(gemm, kernels, rows: int, scales: str) -> None:
    """The error is at least 40 dB below the exact reference.

    Hopper's FP8 tensor core keeps about 13 bits below the largest term of each addition of 32
    products: 4 additions for each 128 of K, so an error near 2**-13 of the sum of |terms| / sqrt of
    the blocks, then one rounding to BF16 (2**-9): at least 40 dB.
    """
    n, k = 384, 896
    x, w = random(rows, k, 4), random(n, k, 5, 0.02)
    a, weight = kernels.quantize_rows(x, scales=scales), kernels.quantize_weight(w, scales=scales)
    turned = kernels.turned_weight(weight)
    reference = fp8_matmul(
        quantize(x.cpu(), scales=scales), quantize(w.cpu(), (128, 128), scales=scales)
    )
    for backend in backends(gemm):
        out = gemm.fp8_matmul_hopper(a, weight, backend=backend).cpu().float()
        error = (out - reference.float()).norm() / reference.float().norm()
        assert error < 10**-2, f"{backend}: {error}"
    dy = random(rows, n, 6)
    dx = gemm.fp8_matmul_hopper(kernels.quantize_rows(dy, scales=scales), turned).cpu().float()
    expected = fp8_matmul(
        quantize(dy.cpu(), scales=scales), quantize(w.cpu(), (128, 128), scales=scales).mT
    ).float()
    assert (dx - expected).norm() < 1e-2 * expected.norm()
    wide = gemm.fp8_matmul_hopper(a, weight, torch.float32).cpu()
    assert torch.equal(wide.bfloat16().float(), out)


def test_any_layout_gives_the_same_bits(gemm, kernels) -> None:
    """Operands of the plain reference quantizer are copied into place; the numbers stay."""
    x, w = random(130, 896, 7), random(1152, 896, 8, 0.02)
    ours = gemm.fp8_matmul_hopper(kernels.quantize_rows(x), kernels.quantize_weight(w))
    plain = gemm.fp8_matmul_hopper(quantize(x), quantize(w, (128, 128)))
    assert torch.equal(ours, plain)


def test_nan_reaches_the_output_row(gemm, kernels) -> None:
    x, w = random(70, 512, 9), random(256, 512, 10, 0.02)
    x[3, 5] = float("nan")
    for backend in [*backends(gemm), "triton"]:
        out = gemm.fp8_matmul_hopper(
            kernels.quantize_rows(x), kernels.quantize_weight(w), backend=backend
        )
        assert out[3].isnan().all()
        assert int(out.isnan().any(1).sum()) == 1


def test_e5m2_is_refused_with_what_to_do(gemm, kernels) -> None:
    weight = kernels.quantize_weight(random(256, 512, 12, 0.02))
    with pytest.raises(ValueError, match="grad_output=e4m3"):
        gemm.fp8_matmul_hopper(kernels.quantize_rows(random(64, 512, 11), "e5m2"), weight)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", [(151936, 4096), (4096, 4096), (1152, 896)], ids=str)
def test_bf16_rows_have_the_same_bits_at_every_m(gemm, shape, out_dtype) -> None:
    n, k = shape
    x, w = random(2048, k, 14), random(n, k, 15, 0.02)
    whole = gemm.bf16_matmul_hopper(x, w, out_dtype)
    bad = []
    for rows in (1, 2, 3, 8, 16, 17, 32, 63, 64, 65, 128, 192, 200, 256, 511, 512, 1000, 1024):
        out = gemm.bf16_matmul_hopper(x[:rows], w, out_dtype)
        if not torch.equal(out, whole[:rows]):
            bad.append((rows, int((out != whole[:rows]).sum())))
    assert not bad, f"(rows, different elements): {bad}"


def test_bad_operands_are_refused_with_their_values(gemm) -> None:
    a = QTensor(torch.zeros(4, 256, device="cuda").to(torch.float8_e4m3fn),
                torch.ones(4, 2, device="cuda"), (1, 128))  # fmt: skip
    with pytest.raises(ValueError, match=r"\[M, K\]"):
        gemm.fp8_matmul_hopper(a, QTensor(a.codes[:, :128], a.scales, (1, 128)))
    with pytest.raises(ValueError, match=r"not \(1, 64\)"):
        gemm.fp8_matmul_hopper(QTensor(a.codes, a.scales, (1, 64)), a)
    with pytest.raises(ValueError, match="groups 1x128 and 128x128"):
        gemm.fp8_matmul_hopper(a, a)
    few = QTensor(a.codes, torch.ones(1, 2, device="cuda"), (128, 128))
    with pytest.raises(ValueError, match="N of 16"):
        gemm.fp8_matmul_hopper(a, few)
