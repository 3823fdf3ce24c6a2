"""Portable INT8 products on a GPU: the bits of their references, which run on the same tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jetrl.precision import int8_planes as reference
from jetrl.precision.backend import selected_backend
from jetrl.precision.quantize import INT8_CODES, Planes, QTensor, codes_as_float64, quantize, rotate

pytestmark = pytest.mark.gpu
portable_int8 = pytest.importorskip("jetrl.precision.triton.portable_int8")
int8_planes = pytest.importorskip("jetrl.precision.triton.int8_planes")

ROWS = (1, 3, 16, 17, 40, 64, 65, 128, 200, 256, 257, 1000)
WEIGHTS = ((75, 64), (960, 576), (1152, 4096), (6144, 4096), (4096, 12288))
QWEN3 = (1024, 151936)
# Rows, hidden size, vocabulary; the largest number of rows of a chunk is 1,728 for Qwen3.
HEADS = [(rows, *QWEN3) for rows in (1, 16, 33, 64, 128, 200, 1728)]
HEADS += [(1, 64, 5), (37, 192, 1333), (500, 4096, 5000), (70, 2560, 3001), (5440, 576, 49152)]


def random(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=g, device="cuda")


def int8_rows(x: Tensor) -> QTensor:
    return quantize(rotate(x), (1, x.shape[1]), INT8_CODES)


def product(a: QTensor, b: QTensor, dtype: torch.dtype) -> Tensor:
    """The reference of `int8_matmul`."""
    sums = codes_as_float64(a.codes) @ codes_as_float64(b.codes).mT
    return (sums.float() * a.scales * b.scales.mT).to(dtype)


def check(case: str, found: Tensor, expected: Tensor) -> None:
    """Fail with the number of values whose bits differ; NaN equals NaN."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), case
    dtype = {1: torch.int8, 2: torch.int16, 4: torch.int32}[found.element_size()]
    same = (found.view(dtype) == expected.view(dtype)) | (found.isnan() & expected.isnan())
    number = int((~same).sum())
    assert number == 0, f"{case}: {number} of {same.numel()} differ, from {(~same).nonzero()[0]}"


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("n, k", WEIGHTS)
def test_products_have_the_references_bits(m: int, n: int, k: int) -> None:
    a, b = int8_rows(random(m, k)), int8_rows(random(n, k, seed=1))
    a.scales[-1], b.scales[3] = torch.nan, torch.inf
    for dtype in (torch.bfloat16, torch.float32):
        made = portable_int8.int8_matmul(a, b, dtype)
        check(f"{m} x {n} x {k}, {dtype}", made, product(a, b, dtype))


def test_many_rows_and_largest_sums() -> None:
    a, b = int8_rows(random(4096, 4096)), int8_rows(random(6144, 4096, seed=1))
    check("4096 x 6144", portable_int8.int8_matmul(a, b), product(a, b, torch.bfloat16))
    a, b = int8_rows(random(300, 131072)), int8_rows(random(100, 131072, seed=1))
    a.codes.fill_(-127)
    b.codes.fill_(127)
    for rows in (1, 100, 300):
        few = QTensor(a.codes[:rows], a.scales[:rows], a.block)
        made = portable_int8.int8_matmul(few, b, torch.float32)
        check(f"{rows} rows of -127", made, product(few, b, torch.float32))


@pytest.mark.parametrize("m", [8, 100, 256])
@pytest.mark.parametrize("memory", ["large", "small", "pieces"])
def test_tiles_and_parts_change_no_bit(m: int, memory: str) -> None:
    a, b = int8_rows(random(m, 4096)), int8_rows(random(1100, 4096, seed=1))
    expected = product(a, b, torch.bfloat16)
    for rows, tile in portable_int8.TILES[memory].items():
        for parts in (1, 3, 5):
            made = portable_int8.product(a, b, torch.bfloat16, tile, parts)
            check(f"{m} rows, tile of {rows} {memory}, {parts} parts", made, expected)


@pytest.mark.parametrize("rows", portable_int8.TILES["pieces"])
def test_bf16_tensor_cores_have_the_largest_sums(rows: int) -> None:
    """Every code is 127 or -127, so that pieces of K come close to 2**24."""
    a, b = int8_rows(random(300, 16384)), int8_rows(random(200, 16384, seed=1))
    for codes in (a.codes, b.codes):
        codes.copy_(torch.where(codes % 3 == 0, -127, 127))
    a.codes[:100] = -127
    b.codes[:100] = 127
    tile = portable_int8.TILES["pieces"][rows]
    for parts in (1, 3):
        made = portable_int8.product(a, b, torch.float32, tile, parts)
        check(f"tile of {rows}, {parts} parts", made, product(a, b, torch.float32))


