"""The fused kernels of a decoder layer, compared with the memory traffic that they need.

    jetrl bench norm [--shape qwen3-8b] [--out FILE]

Decode kernels are also measured at its row counts, where inputs are cached and most of the time is
the launch. `share_of_copy` is relative to the bandwidth of a copy. On a CPU only operations with a
reference run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from benchmarks.harness import Row, add_tokens_argument
from benchmarks.operations import Operation
from benchmarks.shapes import SHAPES, linear_shapes
from benchmarks.timing import copy_bandwidth, seconds_per_call
from torch import Tensor

from jetrl.kernels.attention.layout import KeyValueCodes
from jetrl.kernels.backend import kernels_of
from jetrl.kernels.norm import rms_norm_ref
from jetrl.kernels.swiglu import swiglu
from jetrl.models.families import ModelConfig
from jetrl.precision.quantize import QTensor, quantize

EPS, DECODE_ROWS = 1e-6, (8, 64, 256)
_ROWS = 300  # of the comparison with references


@dataclass(frozen=True)
class Fused:
    """A fused kernel on inputs that together exceed the cache.

    Attributes:
        width: The columns of an input.
        row_bytes: The bytes that it must read and write per row.
        kernel: Its name in `kernels.backend.Kernels`.
        reference: The same codes in plain PyTorch; None: there is no such function.
    """

    name: str
    width: int
    row_bytes: int
    kernel: str
    inputs: Sequence[tuple[Any, ...]]
    reference: Callable[..., QTensor] | None = None
    in_decode: bool = False


def norm_reference(x: Tensor, weight: Tensor, eps: float, delta: Tensor) -> QTensor:
    """Return the codes of the norm of x + delta."""
    return quantize(rms_norm_ref(x + delta, weight, eps)[0], (1, 128))


def swiglu_reference(gate_up: Tensor) -> QTensor:
    """Return the codes of silu(gate) * up."""
    return quantize(swiglu(gate_up), (1, 128))


def fused_kernels(shape: str, tokens: int, device: str) -> list[Fused]:
    """Return the fused kernels of a layer with inputs of some rows."""
    config = ModelConfig.from_hf(SHAPES[shape])
    hidden, inner = linear_shapes(shape)["down"]
    heads, groups, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    width = (heads + 2 * groups) * head_dim

    def values(*sizes: int, sets: int = 3) -> list[Tensor]:
        return [torch.randn(tokens, *sizes, device=device).bfloat16() for _ in range(sets)]

    def ones(size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.ones(size, dtype=dtype, device=device)

    xs, deltas, qkvs = values(hidden), values(hidden), values(width)
    pairs = list(zip(xs, deltas, strict=True))
    gate_ups, dys = values(2 * inner, sets=2), values(inner, sets=2)
    weight, inverse = ones(hidden), ones(tokens, torch.float32)
    q, k = values(heads, head_dim, sets=1)[0], values(groups, head_dim, sets=1)[0]
    table = torch.randn(tokens, 2, head_dim // 2, device=device)
    positions = torch.arange(tokens, device=device) % min(tokens, 4096)
    norms = (ones(head_dim), ones(head_dim))

    def to_cache(kv: str) -> list[tuple[Any, ...]]:
        cache = KeyValueCodes.empty(tokens, groups, head_dim, kv, device)
        return [(x, positions, table, norms, EPS, heads, cache, None) for x in qkvs]

    written = heads * head_dim * 2 + 2 * groups * (head_dim + 4)
    moved = 2 * width * 2 + (heads + groups) * head_dim * 2
    return [
        Fused(
            "add, norm, quantize", hidden, 7 * hidden, "rms_norm_quantize",
            [(x, weight, EPS, delta) for x, delta in pairs], norm_reference, in_decode=True,
        ),
        Fused(
            "norm, quantize for WGrad", hidden, 3 * hidden, "rms_norm_squares",
            [(x, weight, inverse) for x in (*xs, *deltas)],
        ),
        Fused(
            "norm backward with residual", hidden, 8 * hidden, "rms_norm_backward",
            [(x, delta, weight, inverse, x) for x, delta in pairs],
        ),
        Fused(
            "swiglu, quantize", inner, 5 * inner, "swiglu_quantize",
            [(x,) for x in gate_ups], swiglu_reference, in_decode=True,
        ),
        Fused(
            "swiglu backward, quantize both, and y", inner, 11 * inner, "swiglu_backward_quantize",
            list(zip(dys, gate_ups, strict=True)),
        ),
        Fused(
            "qk norm, rotary, quantize kv", width, 2 * width + written, "qk_norm_rotary_cache",
            to_cache("fp8"), in_decode=True,
        ),
        Fused(
            "the same to int8", width, 2 * width + written, "qk_norm_rotary_cache",
            to_cache("int8"),
        ),
        Fused(
            "qk norm and rotary backward", width, moved, "qk_norm_rotary_backward",
            [(q, k, k, x, positions, table, norms, EPS) for x in qkvs],
        ),
    ]  # fmt: skip


_SHORT_BYTES = 2**26


def memory_row(name: str, shape: str, num_bytes: int, calls: Sequence[Callable[[], Any]]) -> Row:
    """Return the row of a memory-bound kernel.

    A graph repeats calls of a few microseconds, so that its own launch does not count.
    """
    seconds = seconds_per_call([*calls] * (12 if num_bytes < _SHORT_BYTES else 1))
    rate = num_bytes / seconds
    return {
        "name": name,
        "shape": shape,
        "microseconds": round(seconds * 1e6, 2),
        "terabytes_per_s": round(rate / 1e12, 3),
        "share_of_copy": round(rate / copy_bandwidth(), 3),
    }


def norm_rows(shape: str, args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of all kernels at --tokens, and of decode kernels at its row counts."""
    kernels = kernels_of(torch.empty(0, device=args.device))
    for rows in (args.tokens, *DECODE_ROWS):
        for one in fused_kernels(shape, rows, args.device):
            function = one.reference if kernels is None else getattr(kernels, one.kernel)
            if function is not None and (one.in_decode or rows == args.tokens):
                calls = [partial(function, *given) for given in one.inputs]
                yield memory_row(one.name, f"{rows} x {one.width}", rows * one.row_bytes, calls)


def _groups_apart(ours: QTensor, true: QTensor) -> int:
    """Count the bytes that differ, without the padding after the last token."""
    rows, blocks = true.codes.shape[0], true.scales.shape[0]
    pairs = ((ours.codes[:rows], true.codes), (ours.scales[:blocks], true.scales))
    both = ([x.contiguous().view(torch.uint8) for x in pair] for pair in pairs)
    return sum(int((a != b).sum()) for a, b in both)


def different(args: argparse.Namespace) -> int:
    """Compare fused norm and SwiGLU with the reference and its quantizer."""
    from jetrl.kernels import hopper

    x, delta, weight, gate_up = (
        torch.randn(*sizes, device="cuda").bfloat16()
        for sizes in ((_ROWS, 4096), (_ROWS, 4096), (4096,), (_ROWS, 2 * 4096))
    )
    wrong = _groups_apart(hopper.swiglu_quantize(gate_up), swiglu_reference(gate_up))
    true = norm_reference(x, weight, EPS, delta)
    for training in (False, True):
        rows = hopper.rms_norm_quantize(x, weight, EPS, delta, training)[2]
        wrong += _groups_apart(rows, true)
    return wrong


OPERATION = Operation(__doc__, norm_rows, add_tokens_argument, different)
