"""Adapters on a Hopper GPU: bits in every batch, captured graphs, gradients, memory."""

from __future__ import annotations

import pytest
import torch
from linears import (
    LINEARS,
    adapted_policy,
    assert_gradients_are_as_far,
    assert_gradients_are_near,
    assert_replays,
    assert_same,
    poison,
    random,
    weight,
)
from small_models import FAMILIES
from tests.training.shared import count_different

from jetrl import RolloutEngine, SamplingParams
from jetrl.kernels.swiglu_triton import swiglu_backward, swiglu_backward_values_, swiglu_forward
from jetrl.precision.adapter import add_adapter, project_down, project_up
from jetrl.precision.hopper.adapter import project_down_quantize, project_down_rows
from jetrl.precision.hopper.adapter_linear import adapted_matmul, form_for, quantized_adapted_matmul
from jetrl.precision.hopper.gemm import fp8_matmul_hopper
from jetrl.precision.triton import adapter as portable
from jetrl.precision.triton.quantize import quantize_rows, quantize_weight
from jetrl.session.parity import check_policy, failures, locate, measure, random_prompts
from jetrl.settings.loading import load_config
from jetrl.training.sft import SftTrainer
from jetrl.types import Example

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]


PARTS = [
    (8, 4096, ((0, 4096), (4096, 1024), (5120, 1024)), 6144),
    (32, 12288, ((0, 4096),), 4096),
    (100, 1152, ((0, 512), (640, 128)), 768),
]


@pytest.mark.parametrize("rank, columns, parts, rows", PARTS, ids=["qkv", "down", "odd"])
def test_a_row_has_the_same_bits_in_any_batch(
    rank: int, columns: int, parts: tuple[tuple[int, int], ...], rows: int
) -> None:
    w = weight(rank, columns, parts, rows)
    x, y = random(4500, columns, 0), random(4500, rows, 1)
    with torch.no_grad():
        whole = add_adapter(y.clone(), x, w)
        for part in (slice(0, 1), slice(3, 10), slice(5, 21), slice(5, 22), slice(70, 1200)):
            alone = add_adapter(y[part].clone(), x[part], w)
            assert torch.equal(alone, whole[part]), part
        u = project_down(x, w)
        assert torch.equal(project_up(y.clone(), u, w), whole)
        assert torch.equal(project_down(x[:9], w), u[:9])
    # Float64 products of the same rounded values, rounded at the same places: the sums of a tensor
    # core are off by far less than BF16 rounds, so few results round the other way.
    padded = w.shape.padded_rank
    expected = y.double()
    exact_u = (x.double() @ w.down.double().mT).bfloat16()
    for number, (first, count) in enumerate(parts):
        up = w.up[first : first + count].double()
        added = exact_u[:, number * padded : (number + 1) * padded].double() @ up.mT
        expected[:, first : first + count] += added.bfloat16().double()
    expected = expected.bfloat16()
    assert (whole == expected).double().mean() > 0.9
    assert (whole.double() - expected.double()).norm() < 2**-8 * expected.double().norm()


# Rows of a tile and one more or less, one kernel and the next.
ROWS = [1, 8, 16, 17, 63, 64, 65, 129, 256, 1000]


