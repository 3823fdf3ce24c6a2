"""The work after a backward pass: gradient norm, optimizer step, requantize, at a model's shape.

    jetrl bench optimizer [--shape qwen3-8b] [--out FILE]

Random weights and gradients under the `unified` plan. Bytes are the least that must move:

    gradient norm   4 a parameter
    optimizer step  18 with compact states (master and gradient read, 3 of moments read and written,
                    master written); 28 with fp32 ones, which take a pass of 8 for the clip as well
    requantize      4 a parameter that has quantized weights, and these

`share_of_copy` is of the rate of a device-to-device copy. Times are medians between CUDA events.
Compact states' bits are compared with the reference's first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.harness import Row, copy_bandwidth, seconds_eager
from benchmarks.operations import Operation
from benchmarks.parity import make_policy

from jetrl.kernels.adamw import adamw_, adamw_ref_, state_bytes
from jetrl.kernels.adamw_scalars import adamw_scalars
from jetrl.memory.out_of_memory import release
from jetrl.models.policy import Policy
from jetrl.precision.linear import Linear
from jetrl.precision.quantized_weight import operand_tensors
from jetrl.settings.sections import TrainSettings
from jetrl.training.optimizer import Optimizer

STATES = ("compact", "fp32")


def different(args: argparse.Namespace) -> int:
    """Count elements of weight and states in which kernel and reference differ after five steps."""
    g = torch.Generator().manual_seed(0)
    shape = (300, 257)
    types = (torch.float32, torch.uint8, torch.int16)
    here = [torch.zeros(shape, dtype=dtype) for dtype in types]
    there = [t.cuda() for t in here]
    clip = torch.tensor(0.7)
    for step in range(1, 6):
        scalars = adamw_scalars(step, lambda k: 1e-6, (0.9, 0.99), 1e-8, 0.01)
        gradient = torch.randn(shape, generator=g) * torch.exp(3 * torch.randn(shape, generator=g))
        adamw_ref_(here[0], gradient, here[1], here[2], clip, scalars)
        adamw_(there[0], gradient.cuda(), there[1], there[2], clip.cuda(), scalars)
    return sum(int((a != b.cpu()).sum()) for a, b in zip(here, there, strict=True))


def timed(name: str, num_bytes: int, function: Callable[[], Any]) -> Row:
    """Return the row of a function that moves bytes."""
    seconds = seconds_eager(function)
    rate = num_bytes / seconds
    return {
        "name": name,
        "milliseconds": round(1e3 * seconds, 2),
        "gigabytes": round(num_bytes / 1e9, 2),
        "terabytes_per_s": round(rate / 1e12, 3),
        "share_of_copy": round(rate / copy_bandwidth(), 3),
    }


def step_row(policy: Policy, gradients: dict[str, torch.Tensor], states: str) -> Row:
    """Return the row of the optimizer step, with the memory that its states take."""
    masters = policy.master_weights()
    settings = TrainSettings.model_validate({"lr": 1e-6, "optimizer_states": states})
    optimizer = Optimizer(masters, settings, total_updates=100)
    norm = torch.nn.utils.get_total_norm(list(gradients.values()))
    before = torch.cuda.memory_allocated()  # 0 without a GPU, as all that is counted here

    def step() -> None:
        for name, master in masters.items():
            master.grad = gradients[name]
        optimizer.apply(norm)

    step()
    held = torch.cuda.memory_allocated() - before
    clip_pass = 8 if states == "fp32" else 0
    moved = sum(
        (12 + clip_pass) * p.numel() + 2 * state_bytes(p.shape, states) for p in masters.values()
    )
    if policy.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    row = timed(f"optimizer step, {states} states", moved, step)
    temporary = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    parameters = sum(p.numel() for p in masters.values())
    return row | {
        "state_bytes_per_parameter": round(held / parameters, 3),
        "temporary_mib": round(temporary / 2**20, 1),
    }


def requantize_bytes(policy: Policy) -> int:
    """Return the bytes of quantized weights, and of the master weights that they come from."""
    total = 0
    for module in policy.decoder.modules():
        if isinstance(module, Linear):
            copy = module.operand("train")  # the same one for both sides under this plan
            total += sum(tensor.nbytes for tensor in operand_tensors(copy))
            total += 4 * module.weight.numel()
    return total


def optimizer_rows(shape: str, args: argparse.Namespace) -> list[Row]:
    """Return the rows; with FP32 states 16 bytes a parameter are held, beside quantized weights."""
    copy_bandwidth()  # while there is room for what it copies
    release()
    policy = make_policy(shape, "unified", args.device, args.layers)
    gradients = {name: 1e-5 * torch.randn_like(p) for name, p in policy.master_weights().items()}
    listed = list(gradients.values())
    num_bytes = sum(g.nbytes for g in listed)
    rows = [
        timed("gradient norm", num_bytes, lambda: torch.nn.utils.get_total_norm(listed)),
        timed("requantize", requantize_bytes(policy), policy.requantize),
    ]
    for states in STATES:
        release()
        rows.append(step_row(policy, gradients, states))
    return [{"shape": shape, **row} for row in rows]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --layers."""
    parser.add_argument("--layers", type=int, help="default: the shape's")


OPERATION = Operation(__doc__, optimizer_rows, add_arguments, different)
