"""The `int8x2` head: bits against NumPy, errors against float64, and models that train with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.training import loss_numpy as bits
from tests.training.loss_numpy import F32
from tests.training.shared import config

from jetrl.errors import UserError
from jetrl.kernels.allowed_tokens import filtered_logits
from jetrl.models import planes_head
from jetrl.models.draft_head import DraftHead
from jetrl.models.model import check_device
from jetrl.models.planes_head import PlanesHead
from jetrl.models.policy import Policy
from jetrl.precision import int8_planes
from jetrl.precision.int8_planes import (
    add_planes_wgrad,
    planes,
    planes_dgrad,
    planes_fprop,
    planes_of_rows,
    rows_per_chunk,
)
from jetrl.precision.plan import PrecisionPlan, plan_table
from jetrl.precision.quantize import dequantize
from jetrl.session.parity import measure
from jetrl.types import TokenFilter

PLAN = PrecisionPlan.preset("int8").replace(lm_head="int8x2")


def random(*shape: int, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


def rotated(x: np.ndarray) -> np.ndarray:
    """Blocks of 64 along rows times the Hadamard matrix, by sums of pairs, over 8."""
    y = x.reshape(len(x), -1, 64)
    for _ in range(6):
        even, odd = y[..., ::2], y[..., 1::2]
        y = np.concatenate([even + odd, even - odd], -1)
    return y.reshape(x.shape) * F32(0.125)


def integers(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Integers of 15 bits and scales of rows."""
    a = np.maximum(np.abs(x).max(-1, keepdims=True), F32(2.0**-100))
    codes = np.rint(np.clip(x * (F32(32512) / a), F32(-32512), F32(32512)))
    return codes.astype(np.int64), a / F32(32512)


