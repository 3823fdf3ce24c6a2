"""Attention on the GPU: decode, prefill and training give a token the same bits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from linears import assert_same

from jetrl.kernels.attention import backward as module
from jetrl.kernels.attention.reference import quantize_keys_and_values
from jetrl.kernels.rotary import rotary_table
from jetrl.models.attention import PackedKeyValues
from jetrl.models.layer import Rotary
from jetrl.precision import PrecisionPlan

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

LENGTHS = [200, 1, 63, 64, 65, 1023, 1024, 1025, 2111]
FORMATS = ["fp8", "int8", "bf16"]
ALL_FORMATS = [*FORMATS, "int8+fp8", "fp8+int8"]


@pytest.fixture(scope="module")
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return pytest.importorskip("jetrl.kernels.attention.hopper")


@dataclasses.dataclass
class Batch:
    """Packed queries and codes, and the same codes scattered over pages full of NaN."""

    lengths: list[int]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    codes: object
    pages: object
    tables: list[list[int]]

    @property
    def starts(self) -> list[int]:
        return [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]


def batch(
    gpu, lengths: list[int], heads: int, groups: int, head_dim: int, kv: str, seed: int = 0
) -> Batch:
    g = torch.Generator("cuda").manual_seed(seed)
    tokens = sum(lengths)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=g)

    q = (1.5 * normal(tokens, heads, head_dim)).bfloat16()
    k = normal(tokens, groups, head_dim).bfloat16()
    v = (normal(tokens, groups, head_dim) * normal(tokens, groups, 1).exp2()).bfloat16()
    (k8, ks), (v8, vs) = quantize_keys_and_values(k, v, kv)
    codes = gpu.KeyValueCodes(k8, ks, v8, vs)

    counts = [-(-n // 64) for n in lengths]
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    tables = [[order.pop() for _ in range(c)] for c in counts]
    slots = [
        64 * t[i // 64] + i % 64 for n, t in zip(lengths, tables, strict=True) for i in range(n)
    ]

    def scattered(x: torch.Tensor | None) -> torch.Tensor | None:
        if x is None:
            return None
        anything = 99 if x.dtype == torch.int8 else math.nan
        pool = torch.full((sum(counts) + 3, 64, *x.shape[1:]), anything, device="cuda").to(x.dtype)
        bits(pool).flatten(0, 1)[torch.tensor(slots, device="cuda")] = bits(x)
        return pool

    pages = gpu.KeyValueCodes(*(scattered(x) for x in (k8, ks, v8, vs)))
    return Batch(lengths, q, k, v, codes, pages, tables)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def packed(gpu, b: Batch, codes: object = None) -> tuple[torch.Tensor, torch.Tensor]:
    tiles = gpu.QueryTiles.packed(b.starts, "cuda")
    return gpu.attend_tiles(b.q, gpu.stage_keys(codes or b.codes, tiles), tiles)


def ints(numbers: Sequence[Any]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


def padded(tables: list[list[int]]) -> torch.Tensor:
    width = max(map(len, tables))
    return ints([table + [0] * (width - len(table)) for table in tables])


def decode(gpu, b: Batch, picks: list[tuple[int, int]], max_length: int = 0) -> torch.Tensor:
    """Output of token p of sequence s, for (s, p) in picks, each as a newest token."""
    table = padded(b.tables)[[s for s, _ in picks]]
    rows = torch.tensor([b.starts[s] + p for s, p in picks], device="cuda")
    lengths = ints([p + 1 for _, p in picks])
    limit = max_length or max(b.lengths)
    return gpu.attend_decode(b.q[rows].contiguous(), b.pages, table, lengths, limit)


def assert_decode_is_training(gpu, b: Batch, picks: list[tuple[int, int]]) -> None:
    rows = torch.tensor([b.starts[s] + p for s, p in picks], device="cuda")
    assert same_bits(decode(gpu, b, picks), packed(gpu, b)[0][rows])


def positions(lengths: list[int]) -> list[tuple[int, int]]:
    g = torch.Generator().manual_seed(1)
    edges = {0, 1, 62, 63, 64, 65, 127, 128, 191, 192, 1022, 1023, 1024, 1025, 2047, 2048}
    picks = []
    for s, n in enumerate(lengths):
        drawn = set(torch.randint(n, (9,), generator=g).tolist())
        picks += [(s, p) for p in sorted({p for p in edges if p < n} | {n - 1} | drawn)]
    return picks


@pytest.mark.parametrize("kv", ALL_FORMATS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "heads, groups", [(2, 2), (4, 2), (8, 2), (10, 2), (14, 2), (8, 1), (16, 1)]
)
def test_decode_has_the_bits_of_training(
    gpu, heads: int, groups: int, head_dim: int, kv: str
) -> None:
    b = batch(gpu, LENGTHS, heads, groups, head_dim, kv)
    assert_decode_is_training(gpu, b, positions(LENGTHS))


@pytest.mark.parametrize("kv", ALL_FORMATS)
def test_contexts_up_to_40k_agree(gpu, kv: str) -> None:
    picks = [(0, 39_999), (0, 32_767), (0, 20_001), (0, 5), (1, 8191), (1, 8999)]
    assert_decode_is_training(gpu, batch(gpu, [40_000, 9000], 8, 2, 128, kv), picks)


@pytest.mark.parametrize("kv", ALL_FORMATS)
@pytest.mark.parametrize("chunk", [1, 37, 64, 300, 1024])
def test_prefill_has_the_bits_of_training_in_any_chunks(gpu, chunk: int, kv: str) -> None:
    b = batch(gpu, [1300, 65, 700], 8, 2, 128, kv)
    expected = packed(gpu, b)[0]
    pieces = [
        (s, first, min(first + chunk, n))
        for s, n in enumerate(b.lengths)
        for first in range(0, n, chunk)
        if chunk > 1 or first % 97 == 0
    ]
    rows = torch.cat([torch.arange(b.starts[s] + i, b.starts[s] + j) for s, i, j in pieces]).cuda()
    queries, contexts = [j - i for _, i, j in pieces], [j for *_, j in pieces]
    tiles = gpu.QueryTiles.paged(queries, contexts, [b.tables[s] for s, *_ in pieces], "cuda")
    assert same_bits(gpu.attend_prefill(b.q[rows].contiguous(), b.pages, tiles), expected[rows])


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("stored_format", ["fp8", "int8"])
def test_every_code_is_widened_exactly(gpu, stored_format: str, head_dim: int) -> None:
    """The output of a sequence of one key, whose weight is 1, is its value, rounded to BF16."""
    finite = (torch.arange(256).view(-1, 1) + torch.arange(head_dim)).to(torch.uint8)
    codes = finite.view(torch.int8)
    if stored_format == "fp8":
        codes = torch.where(finite & 127 == 127, 0, finite).view(torch.float8_e4m3fn)
    codes = codes.view(256, 1, head_dim).cuda()
    scales = torch.ones(256, 1, device="cuda")
    q = torch.ones(256, 2, head_dim, dtype=torch.bfloat16, device="cuda")
    tiles = gpu.QueryTiles.packed(range(257), "cuda")
    stored = gpu.KeyValueCodes(codes, scales, codes, scales)
    expected = codes.float().bfloat16().expand(256, 2, head_dim)
    assert torch.equal(gpu.attend_tiles(q, gpu.stage_keys(stored, tiles), tiles)[0], expected)
    page = torch.nn.functional.pad(bits(codes)[:, None], (0, 0, 0, 0, 0, 63)).view(codes.dtype)
    lines = torch.ones(256, 64, 1, device="cuda")
    paged = gpu.KeyValueCodes(page, lines, page, lines)
    table = ints(range(256))[:, None]
    assert torch.equal(gpu.attend_decode(q, paged, table, ints([1] * 256), 1), expected)


def test_a_row_is_independent_of_its_batch_and_of_the_launch(gpu) -> None:
    b = batch(gpu, LENGTHS, 32, 8, 128, "fp8")
    picks = positions(LENGTHS)
    together = decode(gpu, b, picks)
    for i in (0, len(picks) // 2, len(picks) - 1):
        s = picks[i][0]
        assert same_bits(decode(gpu, b, [picks[i]]), together[i : i + 1])
        assert same_bits(decode(gpu, b, [picks[i]], len(b.tables[s]) * 64), together[i : i + 1])
    order = torch.randperm(len(picks), generator=torch.Generator().manual_seed(3)).tolist()
    assert same_bits(decode(gpu, b, [picks[i] for i in order]), together[order])
    again = packed(gpu, b)
    for other in (packed(gpu, b) for _ in range(3)):
        assert all(same_bits(x, y) for x, y in zip(again, other, strict=True))


@pytest.mark.parametrize("scales", ["fp32", "pow2"])
@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("heads, groups, head_dim", [(32, 8, 128), (7, 1, 128), (14, 2, 64)])
def test_quantized_outputs_are_the_quantizers(
    gpu, heads: int, groups: int, head_dim: int, kv: str, scales: str
) -> None:
    """Decode has one split or several and an empty context; prefill odd chunks; both a NaN."""
    from jetrl.precision.triton.quantize import quantize_rows

    def compare(o: torch.Tensor, rows) -> None:
        expected = quantize_rows(o.flatten(1), scales=scales)
        assert rows.codes.shape == expected.codes.shape
        assert rows.scales.stride() == expected.scales.stride()
        assert torch.isnan(rows.codes[2, :head_dim].float()).all()
        assert_same(rows, expected)

    b = batch(gpu, [200, 1, 65, 2111, 1024], heads, groups, head_dim, kv)
    table, lengths = padded([*b.tables, b.tables[0]]), ints([*b.lengths, 0])
    q = b.q[:6].contiguous()
    q[2, 0, 0] = math.nan
    for count, limit in ((6, table.shape[1] * 64), (3, 1024)):  # of several splits and of one
        arguments = (q[:count], b.pages, table[:count], lengths[:count], limit)
        compare(gpu.attend_decode(*arguments), gpu.attend_decode_quantized(*arguments, scales))
    chunks = [200, 1, 63, 1000, 129]
    ends = b.starts[1:]
    rows = torch.cat([torch.arange(e - c, e) for e, c in zip(ends, chunks, strict=True)])
    tiles = gpu.QueryTiles.paged(chunks, b.lengths, b.tables, "cuda")
    q = b.q[rows.cuda()].contiguous()
    q[2, 0, 0] = math.nan
    outputs = gpu.attend_prefill_quantized(q, b.pages, tiles, scales)
    compare(gpu.attend_prefill(q, b.pages, tiles), outputs)


def reference(q, k, v) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 attention of one sequence: q [T, H, D], k and v [T, G, D] -> o, lse [H, T]."""
    heads, groups = q.shape[1], k.shape[1]
    k, v = (x.double().repeat_interleave(heads // groups, 1) for x in (k, v))
    s = torch.einsum("thd,nhd->htn", q.double(), k) / math.sqrt(q.shape[-1])
    s = s.masked_fill(torch.ones(s.shape[1:], device=s.device).triu(1).bool(), -math.inf)
    return torch.einsum("htn,nhd->thd", s.softmax(-1), v), s.logsumexp(-1)


def values(codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    return codes.double() if scales is None else codes.double() * scales[..., None].double()


def stored(codes) -> tuple[torch.Tensor, torch.Tensor]:
    return values(codes.k, codes.k_scales), values(codes.v, codes.v_scales)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b).norm() / b.norm()).item()


@pytest.mark.parametrize("kv", ALL_FORMATS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_output_is_close_to_float64(gpu, head_dim: int, kv: str) -> None:
    b = batch(gpu, [1500], 8, 2, head_dim, kv)
    o, lse = packed(gpu, b)
    expected, expected_lse = reference(b.q, *stored(b.codes))
    # Output rounded to BF16 (2**-9 at most, half of it typically) and, without scales, weights too.
    assert relative(o, expected) < 2**-8
    # float32 sums of D products, each logit below 2**5: D * 2**-24 * 2**5 at the very worst.
    assert (lse.double() - expected_lse).abs().max() < head_dim * 2**-19


@pytest.mark.parametrize("kv", ["fp8", "int8"])
@pytest.mark.parametrize("exponent", [-99, -60, -20, 0, 10])
def test_value_scales_of_any_size_are_as_accurate_as_one(gpu, exponent: int, kv: str) -> None:
    b = batch(gpu, [1100], 4, 2, 128, kv)
    c = b.codes
    scaled = gpu.KeyValueCodes(c.k, c.k_scales, c.v, c.v_scales * 2.0**exponent)
    expected = reference(b.q, *stored(scaled))[0]
    assert relative(packed(gpu, b, scaled)[0], expected) < 2**-8


@pytest.mark.parametrize("kv", ALL_FORMATS)
def test_nan_reaches_the_output_of_its_own_rows_only(gpu, kv: str) -> None:
    b = batch(gpu, [300, 300], 4, 2, 128, kv)
    clean = packed(gpu, b)[0]
    b.q[7, 1] = math.nan
    where = b.codes.k if kv == "bf16" else b.codes.k_scales
    where[300 + 250, 0] = math.nan
    o = packed(gpu, b)[0]
    assert o[7, 1].isnan().all()
    assert o[300 + 250 :, :2].isnan().all()
    touched = torch.zeros_like(o, dtype=torch.bool)
    touched[7, 1] = True
    touched[300 + 128 :, :2] = True  # rows of the NaN key's own tile may see 0 * NaN
    assert same_bits(torch.where(touched, 0, o), torch.where(touched, 0, clean))


def test_padding_rows_are_zero_and_too_long_contexts_are_nan(gpu) -> None:
    b = batch(gpu, [2100], 4, 2, 128, "fp8")
    table, lengths = ints([b.tables[0]] * 3), ints([0, 700, 2100])
    q = b.q[[0, 699, 2099]].contiguous()
    for limit in (1024, 2048):
        o = gpu.attend_decode(q, b.pages, table, lengths, limit)
        assert (o[0] == 0).all()
        assert same_bits(o[1], packed(gpu, b)[0][699])
        assert o[2].isnan().all()


@pytest.mark.parametrize("kv", ALL_FORMATS)
def test_decode_in_a_cuda_graph_waits_for_the_newest_key(gpu, kv: str) -> None:
    """In a graph, decode asks for older pages before the kernel in front has ended."""
    rotary = pytest.importorskip("jetrl.kernels.rotary_triton")
    contexts = [1, 2, 63, 64, 65, 66, 127, 128, 129, 192, 193, 700, 1024, 1025, 1089, 1200] * 8
    b = batch(gpu, contexts, 8, 2, 128, kv)
    tables, lengths = padded(b.tables), ints(contexts)
    newest = [table[-1] * 64 + (n - 1) % 64 for table, n in zip(b.tables, contexts, strict=True)]
    slots = torch.tensor(newest, device="cuda")
    g = torch.Generator("cuda").manual_seed(5)
    qkv = torch.randn(len(contexts), 12 * 128, device="cuda", generator=g).bfloat16()
    angles = rotary_table(1e6 ** (-np.arange(64) / 64), max(contexts)).cuda()
    pools = (b.pages.k, b.pages.v, b.pages.k_scales, b.pages.v_scales)

    def forward() -> torch.Tensor:
        q = rotary.qk_norm_rotary_cache(
            qkv, lengths.long() - 1, angles, None, 1e-6, 8, b.pages, slots
        )
        return gpu.attend_decode(q, b.pages, tables, lengths, max(contexts))

    def spoil() -> None:
        for x in pools:
            if x is not None:
                nan = torch.full((1,), math.nan, device="cuda").to(x.dtype)
                bits(x).flatten(0, 1)[slots] = bits(nan)

    spoil()
    expected = forward()
    assert expected.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = forward()
    for _ in range(20):
        spoil()
        graph.replay()
        assert same_bits(o, expected)


@pytest.mark.usefixtures("one_large_test_at_a_time")
def test_pages_beyond_two_to_the_31_elements(gpu) -> None:
    b = batch(gpu, [130], 32, 8, 128, "fp8")
    pages = 2**31 // (64 * 8 * 128) + 8
    old = (b.pages.k, b.pages.k_scales, b.pages.v, b.pages.v_scales)
    pool = [torch.zeros(pages, *x.shape[1:], dtype=x.dtype, device="cuda") for x in old]
    for new, x in zip(pool, old, strict=True):
        bits(new)[-3:] = bits(x)[b.tables[0]]
    tables = [[pages - 3, pages - 2, pages - 1]]
    far = dataclasses.replace(b, pages=gpu.KeyValueCodes(*pool), tables=tables)
    assert same_bits(decode(gpu, far, [(0, 129), (0, 64)]), packed(gpu, b)[0][[129, 64]])
    tiles = gpu.QueryTiles.paged([130], [130], far.tables, "cuda")
    assert same_bits(gpu.attend_prefill(b.q, far.pages, tiles), packed(gpu, b)[0])


MOST_BLOCKS = 65535  # of a grid's second and third dimension


def test_a_step_over_more_key_blocks_than_a_grid_is_high(gpu) -> None:
    b = batch(gpu, [256], 1, 1, 64, "fp8")
    b.tables[0] *= (MOST_BLOCKS + 5) // 4
    keys = 64 * len(b.tables[0])
    b.lengths[0] = keys
    tiles = gpu.QueryTiles.paged([1], [keys], b.tables, "cuda")
    assert len(tiles.key_blocks) > MOST_BLOCKS
    q = b.q[:1].contiguous()
    expected = gpu.attend_decode(q, b.pages, ints(b.tables), ints([keys]), keys)
    assert same_bits(gpu.attend_prefill(q, b.pages, tiles), expected)


@pytest.mark.usefixtures("one_large_test_at_a_time")
@pytest.mark.parametrize("limit", [2**31, 0], ids=["stored", "anew"])
def test_gradients_of_more_blocks_than_a_grid_is_high(
    gpu, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many copies of one short sequence: each has the gradients of the first alone."""
    monkeypatch.setattr(module, "STORED_DS_BYTES", limit)
    one = batch(gpu, [64], 1, 1, 64, "bf16")
    do = torch.randn_like(one.q)

    def gradients(copies: int) -> list[torch.Tensor]:
        tiles = gpu.QueryTiles.packed(range(0, 64 * copies + 1, 64), "cuda")
        assert len(tiles.key_tiles) == len(tiles.query_tiles) == copies
        q, k, v, grad = (x.repeat(copies, 1, 1) for x in (one.q, one.k, one.v, do))
        codes = gpu.KeyValueCodes(k, None, v, None)
        o, lse = gpu.attend_tiles(q, gpu.stage_keys(codes, tiles), tiles)
        return list(module.attention_backward(grad, q, codes, o, lse, tiles))

    for alone, many in zip(gradients(1), gradients(MOST_BLOCKS + 1), strict=True):
        assert same_bits(many.view(-1, *alone.shape), alone.expand(MOST_BLOCKS + 1, *alone.shape))


@pytest.mark.parametrize("kv", FORMATS)
def test_gradients_do_not_depend_on_how_much_of_ds_is_kept(
    gpu, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [500, 1, 63, 129, 300, 1100]
    b = batch(gpu, lengths, 8, 2, 128, kv)
    tiles = gpu.QueryTiles.packed(b.starts, "cuda")
    o, lse = gpu.attend_tiles(b.q, gpu.stage_keys(b.codes, tiles), tiles)
    do = torch.randn_like(b.q)

    def gradients(limit: int) -> tuple[torch.Tensor, ...]:
        monkeypatch.setattr(module, "STORED_DS_BYTES", limit)
        return module.attention_backward(do, b.q, b.codes, o, lse, tiles)

    whole = gradients(2**31)
    one_head = 4 * tiles.stored_tiles * 128 * 64 * 2
    for other in (gradients(2**31), gradients(one_head)):
        assert all(same_bits(x, y) for x, y in zip(whole, other, strict=True))
    for stored, anew in zip(whole, gradients(0), strict=True):
        assert (stored.double() - anew.double()).norm() <= 2**-7 * anew.double().norm()


def trained(b: Batch, kv: str, do: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k and v by the trainer's attention, which starts from qkv."""
    plan = PrecisionPlan.preset("unified").replace(kv=kv)
    tokens, heads, head_dim = b.q.shape
    groups = b.k.shape[1]
    table = rotary_table(np.ones(head_dim // 2), 1).cuda()
    rope = Rotary(torch.zeros(tokens, dtype=torch.int64).cuda(), table, None, heads, groups)
    qkv = torch.cat([b.q, b.k, b.v], dim=1).flatten(1).requires_grad_()
    ends = torch.tensor(b.starts)
    out = PackedKeyValues(ends, plan, qkv.device).attend(0, qkv, rope, last=False)
    out.backward(do.flatten(1))
    return qkv.grad.unflatten(1, (-1, head_dim)).split([heads, groups, groups], dim=1)


@pytest.mark.parametrize("kv", ALL_FORMATS)
@pytest.mark.parametrize("heads, groups, head_dim", [(8, 2, 128), (7, 1, 64), (2, 2, 128)])
def test_gradients_are_close_to_float64(
    gpu, heads: int, groups: int, head_dim: int, kv: str
) -> None:
    lengths = [500, 1, 63, 129, 300]
    b = batch(gpu, lengths, heads, groups, head_dim, kv)
    do = torch.randn_like(b.q)
    gradients = trained(b, kv, do)
    k, v = (values(*codes) for codes in quantize_keys_and_values(b.k, b.v, kv))
    exact = [x.clone().requires_grad_() for x in (b.q.double(), k, v)]
    for s, n in zip(b.starts, lengths, strict=False):
        q, k, v = (x[s : s + n] for x in exact)
        reference(q, k, v)[0].backward(do[s : s + n].double())
    for ours, theirs in zip(gradients, exact, strict=True):
        # Weights, their gradients and the result are rounded to BF16, 2**-9 at most each.
        assert relative(ours, theirs.grad) < 2**-7
