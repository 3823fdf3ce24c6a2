"""AdamW with compact states on the GPU: the bits of the reference, at any size."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from jetrl.kernels.adamw import adamw_, adamw_ref_
from jetrl.kernels.adamw_scalars import adamw_scalars
from jetrl.settings.sections import TrainSettings
from jetrl.training.optimizer import Optimizer

pytestmark = pytest.mark.gpu


def states(shape):
    return [torch.zeros(shape, dtype=torch.uint8), torch.zeros(shape, dtype=torch.int16)]


def same(a, b):
    assert torch.equal(a.cpu().view(torch.int32), b.cpu().view(torch.int32))


def assert_steps(master, steps: int, gradient_of, betas, lr, decay: float) -> None:
    """Compare steps of the kernel with the reference's, for gradients and their clips."""
    g = torch.Generator().manual_seed(1)
    tensors = [master, *states(master.shape)]
    ours = [t.cuda() for t in tensors]
    for step in range(1, steps + 1):
        scalars = adamw_scalars(step, lr, betas, 1e-8, decay)
        gradient, clip = gradient_of(g)
        adamw_ref_(tensors[0], gradient, *tensors[1:], clip, scalars)
        adamw_(ours[0], gradient.cuda(), *ours[1:], clip.cuda(), scalars)
        same(ours[0], tensors[0])
        for reference, tensor in zip(tensors[1:], ours[1:], strict=True):
            assert torch.equal(tensor.cpu(), reference)


@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.9, 0.999), (0.0, 0.9)], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (63, 1), (5, 7), (129, 129), (1000, 257)], ids=str)
def test_kernel_makes_the_bits_of_the_reference(shape, betas) -> None:
    """The gradients are large and small, and some are zero."""

    def gradient_of(g):
        gradient = torch.randn(shape, generator=g) * torch.exp(12 * torch.randn(shape, generator=g))
        gradient[torch.rand(shape, generator=g) < 0.2] = 0.0
        return gradient, torch.rand((), generator=g)

    master = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert_steps(master, 12, gradient_of, betas, lambda k: 1e-2 / (1 + k), 0.1)


@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-20, 16384.0, 1e18])
def test_gradients_at_the_ends_of_the_range(size: float) -> None:
    """Denormals are kept, and roots past the largest code saturate, as in the reference."""

    def gradient_of(g):
        return size * (2 * torch.rand((4, 1000), generator=g) - 1), torch.tensor(1.0)

    assert_steps(torch.zeros(4, 1000), 5, gradient_of, (0.9, 0.99), lambda k: 1.0, 0.0)


@pytest.mark.usefixtures("one_large_test_at_a_time")
def test_more_elements_than_an_int32_counts() -> None:
    """The dither of the elements from 2**31 on is that of element 0 on, half a turn further."""
    first, extra, width = 2**31, 5000, 1000
    rows = (first + extra) // width + 1
    gradient = torch.full((rows, width), 0.25, device="cuda")
    master = torch.zeros_like(gradient)
    ratio = torch.zeros_like(gradient, dtype=torch.uint8)
    root = torch.zeros_like(gradient, dtype=torch.int16)
    tail = torch.zeros(1, extra)
    tail_states = states((1, extra))
    one = torch.tensor(1.0)
    for step in range(1, 4):
        scalars = adamw_scalars(step, lambda k: 1e-3, (0.9, 0.99), 1e-8, 0.0)
        adamw_(master, gradient, ratio, root, one.cuda(), scalars)
        turned = scalars._replace(salt=(scalars.salt + 2**31) % 2**32)
        adamw_ref_(tail, torch.full((1, extra), 0.25), *tail_states, one, turned)
    same(master.view(-1)[first : first + extra], tail.view(-1))
    assert torch.equal(root.view(-1)[first : first + extra].cpu(), tail_states[1].view(-1))
    assert torch.equal(ratio.view(-1)[first : first + extra].cpu(), tail_states[0].view(-1))


def make(masters, device):
    parameters = {name: nn.Parameter(w.to(device, copy=True)) for name, w in masters.items()}
    keys = {"lr": 1e-3, "optimizer_states": "compact", "weight_decay": 0.1, "grad_clip": 1.0}
    return Optimizer(parameters, TrainSettings(**keys), 10)


def test_an_optimizer_moves_matrices_by_the_same_bits_and_resumes() -> None:
    """Norms and biases are torch's fused AdamW, whose bits are not the CPU's."""
    g = torch.Generator().manual_seed(2)
    masters = {"a.weight": torch.randn(300, 129, generator=g), "norm.weight": torch.ones(129)}
    cpu, gpu, resumed = make(masters, "cpu"), make(masters, "cuda"), make(masters, "cuda")
    for step in range(6):
        gradients = {name: torch.randn(w.shape, generator=g) for name, w in masters.items()}
        # The norm is the CPU's for both: its sum has another order on a GPU.
        norm = torch.nn.utils.get_total_norm(list(gradients.values()))
        for optimizer in (cpu, gpu, resumed) if step > 2 else (cpu, gpu):
            for name, p in optimizer.masters.items():
                p.grad = gradients[name].to(p.device, copy=True)
            optimizer.apply(norm.to(optimizer.masters["a.weight"].device))
        if step == 2:
            state = {name: t.cpu() for name, t in gpu.state_tensors().items()}
            resumed.load_state(state, gpu.num_updates)
            with torch.no_grad():
                for name, p in resumed.masters.items():
                    p.copy_(gpu.masters[name])
    same(gpu.masters["a.weight"], cpu.masters["a.weight"])
    for name, p in gpu.masters.items():
        same(resumed.masters[name], p)
    for name, tensor in gpu.state_tensors().items():
        assert torch.equal(tensor.cpu(), resumed.state_tensors()[name].cpu())