def split(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two planes, which must be INT8."""
    high = (codes + 128) >> 8
    low = codes - 256 * high
    assert np.abs(high).max() <= 127
    assert low.min() >= -128
    assert low.max() <= 127
    return high, low


def int32_sums(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    sums = a @ b
    assert np.abs(sums).max() < 2**31
    return sums


def two_products(codes: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """256 * high @ weight + low @ weight, rounded once to float32."""
    high, low = split(codes)
    return (256 * int32_sums(high, weight) + int32_sums(low, weight)).astype(np.float32)


def three_products(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """All products of the planes of [M, K] and [N, K] but low * low, rounded once to float32."""
    (a_high, a_low), (b_high, b_low) = split(a), split(b)
    middle = int32_sums(a_high, b_low.T) + int32_sums(a_low, b_high.T)
    assert np.abs(middle).max() < 2**31
    return (65536 * int32_sums(a_high, b_high.T) + 256 * middle).astype(np.float32)


def fprop(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    (codes, scales), (w_codes, w_scales) = integers(rotated(x)), integers(rotated(w))
    return three_products(codes, w_codes) * w_scales.T * scales


def dgrad(dy: np.ndarray, w: np.ndarray) -> np.ndarray:
    codes, w_scales = integers(rotated(w))
    weight, _ = split(codes)
    total = np.zeros((len(dy), weight.shape[1]), np.float32)
    for start in range(0, len(weight), 512):
        block = slice(start, start + 512)
        codes, scales = integers(dy[:, block] * (F32(256) * w_scales[block]).T)
        assert np.abs(int32_sums(codes, weight[block])).max() < 2**31
        total = total + two_products(codes, weight[block]) * scales
    return rotated(total)


def wgrad(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The product of one chunk."""
    x_codes, x_scales = integers(rotated(x))
    codes, scales = integers((dy * x_scales).T.copy())
    return rotated(three_products(codes, x_codes.T) * scales)


def equal_bits(found: torch.Tensor, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(found.detach().numpy().view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("rows, hidden, vocabulary", [(1, 64, 5), (37, 192, 1333), (65, 128, 512)])
def test_products_have_the_bits_of_the_definition(rows: int, hidden: int, vocabulary: int) -> None:
    x, master = random(rows, hidden).bfloat16(), random(vocabulary, hidden, seed=1)
    x[:, 3] *= 50  # an outlier channel
    values, w = x.float().numpy(), planes_of_rows(master)
    equal_bits(planes_fprop(planes_of_rows(x), w), fprop(values, master.numpy()))
    dy = random(rows, vocabulary, seed=2, spread=1e-6)
    dy[0] = 0
    dx = dgrad_as_bf16(dy, master)
    assert torch.equal(planes_dgrad(dy, w).view(torch.int16), dx.view(torch.int16))
    total = random(vocabulary, hidden, seed=3, spread=1e-6)
    expected = total.numpy() + wgrad(dy.numpy(), values)
    add_planes_wgrad(total, dy, planes_of_rows(x))
    equal_bits(total, expected)


def test_pieces_and_largest_codes_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    x, master = torch.full((3, 64), -7.5).bfloat16(), random(300, 64)
    dy, w = torch.full((3, 300), 2.0), planes_of_rows(master)
    whole = planes_fprop(planes_of_rows(x), w), planes_dgrad(dy, w), torch.zeros(300, 64)
    add_planes_wgrad(whole[2], dy, planes_of_rows(x))
    assert int(planes(dy).high.max()) == 127
    monkeypatch.setattr(int8_planes, "_TOKENS", 64)
    parts = planes_fprop(planes_of_rows(x), w), planes_dgrad(dy, w), torch.zeros(300, 64)
    add_planes_wgrad(parts[2], dy, planes_of_rows(x))
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    assert torch.equal(dgrad_as_bf16(dy, master), whole[1])
    again = planes_of_rows(master, planes_of_rows(torch.zeros(300, 64)))
    assert all(torch.equal(a, b) for a, b in zip(again.tensors(), w.tensors(), strict=True))


def dgrad_as_bf16(dy: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(dgrad(dy.numpy(), master.detach().numpy())).bfloat16()


def test_zero_tiny_and_not_finite_rows() -> None:
    x = torch.zeros(5, 64)
    x[1] = 2.0**-120
    x[2, 1], x[3, 1] = torch.inf, torch.nan
    x[4, 1] = 1e36
    w = planes_of_rows(random(7, 64))
    y = planes_fprop(planes(x), w)
    assert (y[0] == 0).all()
    assert (y[1] == 0).all()  # below 2**-100 / 65024, half of the smallest code
    assert y[2].isnan().all()
    assert y[3].isnan().all()
    assert y[4].isfinite().all()


def test_chunks_depend_on_the_vocabulary_only() -> None:
    sizes = [rows_per_chunk(v) for v in (11, 2048, 49152, 151936, 2**24)]
    assert sizes == [65536, 65536, 5440, 1728, 64]


def relative(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.double() - true).norm() / true.norm())


@pytest.mark.parametrize("outliers", [False, True])
def test_errors_of_gradients(outliers: bool) -> None:
    """FProp has the error of 15 bits, WGrad a smaller one than BF16's product, DGrad that of INT8.

    Rows of the weight share a vector, which the true dX does not have.
    """
    x, master = random(256, 256, spread=2.0).bfloat16(), random(8000, 256, seed=1, spread=0.05)
    common = random(256, seed=4, spread=0.05)
    master += common
    if outliers:
        x[:, 5] *= 30
        master[100:200] *= 8
    logits = x.float() @ master.T
    chosen = torch.multinomial(logits.softmax(-1), 1, generator=torch.Generator().manual_seed(2))
    dy = logits.softmax(-1).scatter_add(1, chosen, -torch.ones(256, 1)) * random(256, 1, seed=3)
    w = planes_of_rows(master)
    dw = torch.zeros(8000, 256)
    add_planes_wgrad(dw, dy, planes_of_rows(x))
    true = dy.double().mT @ x.double()
    of_bf16 = (dy.bfloat16().double().mT @ x.double()).float()
    assert relative(dw, true) < relative(of_bf16, true)
    # A row's largest value is at most 8 times its root mean square, as a value of a rotated block
    # of 64 is, so each operand's error is at most 8 / 32512 / sqrt(12); low * low adds as much.
    limit = 2 * 8 / 32512 / 12**0.5
    assert relative(planes_fprop(planes_of_rows(x), w), x.double() @ master.double().T) < limit
    dx = planes_dgrad(dy, w)
    # The high plane of W rounds by at most half of a step of INT8.
    assert relative(dx, dy.double() @ master.double()) < 0.015
    true = dy.double() @ dequantize(replace(w, low=w.low * 0)).double()
    assert relative(dx, true) < 2.0**-8
    along = (dx.double() - true) @ common.double() / common.norm()
    assert along.norm() < 2.0**-9 * true.norm()


def policy(tied: bool = True, seed: int = 0, **changes: Any) -> Policy:
    sizes = {"vocab_size": 75, "initializer_range": 0.1, "tie_word_embeddings": tied} | changes
    return Policy.from_config(config(**sizes), PLAN, seed=seed)


def test_sampler_and_trainer_agree_and_the_plan_says_what_it_is() -> None:
    made = policy(num_hidden_layers=2)
    assert PLAN.exact
    described = "15 bits in two INT8 planes, rotated, one scale per row; hidden rows too"
    assert ("lm_head, both sides", described) in plan_table(PLAN)
    assert measure(made, num_prompts=3, samples=2, max_tokens=12).different == 0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk", [64, 128])
@pytest.mark.parametrize("kept", [TokenFilter(), TokenFilter(0.9, 40, 0.05)], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_log_probs_and_gradients_of_a_policy(
    monkeypatch: pytest.MonkeyPatch, tied: bool, chunk: int, kept: TokenFilter, recompute: bool
) -> None:
    monkeypatch.setattr(int8_planes, "_CHUNK_LOGITS", 75 * chunk)
    made = policy(tied)
    head = made.decoder.lm_head
    assert isinstance(head, PlanesHead)
    hidden = random(150, 128, seed=4).bfloat16().requires_grad_()
    chosen = torch.arange(150) % 75
    logprobs, moments = made._head_logprobs(hidden, chosen, 0.7, kept, recompute)
    if not recompute:  # backward reads what forward kept
        monkeypatch.setattr(planes_head, "planes_fprop", None)
    g = random(150, seed=5)
    logprobs.backward(g)

    w = head.weight.detach().numpy()
    values, ids = hidden.detach().float().numpy(), chosen.numpy()
    logits = filtered_logits(torch.from_numpy(fprop(values, w)), chosen, 0.7, kept).numpy()
    assert np.isneginf(logits).any() != kept.keeps_all
    expected = bits.chosen_logprobs(logits, ids, 0.7)
    for found, other in zip((logprobs, *moments), expected, strict=True):
        equal_bits(found, other)
    dy = bits.logits_gradient(logits, ids, 0.7, g.numpy())
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, dgrad_as_bf16(torch.from_numpy(dy), head.weight))
    total = np.zeros((75, 128), np.float32)
    for start in range(0, 150, chunk):
        total = total + wgrad(dy[start : start + chunk], values[start : start + chunk])
    equal_bits(head.weight.grad, total)


def test_the_gradient_is_the_one_of_bf16_up_to_rounding() -> None:
    """A tied head and the embedding add to one gradient."""
    gradients = []
    for head in ("int8x2", "bf16"):  # linears with BF16 gradients add no noise of their own
        plan = PLAN.replace(lm_head=head, grad_output="bf16")
        sizes = {"vocab_size": 75, "initializer_range": 0.1}
        made = Policy.from_config(config(**sizes), plan)
        made.logprobs([list(range(2, 50)), [7, 7, 7, 70]])[0].mean().backward()
        gradients.append({n: m.grad for n, m in made.master_weights().items()})
    for name, gradient in gradients[0].items():
        assert gradient is not None, name
        assert relative(gradient, gradients[1][name].double()) < 0.03, name


def test_trace_sees_the_logits() -> None:
    made, seen = policy(), []
    made.decoder.trace = lambda name, value: seen.append((name, tuple(value.shape)))
    made.logprobs([[1, 2, 3]])
    assert seen[-1] == ("lm_head", (2, 75))


def test_the_draft_head_reads_the_values_of_the_integers() -> None:
    made = policy()
    rows = DraftHead(made, tokens=2, seed=0).rows
    assert relative(rows, made.decoder.lm_head.weight.detach().double()) < 2.0**-8


def test_what_does_not_have_it_says_so() -> None:
    shape = policy().config
    check_device(shape, PLAN, torch.device("cpu"))
    with pytest.raises(UserError, match=r"no kernels for INT8 in two planes; .*run\.device=cpu$"):
        check_device(shape, PLAN, torch.device("cuda"), elsewhere=True)
    for preset in ("unified", "bf16", "mixed"):
        with pytest.raises(UserError, match=r"lm_head = int8x2 needs INT8 .*preset = int8$"):
            PrecisionPlan.preset(preset).replace(lm_head="int8x2")
    bf16 = PLAN.replace(first_layers_bf16=1)
    with pytest.raises(UserError, match=r"multiple of 64, not 96; use precision\.preset=bf16$"):
        Policy.from_config(config(hidden_size=96, vocab_size=75), bf16)