@pytest.mark.parametrize("m", [1, 64, 300])
def test_a_graph_captures_products(m: int) -> None:
    a, b = int8_rows(random(m, 4096)), int8_rows(random(1024, 4096, seed=1))
    other = int8_rows(random(m, 4096, seed=2))
    portable_int8.int8_matmul(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = portable_int8.int8_matmul(a, b)
    a.codes.copy_(other.codes)
    a.scales.copy_(other.scales)
    graph.replay()
    check(f"{m} rows, replayed", made, product(other, b, torch.bfloat16))


def checked_planes(case: str, values: Tensor) -> Planes:
    """Return the planes of rows, after a comparison with those of the kernel."""
    planes, made = reference.planes_of_rows_ref(values), int8_planes.planes_of_rows(values)
    for part, true in zip(made.tensors(), planes.tensors(), strict=True):
        check(case, part, true)
    return planes


def head_tensors(rows: int, width: int, vocabulary: int) -> tuple[Tensor, Planes, Tensor]:
    """Hidden rows, weight and dY, with zero, tiny, outlying and non-finite rows."""
    hidden, master = random(rows, width).bfloat16(), random(vocabulary, width, seed=1)
    weight = checked_planes(f"weight {vocabulary} x {width}", master)
    dy = random(rows, vocabulary, seed=2) * 1e-6
    hidden[:, 3] *= 50
    if rows > 8:
        hidden[2], hidden[3], hidden[4, 1], hidden[5, 2] = 0.0, 2.0**-120, torch.inf, torch.nan
        dy[1], dy[2] = 0.0, 2.0**-140
        dy[3, :2], dy[4, vocabulary - 1] = torch.nan, -torch.inf
        dy[-1] *= 1e12
    return hidden, weight, dy


@pytest.mark.parametrize("rows, width, vocabulary", HEADS)
def test_the_head_has_the_references_bits(rows: int, width: int, vocabulary: int) -> None:
    case = f"{rows} x {width} x {vocabulary}"
    hidden, w, dy = head_tensors(rows, width, vocabulary)
    x = checked_planes(f"hidden rows, {case}", hidden)
    check(f"fprop {case}", int8_planes.planes_fprop(x, w), reference.planes_fprop_ref(x, w))
    check(f"dgrad {case}", int8_planes.planes_dgrad(dy, w), reference.planes_dgrad_ref(dy, w))
    total, expected = (random(vocabulary, width, seed=3) * 1e-6 for _ in range(2))
    int8_planes.add_planes_wgrad(total, dy, x)
    reference.add_planes_wgrad_ref(expected, dy, x)
    check(f"wgrad {case}", total, expected)


@pytest.mark.parametrize("memory", ["large", "small"])
def test_slabs_and_tiles_of_other_gpus_change_no_bit(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, w, dy = head_tensors(100, 320, 5001)
    x, dx = reference.planes_of_rows_ref(hidden), reference.planes_dgrad_ref(dy, w)
    logits, expected = reference.planes_fprop_ref(x, w), torch.zeros(5001, 320, device="cuda")
    reference.add_planes_wgrad_ref(expected, dy, x)
    monkeypatch.setattr(int8_planes, "memory_class", lambda device: memory)
    monkeypatch.setattr(int8_planes, "SLAB_BYTES", 2**19)
    check(f"fprop, {memory}", int8_planes.planes_fprop(x, w), logits)
    check(f"dgrad, {memory}", int8_planes.planes_dgrad(dy, w), dx)
    total = torch.zeros(5001, 320, device="cuda")
    int8_planes.add_planes_wgrad(total, dy, x)
    check(f"wgrad, {memory}", total, expected)


def test_largest_codes() -> None:
    """Sums of the largest codes of both planes, over as many rows as a chunk may have."""
    hidden = torch.full((65536, 64), -7.5, device="cuda").bfloat16()
    dy, x = torch.full((65536, 700), 3.0).cuda(), reference.planes_of_rows_ref(hidden)
    w = reference.planes_of_rows_ref(torch.full((700, 64), 2.0, device="cuda"))
    for operand in (x, w):
        operand.high.fill_(127)
        operand.low.fill_(-128)
    check("fprop", int8_planes.planes_fprop(x, w), reference.planes_fprop_ref(x, w))
    check("dgrad", int8_planes.planes_dgrad(dy, w), reference.planes_dgrad_ref(dy, w))
    total, expected = (torch.zeros(700, 64, device="cuda") for _ in range(2))
    int8_planes.add_planes_wgrad(total, dy, x)
    reference.add_planes_wgrad_ref(expected, dy, x)
    check("wgrad", total, expected)


def test_dispatch_reaches_kernels_on_a_gpu() -> None:
    hidden, w, dy = head_tensors(20, 192, 1333)
    total, expected = (torch.zeros(1333, 192, device="cuda") for _ in range(2))
    with selected_backend(defined=True):
        x = reference.planes_of_rows(hidden)
        logits, dx = reference.planes_fprop(x, w), reference.planes_dgrad(dy, w)
        reference.add_planes_wgrad(total, dy, x)
    check("fprop", logits, reference.planes_fprop_ref(x, w))
    check("dgrad", dx, reference.planes_dgrad_ref(dy, w))
    reference.add_planes_wgrad_ref(expected, dy, x)
    check("wgrad", total, expected)
