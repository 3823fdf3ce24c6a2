"""The embedding that adds to its master's gradient itself: it runs on the CPU as well."""

import torch
from torch import nn

from jetrl.models.decoder import embed
from jetrl.precision import PrecisionPlan
from jetrl.precision.gradients import Gradients
from jetrl.precision.quantized_weight import QuantizedWeight

PLAN = PrecisionPlan.preset("bf16")


def embed_of(token_ids: torch.Tensor, master: nn.Parameter) -> torch.Tensor:
    """Return BF16 rows of a master weight."""
    weight = QuantizedWeight("embed", master, {"rollout": "bf16", "train": "bf16"}, PLAN)
    return embed(token_ids, weight, Gradients())


def test_rows_and_gradients_are_those_of_torch():
    g = torch.Generator().manual_seed(0)
    ours, theirs = (nn.Parameter(torch.randn(50, 8, generator=g)) for _ in "ab")
    theirs.data.copy_(ours.data)
    for _ in range(2):  # the second time there is a gradient to add to
        token_ids = torch.randint(0, 20, (64,), generator=g)
        upstream = torch.randn(64, 8, generator=g).bfloat16()
        rows = embed_of(token_ids, ours)
        expected = nn.functional.embedding(token_ids, theirs).bfloat16()
        assert torch.equal(rows, expected)
        rows.backward(upstream)
        expected.backward(upstream)
    assert ours.grad is not None
    # At most 2 * 64 terms of a token are added in another order: 128 roundings of 2**-24 each.
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=128 * 2**-24, atol=128 * 2**-24 * 8)


def test_a_frozen_master_gets_no_gradient():
    master = nn.Parameter(torch.randn(5, 8), requires_grad=False)
    assert not embed_of(torch.tensor([1, 2]), master).requires_grad


def test_uses_in_one_backward_add_up():
    master = nn.Parameter(torch.randn(5, 8))
    first, second = torch.tensor([1, 2]), torch.tensor([2, 3])
    (embed_of(first, master).sum() + embed_of(second, master).sum()).backward()
    assert master.grad is not None
    assert master.grad[:, 0].tolist() == [0, 1, 2, 1, 0]


def test_a_hook_sees_each_gradient():
    master = nn.Parameter(torch.randn(5, 8))
    seen: list[float] = []
    master.register_hook(lambda gradient: seen.append(float(gradient.sum())))
    for _ in range(2):
        embed_of(torch.tensor([1, 2]), master).sum().backward()
    assert seen == [16.0, 16.0]
    assert master.grad is not None
    assert master.grad[:, 0].tolist() == [0, 2, 2, 0, 0]
