"""Fused norm, SwiGLU and rotary kernels against the copy bandwidth, at Qwen3-8B's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from benchmarks._bits import fused
from benchmarks._timing import Row, memory_row, report

from jetrl.kernels.norm_hopper import rms_norm_backward, rms_norm_quantize, rms_norm_squares
from jetrl.kernels.rotary_backward_hopper import qk_norm_rotary_backward
from jetrl.kernels.rotary_hopper import dense_cache, qk_norm_rotary_cache
from jetrl.kernels.swiglu_backward_hopper import swiglu_backward_quantize
from jetrl.kernels.swiglu_hopper import swiglu_quantize

HIDDEN, INTERMEDIATE, HEADS, GROUPS, HEAD_DIM, EPS = 4096, 12288, 32, 8, 128, 1e-6


def _random(*shape: int, sets: int = 3) -> list[torch.Tensor]:
    return [torch.randn(*shape, device="cuda").bfloat16() for _ in range(sets)]


def _norm_rows(tokens: int) -> list[Row]:
    size, shape = tokens * HIDDEN, f"{tokens} x {HIDDEN}"
    xs, deltas = _random(tokens, HIDDEN), _random(tokens, HIDDEN)
    weight = torch.ones(HIDDEN, device="cuda").bfloat16()
    inverse = torch.ones(tokens, device="cuda")
    forward = [
        partial(rms_norm_quantize, x, weight, EPS, d) for x, d in zip(xs, deltas, strict=True)
    ]
    again = [partial(rms_norm_squares, x, weight, inverse) for x in (*xs, *deltas)]
    backward = [
        partial(rms_norm_backward, x, d, weight, inverse, x)
        for x, d in zip(xs, deltas, strict=True)
    ]
    return [
        memory_row("add, norm, quantize", shape, 7 * size, forward),
        memory_row("norm, quantize for WGrad", shape, 3 * size, again),
        memory_row("norm backward with residual", shape, 8 * size, backward),
    ]


def _swiglu_rows(tokens: int) -> list[Row]:
    size, shape = tokens * INTERMEDIATE, f"{tokens} x {INTERMEDIATE}"
    xs, dys = _random(tokens, 2 * INTERMEDIATE, sets=2), _random(tokens, INTERMEDIATE, sets=2)
    return [
        memory_row("swiglu, quantize", shape, 5 * size, [partial(swiglu_quantize, x) for x in xs]),
        memory_row(
            "swiglu backward, quantize both, and y",
            shape,
            11 * size,
            [partial(swiglu_backward_quantize, dy, x) for dy, x in zip(dys, xs, strict=True)],
        ),
    ]


def _rotary_rows(tokens: int) -> list[Row]:
    width = (HEADS + 2 * GROUPS) * HEAD_DIM
    shape = f"{tokens} x {width}"
    xs = _random(tokens, width)
    table = torch.randn(tokens, 2, HEAD_DIM // 2, device="cuda")
    positions = torch.arange(tokens, device="cuda") % 4096
    weights = (torch.ones(HEAD_DIM, device="cuda").bfloat16(),) * 2
    caches = (dense_cache(tokens, GROUPS, HEAD_DIM, kv, "cuda") for kv in ("fp8", "int8"))
    forward, to_int8 = (
        [
            partial(qk_norm_rotary_cache, x, positions, table, weights, EPS, HEADS, cache, None)
            for x in xs
        ]
        for cache in caches
    )
    q, k = _random(tokens, HEADS, HEAD_DIM, sets=1)[0], _random(tokens, GROUPS, HEAD_DIM, sets=1)[0]
    backward = [
        partial(qk_norm_rotary_backward, q, k, k, x, positions, table, weights, EPS) for x in xs
    ]
    written = HEADS * HEAD_DIM * 2 + 2 * GROUPS * (HEAD_DIM + 4)
    moved = 2 * width * 2 + (HEADS + GROUPS) * HEAD_DIM * 2
    return [
        memory_row("qk norm, rotary, quantize kv", shape, tokens * (2 * width + written), forward),
        memory_row("the same to int8", shape, tokens * (2 * width + written), to_int8),
        memory_row("qk norm and rotary backward", shape, tokens * moved, backward),
    ]


def _decode_rows(tokens: int) -> list[Row]:
    return [_norm_rows(tokens)[0], _swiglu_rows(tokens)[0], _rotary_rows(tokens)[0]]


def run(tokens: int = 16384, decode_rows: tuple[int, ...] = (8, 64, 256)) -> list[Row]:
    """Return rows for every fused kernel of a decoder layer.

    Kernels that run in decode are also measured at its sizes, where inputs come from the cache and
    most of the measured time is the launch.
    """
    few = [row for n in decode_rows for row in _decode_rows(n)]
    return [*_norm_rows(tokens), *_swiglu_rows(tokens), *_rotary_rows(tokens), *few]


def main(argv: Sequence[str] | None = None) -> None:
    """Run `jetrl bench norm`."""
    report("norm", run, argv, fused)


if __name__ == "__main__":
    main()