@pytest.mark.parametrize("rank", [1, 8, 32, 64, 100])
@pytest.mark.parametrize("columns", [4096, 12288, 896, 576])
def test_few_rows_have_the_sums_of_many(rank: int, columns: int) -> None:
    """The product with A in one launch against programs of whole rows, eagerly and replayed."""
    w = weight(rank, columns, ((0, 64), (64, 64)), 128)
    x = random(4100, columns, 2)
    whole = portable.project_down_whole(x, w.down)
    for rows in ROWS:
        poison(torch.empty(64, rows, len(w.down), device="cuda"), whole[:rows])
        assert torch.equal(project_down_rows(x[:rows], w.down, w.arrived), whole[:rows]), rows
        assert torch.equal(portable.project_down_chunks(x[:rows], w.down), whole[:rows]), rows
        assert torch.equal(
            project_down_rows(x[3 : 3 + rows], w.down, w.arrived, True), whole[3 : 3 + rows]
        )
        for scales in ("fp32", "pow2"):
            expected = quantize_rows(x[:rows], scales=scales)
            poison(torch.empty(max(rows, 64), columns // 4, device="cuda"))
            u, codes = project_down_quantize(x[:rows], w.down, w.arrived, scales)
            assert torch.equal(u, whole[:rows])
            assert_same(codes, expected)
    assert not w.arrived[:-1].any()
    assert_replays(
        lambda: [project_down_rows(x[i : i + 33] * 1, w.down, w.arrived) for i in range(4)],
        [whole[i : i + 33] for i in range(4)],
    )


FP8_LINEARS = LINEARS | {"partial": (960, 576, ((0, 576), (576, 192), (768, 192)))}


@pytest.mark.parametrize("rank", [8, 32, 64])
@pytest.mark.parametrize("linear", FP8_LINEARS)
def test_a_product_with_an_adapter_has_the_bits_of_both(linear: str, rank: int) -> None:
    n, columns, parts = FP8_LINEARS[linear]
    w = weight(rank, columns, parts, n)
    base, x = quantize_weight(random(n, columns, 7, 0.02)), random(1000, columns, 3)
    u = portable.project_down_whole(x, w.down)
    product = fp8_matmul_hopper(quantize_rows(x), base, backend="cublas")
    whole = portable.project_up(product.clone(), u, w.up, w.columns)
    assert not torch.equal(whole, product)
    bad = []
    for rows in ROWS:
        if form_for(rows, n, w.shape.padded_rank) != "fused":
            continue
        a = quantize_rows(x[:rows])
        poison(whole[:rows])
        out, made = adapted_matmul(a, x[:rows], base, w)
        again, _ = quantized_adapted_matmul(x[:rows], base, w, "fp32")
        different = [int((y != whole[:rows]).sum()) for y in (out, again)]
        different.append(int((made != u[:rows]).sum()))
        if any(different):
            bad.append((rows, different))
    assert not bad, f"(rows, different elements): {bad}"
    assert rank > 64 or form_for(64, n, 16) == "fused"


@pytest.mark.parametrize("scales", ["fp32", "pow2"])
@pytest.mark.parametrize("width", [1536, 12288])
def test_swiglus_backward_in_one_pass_has_the_bits_of_three(width: int, scales: str) -> None:
    """SwiGLU's backward and forward and the quantization of the gradient, each with its bits."""
    for rows in ROWS:
        dy, gate_up = random(rows, width, rows), random(rows, 2 * width, rows)
        dx = swiglu_backward(dy, gate_up)
        expected = quantize_rows(dx, scales=scales)
        poison(dy, gate_up)
        codes, made = swiglu_backward_values_(dy, gate_up, scales)
        assert torch.equal(made, dx), rows
        assert torch.equal(dy, swiglu_forward(gate_up)), rows
        assert_same(codes, expected, str(rows))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("preset", ["unified", "jet"])
@pytest.mark.parametrize("batch", [3, 64])
def test_sampled_logprobs_are_the_trainers(preset: str, family: str, batch: int) -> None:
    p = adapted_policy(preset, family)
    prompts = random_prompts(p, 12, 80, seed=2)
    result = measure(
        p, prompts=prompts, samples=3, max_tokens=60, max_batch_size=batch, gradients=True
    )
    where = locate(p, *result.first_different) if result.first_different else None
    assert (result.different, where) == (0, None)
    assert result.tokens == 12 * 3 * 60


def test_some_layers_have_adapters_and_others_none() -> None:
    p = adapted_policy(targets=("q_proj", "down_proj"))
    assert measure(p, num_prompts=6, samples=2, max_tokens=40).different == 0
    assert failures(check_policy(p)) == []


@pytest.mark.parametrize(
    "preset, family",
    [("unified", "qwen3"), ("unified", "smollm2"), ("mixed", "qwen3"), ("bf16", "qwen3")],
)
def test_gradients_follow_the_reference(preset: str, family: str) -> None:
    ours, theirs = (adapted_policy(preset, family, device) for device in ("cuda", "cpu"))
    if family == "smollm2":
        assert_gradients_are_as_far(ours, theirs, adapted_policy("fp32", family, "cpu"))
    else:
        assert_gradients_are_near(ours, theirs, 0.25)


def test_updates_move_the_adapter_alone_and_graphs_read_it() -> None:
    p = adapted_policy()
    before = {name: t.clone() for name, t in p.weights.quantized_tensors().items()}
    engine, prompts = RolloutEngine(p), random_prompts(p, 5, 30, seed=3)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    assert count_different(p, prompts, engine.generate(prompts, params)) == 0
    settings = load_config(None, ["sft.lr=1e-2", "sft.steps=2"])
    trainer = SftTrainer(p, settings)
    examples = [Example(tuple(range(i, i + 20)), tuple(range(40, 90))) for i in range(8)]
    losses = [trainer.step(examples)["sft/loss"] for _ in range(4)]
    assert losses[-1] < losses[0]
    after = p.weights.quantized_tensors()
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all(".lora." in name for name in changed)
    assert count_different(p, prompts, engine.generate(prompts, params)) == 0
