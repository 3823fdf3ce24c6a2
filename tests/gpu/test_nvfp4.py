"""NVFP4 on Hopper: the reference's numbers, and one row's bits at any number of rows."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from linears import (
    LINEARS,
    adapted_policy,
    assert_gradients_are_near,
    assert_replays,
    layers,
    poison,
    random,
)
from linears import weight as adapter_weight
from small_models import config
from tests.models.nvfp4_directories import to_nvfp4

from jetrl import Policy, RolloutEngine, SamplingParams
from jetrl.memory.plan import quantized_bytes
from jetrl.models.adapter import Adapter, LoRA
from jetrl.models.families import ModelConfig
from jetrl.models.hf import Encoding, model_config, save_model
from jetrl.models.norm_noise import NormNoise
from jetrl.models.tiny import RandomWeights
from jetrl.precision import PrecisionPlan
from jetrl.precision.hopper import adapter as kernels
from jetrl.precision.hopper.adapter_linear import nvfp4_adapted_matmul
from jetrl.precision.hopper.nvfp4_rows import Tiles, nvfp4_rows_matmul
from jetrl.precision.nvfp4 import (
    WIDENED_FACTOR,
    NVFP4Tensor,
    NVFP4Weight,
    RowFactors,
    dequantize_nvfp4,
    hopper_order,
    parts_of,
    quantize_nvfp4,
    stacked_nvfp4,
    widened,
)
from jetrl.precision.nvfp4_products import nvfp4_matmul
from jetrl.precision.triton import adapter as portable
from jetrl.precision.triton.bf16 import pinned_bf16_reductions
from jetrl.session.parity import check_policy, failures, measure, random_prompts
from jetrl.settings.sections import Settings

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

LAYERS = layers("qwen3-8b", "qwen3-32b", "qwen3-0.6b")


@pytest.fixture(scope="module")
def hopper():
    return pytest.importorskip("jetrl.precision.hopper.nvfp4")


def any_codes(rows: int, columns: int, seed: int) -> NVFP4Tensor:
    """Return every code beside every finite scale, zeros and subnormal ones too."""
    g = torch.Generator("cuda").manual_seed(seed)
    shapes = (256, (rows, columns // 2)), (127, (rows, columns // 16))
    codes, scales = (
        torch.randint(most, shape, generator=g, device="cuda", dtype=torch.uint8)
        for most, shape in shapes
    )
    return NVFP4Tensor(codes, scales.view(torch.float8_e4m3fn), torch.tensor(0.3, device="cuda"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_quantizer_has_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    x = random(96, 1152, 0, 0.02).to(dtype)
    x[3, 16:48] = 0
    x[5] *= 1e-6
    ours, true = quantize_nvfp4(x), quantize_nvfp4(x.cpu())
    assert ours.scale.item() == true.scale.item()
    ordered, expected = hopper_order(ours), hopper_order(true)
    assert ordered.factor == expected.factor
    for a, b in ((ours, true), (ordered, expected)):
        assert torch.equal(a.codes.cpu(), b.codes)
        assert torch.equal(a.scales.cpu().view(torch.uint8), b.scales.view(torch.uint8))


@pytest.mark.parametrize("shape", [*LAYERS, (1152, 896), (896, 4864), (128, 128)], ids=str)
def test_a_row_has_the_same_bits_at_every_number_of_rows(hopper, shape: tuple[int, int]) -> None:
    """The kernel that unpacks against cuBLAS on widened values, eagerly and replayed."""
    n, k = shape
    x = random(300, k, 2)
    weight = hopper_order(quantize_nvfp4(random(n, k, 3, 0.02)))
    whole = hopper.nvfp4_matmul_hopper(x, weight, widen=True)
    counts = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 129, 200, 256, 300)
    different = {}
    for rows in counts:
        for widen in (False, True):
            if widen and rows < 64:
                continue
            out = hopper.nvfp4_matmul_hopper(x[:rows], weight, widen=widen)
            different[rows, widen] = int((out != whole[:rows]).sum())
    assert not any(different.values()), f"different elements by (rows, widened): {different}"
    assert_replays(
        lambda: [hopper.nvfp4_matmul_hopper(x[:33], weight) for _ in range(4)], [whole[:33]] * 4
    )


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(4096, 4096), (1152, 896)], ids=str)
def test_any_codes_and_scales_and_tiles(hopper, shape, out_dtype: torch.dtype) -> None:
    weight = hopper_order(any_codes(*shape, 4))
    x = random(128, shape[1], 5)
    expected = hopper.nvfp4_matmul_hopper(x, weight, out_dtype, widen=True)
    for rows, units, group, sides in (
        (5, 1, 1, 1), (5, 2, 1, 1), (5, 1, 2, 1), (5, 2, 2, 3),
        (40, 2, 1, 3), (64, 1, 2, 2), (128, 1, 2, 1), (128, 2, 1, 1),
    ):  # fmt: skip
        tiles = Tiles(units, group, 2, 128 if sides < 3 else 112, sides=sides)
        out = nvfp4_rows_matmul(x[:rows], weight, out_dtype, tiles)
        assert torch.equal(out, expected[:rows]), (rows, tiles)


@pytest.mark.parametrize("shape", [(4096, 12288), (224, 10752), (96, 384), (128, 128)], ids=str)
def test_the_parts_of_a_long_sum_are_added_in_order(hopper, shape: tuple[int, int]) -> None:
    """Side by side, one after the other, and by the products of parts that cuBLAS makes."""
    n, k = shape
    q = quantize_nvfp4(random(n, k, 11, 0.02))
    weight, x = hopper_order(q), random(200, k, 12)
    _, columns = parts_of(n, k)
    wide, sums = widened(q) * WIDENED_FACTOR, torch.zeros(200, n, device="cuda")
    with pinned_bf16_reductions():
        for part, right in zip(x.split(columns, 1), wide.split(columns, 1), strict=True):
            sums += torch.mm(part.contiguous(), right.t().contiguous(), out_dtype=torch.float32)
    expected = sums * weight.factor
    assert torch.equal(hopper.nvfp4_matmul_hopper(x, weight, torch.float32, widen=True), expected)
    cuts = itertools.product((1, 5, 16, 200), (1, 2), (1, 2, 4), (0, 1))
    for rows, units, group, together in cuts:
        if (together and (rows > 16 or group == 1)) or (group == 4 and not together):
            continue
        tiles = Tiles(units, group, 2, 80 if rows <= 16 else 128, bool(together))
        out = nvfp4_rows_matmul(x[:rows], weight, torch.float32, tiles)
        assert torch.equal(out, expected[:rows]), (rows, tiles)


@pytest.mark.parametrize("form", ["passes", "fused"])
@pytest.mark.parametrize("rank", [8, 64])
@pytest.mark.parametrize("linear", LINEARS)
def test_a_product_with_an_adapter_has_the_bits_of_both(
    hopper, linear: str, rank: int, form: str
) -> None:
    n, k, parts = LINEARS[linear]
    adapter = adapter_weight(rank, k, parts, n)
    base = hopper_order(quantize_nvfp4(random(n, k, 13, 0.02)))
    x = random(168, k, 14)
    u = portable.project_down_whole(x, adapter.down)
    product = hopper.nvfp4_matmul_hopper(x, base, widen=True)
    whole = portable.project_up(product.clone(), u, adapter.up, adapter.columns)
    assert not torch.equal(whole, product)
    different = {}
    for rows in range(1, 168, 1 if linear in ("odd", "o") else 7):
        poison(whole[:rows], u[:rows])
        y, made = nvfp4_adapted_matmul(x[:rows], base, adapter, form)
        different[rows] = int((y != whole[:rows]).sum() + (made != u[:rows]).sum())
    assert not any(different.values()), {key: bad for key, bad in different.items() if bad}
    assert not adapter.arrived[:-1].any()
    # Sides that lie past the last row of the weight, too.
    tiles = Tiles(2, 1, 2, 112, sides=3)
    for rows in (5, 40) if form == "fused" else ():
        operands = kernels.AdapterOperands(u[:rows].clone(), adapter.up, adapter.columns)
        y = nvfp4_rows_matmul(x[:rows], base, tiles=tiles, adapter=operands)
        assert torch.equal(y, whole[:rows]), rows


def product_and_bound(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a @ b^T in float64, and a bound of errors."""
    # BF16's rounding; each of K / 16 additions cuts 17 values at 2**-23 of the largest.
    true, terms = a.double() @ b.mT, a.double().abs() @ b.abs().mT
    return true, 2.0**-8 * true.abs() + 17 * a.shape[1] / 16 * 2.0**-23 * terms


