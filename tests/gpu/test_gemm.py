"""FP8 GEMM on Hopper: both libraries, one result; a row's bits at any number of rows."""

from __future__ import annotations

import pytest
import torch
from benchmarks.shapes import SHAPES as MODELS
from linears import assert_replays, layers, random

from jetrl.precision.gemm import fp8_matmul
from jetrl.precision.quantize import QTensor, quantize

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

KERNELS = "jetrl.precision.triton.quantize"
# (N, K): the linears of all families, then K/128 odd (scale padding) and a small model's
SHAPES = [*layers(*MODELS), (1152, 896), (896, 4864), (128, 128)]
SHORT = [*layers("smollm2-135m"), (192, 64), (64, 192)]  # the last group of 128 has 64 values
SHAPES += SHORT[-2:]
ROWS = [*range(1, 66), 100, 127, 128, 129, 200, 255, 256, 257, 384, 511, 512]
MANY_ROWS = [*layers("qwen3-8b"), (1152, 896), (896, 4864)]


@pytest.fixture(scope="module")
def gemm():
    return pytest.importorskip("jetrl.precision.hopper.gemm")


def backends(gemm) -> list[str]:
    return ["cublas", "deep_gemm"] if gemm.deep_gemm_installed() else ["cublas"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_have_the_same_bits_at_every_m_and_in_all_libraries(gemm, kernels, shape) -> None:
    n, k = shape
    counts = [*ROWS, 4096, 16384] if shape in MANY_ROWS else ROWS
    x = random(counts[-1], k, 0)
    weight = kernels.quantize_weight(random(n, k, 1, 0.02))
    whole = gemm.fp8_matmul_hopper(kernels.quantize_rows(x), weight, backend="cublas")
    bad = []
    for rows in counts:
        a = kernels.quantize_rows(x[:rows])
        for backend in [*backends(gemm), *(["triton"] if rows <= 128 else [])]:
            out = gemm.fp8_matmul_hopper(a, weight, backend=backend)
            if not torch.equal(out, whole[:rows]):
                bad.append((backend, rows, int((out != whole[:rows]).sum())))
    assert not bad, f"(library, rows, different elements): {bad}"
    assert_replays(
        lambda: [gemm.fp8_matmul_hopper(kernels.quantize_rows(x[:33]), weight) for _ in range(4)],
        [whole[:33]] * 4,
    )


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
@pytest.mark.parametrize("shape", [(4096, 4096), (1152, 896), (960, 576)], ids=str)
def test_wgrad_is_near_the_product_and_the_same_in_both_libraries(
    gemm, kernels, shape, tokens
) -> None:
    """The error is that of two factors in E4M3, with a margin of 1.5 dB."""
    n, k = shape
    dy, x = random(tokens, n, 2), random(tokens, k, 3)
    a, b = kernels.quantize_rows_and_tokens(dy)[1].mT, kernels.quantize_squares(x).mT
    first = gemm.fp8_matmul_hopper(a, b, backend="cublas")
    for backend in backends(gemm):
        assert torch.equal(gemm.fp8_matmul_hopper(a, b, backend=backend), first)
    true = dy.float().mT @ x.float()
    assert (first - true).norm() <= 1.19 * 2**-4 * (2 / 3) ** 0.5 * true.norm()


def filled_up(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0]))


@pytest.mark.parametrize("rows", [1, 33, 129, 1000])
@pytest.mark.parametrize("shape", SHORT, ids=str)
def test_a_short_group_has_the_bits_of_one_filled_up_with_zeros(
    gemm, kernels, shape, rows: int
) -> None:
    """FProp, DGrad and WGrad of every library, in BF16 and, of those that can, in FP32."""
    n, k = shape
    wide_n, wide_k = (-(-size // 128) * 128 for size in shape)
    x, w, dy = random(rows, k, 7), random(n, k, 8, 0.02), random(rows, n, 9)

    def operands(n: int, k: int) -> list[tuple[QTensor, QTensor]]:
        weight = kernels.quantize_weight(filled_up(w, n, k))
        entered, grads = filled_up(x, rows, k), filled_up(dy, rows, n)
        by_row, by_token = kernels.quantize_rows_and_tokens(grads)
        squares = kernels.quantize_squares(entered)
        turned = kernels.turned_weight(weight)
        return [
            (kernels.quantize_rows(entered), weight), (by_row, turned), (by_token.mT, squares.mT)
        ]  # fmt: skip

    for (a, b), (wide_a, wide_b) in zip(operands(n, k), operands(wide_n, wide_k), strict=True):
        whole = gemm.fp8_matmul_hopper(wide_a, wide_b, backend="cublas")
        expected = whole[: a.shape[0], : b.shape[0]]
        for backend in [*backends(gemm), *(["triton"] if a.shape[0] <= 128 else []), None]:
            out = gemm.fp8_matmul_hopper(a, b, backend=backend)
            assert torch.equal(out, expected), (backend, a.shape, b.shape)
        in_fp32 = gemm.fp8_matmul_hopper(a, b, torch.float32)
        assert torch.equal(in_fp32.bfloat16(), expected)


@pytest.mark.parametrize("scales", ["fp32", "pow2"])
@pytest.mark.parametrize("rows", [1, 63, 129])
@pytest.mark.parametrize("shape", [(384, 896), (960, 576)], ids=str)
def test_close_to_the_exact_reference(gemm, kernels, shape, rows: int, scales: str) -> None:
    n, k = shape
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


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    "shape", [(151936, 4096), (4096, 4096), (1152, 896), (1, 512), (16, 2048)], ids=str
)
def test_bf16_rows_have_the_same_bits_at_every_m(shape, out_dtype) -> None:
    bf16_matmul = pytest.importorskip("jetrl.precision.triton.bf16").bf16_matmul
    n, k = shape
    x, w = random(2048, k, 14), random(n, k, 15, 0.02)
    whole = bf16_matmul(x, w, out_dtype)
    bad = []
    for rows in (1, 2, 3, 8, 16, 17, 32, 63, 64, 65, 128, 192, 200, 256, 511, 512, 1000, 1024):
        out = bf16_matmul(x[:rows], w, out_dtype)
        if not torch.equal(out, whole[:rows]):
            bad.append((rows, int((out != whole[:rows]).sum())))
    assert not bad, f"(rows, different elements): {bad}"
