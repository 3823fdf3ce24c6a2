"""Linear layers with adapters for the GPU tests, and what they multiply."""

from __future__ import annotations

import torch

from jetrl.precision.adapter import AdapterShape, AdapterWeight

# (N, K) and the parts of the linears of Qwen3-8B, and of a layer with a part without an adapter
LINEARS = {
    "qkv": (6144, 4096, ((0, 4096), (4096, 1024), (5120, 1024))),
    "o": (4096, 4096, ((0, 4096),)),
    "gate_up": (24576, 4096, ((0, 12288), (12288, 12288))),
    "down": (4096, 12288, ((0, 4096),)),
    "odd": (1152, 896, ((0, 512), (640, 128))),
}


def poison(*like: torch.Tensor) -> None:
    """Fill memory with NaN, where the allocator then puts tensors of the same sizes."""
    held = [torch.full_like(tensor, float("nan")) for tensor in like]
    del held


def activations_of(rows: int, columns: int) -> torch.Tensor:
    g = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, columns, device="cuda", generator=g)
    return (x * (1 + 9 * (torch.rand(rows, 1, device="cuda", generator=g) > 0.9))).bfloat16()


def weight(rank: int, columns: int, parts: tuple[tuple[int, int], ...], rows: int) -> AdapterWeight:
    shape = AdapterShape(rank, 0.7, rows, columns, parts)
    g = torch.Generator("cuda").manual_seed(rank)
    a, b = (
        torch.nn.Parameter(torch.randn(size, device="cuda", generator=g) / 8)
        for size in (shape.a_shape, shape.b_shape)
    )
    return AdapterWeight("layers.0.qkv", a, b, shape, torch.bfloat16)