@pytest.mark.parametrize("rows", [(4096, 1024, 1024), (12288, 12288), (40, 24, 64)], ids=str)
def test_rows_with_scales_of_their_own(hopper, rows: tuple[int, ...]) -> None:
    """Each row's bits are those of the same sums under one scale, at every number of rows of X."""
    k = 896
    parts = [quantize_nvfp4(random(n, k, 20 + i, 0.02)) for i, n in enumerate(rows)]
    one = parts[0].scale
    powers = [2.0**-i for i in range(len(rows))]
    twofold = [NVFP4Tensor(p.codes, p.scales, one * f) for p, f in zip(parts, powers, strict=True)]
    shared = hopper_order(stacked_nvfp4([NVFP4Tensor(p.codes, p.scales, one) for p in parts]))
    own, x = hopper_order(stacked_nvfp4(twofold)), random(300, k, 30)
    assert isinstance(own.factor, RowFactors)
    of_rows = torch.cat([torch.full((n,), f) for n, f in zip(rows, powers, strict=True)]).cuda()
    for out_dtype in (torch.bfloat16, torch.float32):
        expected = hopper.nvfp4_matmul_hopper(x, shared, out_dtype, widen=True) * of_rows
        for count, widen in itertools.product((1, 7, 16, 33, 64, 129, 256, 300), (False, True)):
            if widen and count < 64:
                continue
            out = hopper.nvfp4_matmul_hopper(x[:count], own, out_dtype, widen=widen)
            assert torch.equal(out, expected[:count].to(out_dtype)), (count, widen)
    weight = stacked_nvfp4(parts)
    values, ordered = dequantize_nvfp4(weight).double(), hopper_order(weight)
    y, (true, bound) = hopper.nvfp4_matmul_hopper(x, ordered).double(), product_and_bound(x, values)
    assert ((y - true).abs() <= bound).all()
    for count in (5, 33, 200):
        assert torch.equal(hopper.nvfp4_matmul_hopper(x[:count], ordered), y[:count].bfloat16())
    dy = random(300, sum(rows), 31)
    dx, (true, bound) = hopper.nvfp4_dgrad_hopper(dy, ordered), product_and_bound(dy, values.mT)
    assert ((dx - true).abs() <= bound).all()


