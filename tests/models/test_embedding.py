"""The embedding that adds to its master's gradient itself: it runs on the CPU as well."""

import pytest
import torch
from torch import nn

from jetrl.models.embedding_hopper import embed_hopper
from jetrl.precision.gradients import Gradients


def test_rows_and_gradients_are_those_of_torch():
    g = torch.Generator().manual_seed(0)
    ours, theirs = (nn.Parameter(torch.randn(50, 8, generator=g)) for _ in "ab")
    theirs.data.copy_(ours.data)
    for _ in range(2):  # the second time there is a gradient to add to
        token_ids = torch.randint(0, 20, (64,), generator=g)
        upstream = torch.randn(64, 8, generator=g).bfloat16()
        rows = embed_hopper(token_ids, ours, Gradients())
        expected = nn.functional.embedding(token_ids, theirs).bfloat16()
        assert torch.equal(rows, expected)
        rows.backward(upstream)
        expected.backward(upstream)
    assert ours.grad is not None
    # At most 2 * 64 terms of a token are added in another order: 128 roundings of 2**-24 each.
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=128 * 2**-24, atol=128 * 2**-24 * 8)


def test_a_frozen_master_gets_no_gradient():
    master = nn.Parameter(torch.randn(5, 8), requires_grad=False)
    assert not embed_hopper(torch.tensor([1, 2]), master, Gradients()).requires_grad


def test_uses_in_one_backward_share_one_gradient(monkeypatch: pytest.MonkeyPatch):
    """No second matrix of the vocabulary's size is ever alive, as with tied embeddings."""
    master = nn.Parameter(torch.randn(5, 8))
    made = []
    zeros_like = torch.zeros_like
    monkeypatch.setattr(torch, "zeros_like", lambda x: made.append(x.shape) or zeros_like(x))
    loss = (
        embed_hopper(torch.tensor([1, 2]), master, Gradients()).sum()
        + embed_hopper(torch.tensor([2, 3]), master, Gradients()).sum()
    )
    loss.backward()
    assert made == [master.shape]
    assert master.grad is not None
    assert master.grad[:, 0].tolist() == [0, 1, 2, 1, 0]


def test_a_hook_sees_each_gradient():
    master = nn.Parameter(torch.randn(5, 8))
    seen: list[float] = []
    master.register_hook(lambda gradient: seen.append(float(gradient.sum())))
    for _ in range(2):
        embed_hopper(torch.tensor([1, 2]), master, Gradients()).sum().backward()
    assert seen == [16.0, 16.0]
    assert master.grad is not None
    assert master.grad[:, 0].tolist() == [0, 2, 2, 0, 0]