# Whole policies: an adapter on a base in NVFP4.


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_the_sampler_is_the_trainer(family: str) -> None:
    """Captured decode of 1, 24 and 96 sequences, long prompts, noise on norms, with gradients."""
    p = adapted_policy(family=family, base="nvfp4")
    assert failures(check_policy(p)) == []
    noise = NormNoise(p, noisy_settings())
    for step, samples, sequences in ((1, 1, 1), (3, 3, 24), (4, 12, 96)):
        noise.begin_step(step)
        prompts = [*random_prompts(p, 7, 60, seed=step), [5] * 700]
        result = measure(
            p, prompts, samples=samples, max_tokens=12, max_batch_size=sequences, gradients=True
        )
        assert result.tokens == 8 * samples * 12
        assert result.different == 0


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_the_sampler_is_the_trainer_over_files_in_nvfp4(layout: str, tmp_path: Path) -> None:
    """With scales that differ among Q, K and V, and layers that are left in BF16."""
    shape, path = ModelConfig.from_hf(config("qwen3")), tmp_path / "m"
    save_model(path, shape, dict(RandomWeights(shape, 0)), Encoding())
    to_nvfp4(path, layout, apart=True, left=("1.mlp.down_proj",))
    stored = model_config(path)
    plan = PrecisionPlan.preset("unified").replace(base="nvfp4")
    p, on_cpu = (
        Policy.from_pretrained(path, plan, device, adapter=Adapter.new(stored, LoRA(12, 24.0), 0))
        for device in ("cuda", "cpu")
    )
    assert failures(check_policy(p)) == []
    result = measure(p, random_prompts(p, 7, 60, seed=1), samples=3, max_tokens=12, gradients=True)
    assert result.different == 0
    x = random(40, shape.hidden_size, 40)
    ours, theirs = (m.decoder.layers[0].mixer.qkv.operand("train") for m in (p, on_cpu))
    assert isinstance(ours, NVFP4Weight)
    assert isinstance(theirs, NVFP4Weight)
    y, expected = nvfp4_matmul(x, ours).double().cpu(), nvfp4_matmul(x.cpu(), theirs).double()
    assert (y - expected).norm() <= 2.0**-8 * expected.norm()


@pytest.mark.parametrize("rows", [4097, 4101, 4127])
def test_the_last_rows_of_a_long_product_have_the_bits_of_few(hopper, rows: int) -> None:
    """Sums of parts of K are made for 4096 rows at most at a time, in pieces of like size."""
    x, weight = random(rows, 2560, 41), hopper_order(quantize_nvfp4(random(2560, 2560, 42, 0.02)))
    assert parts_of(2560, 2560)[0] > 1
    last = hopper.nvfp4_matmul_hopper(x[4096:], weight, widen=False)
    assert torch.equal(hopper.nvfp4_matmul_hopper(x, weight)[4096:], last)


def noisy_settings() -> Settings:
    adapter = {"kind": "lora", "noise_start": 0.05, "noise_stages": 3}
    return Settings.model_validate({"adapter": adapter, "loop": {"steps": 4}})


def test_captured_graphs_read_the_noise_of_the_step() -> None:
    p = adapted_policy(base="nvfp4")
    noise, prompts = NormNoise(p, noisy_settings()), [[1, 2, 3], [4, 5]]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    engine = RolloutEngine(p)

    def logprobs() -> list[float]:
        return [value for c in engine.generate(prompts, params) for value in c.logprobs]

    clean = logprobs()
    noise.begin_step(2)
    noisy = logprobs()
    assert noisy != clean
    with noise.off():
        assert logprobs() == clean
    assert logprobs() == noisy


def test_gradients_are_near_the_cpus() -> None:
    """Adapters' gradients through an NVFP4 base, apart by BF16's roundings on the way."""
    ours, theirs = (adapted_policy(device=device, base="nvfp4") for device in ("cuda", "cpu"))
    assert_gradients_are_near(ours, theirs, 0.05)


def test_the_base_takes_the_planned_bytes() -> None:
    p = adapted_policy(base="nvfp4")
    held = sum(t.nbytes for n, t in p.weights.quantized_tensors().items() if "lora" not in n)
    table = p.decoder.rotary_table.nbytes
    assert held + table == quantized_bytes(p.config, p.plan)
