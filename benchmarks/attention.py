"""Speed of attention on one GPU: decode, training forward, prefill and backward.

    jetrl bench attention [--parts decode packed prefill torch] [--kv fp8 int8 bf16] [--out FILE]

Medians of repeated runs. Decode rotates among enough caches to exceed the L2, in a CUDA graph, and
counts the bytes of keys, values and scales once; the rest counts the floating-point operations of
causal attention (4 T^2 H D / 2 forward, 2.5 times that backward). The bits of decode and training
are compared first. torch's own kernels, BF16, stand beside ours. A first run mostly compiles, one
kernel after the other: parts started side by side fill the cache sooner.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import bench_parser, command_typed, write_results
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from jetrl.kernels.attention.backward import attention_backward
from jetrl.kernels.attention.hopper import (
    KeyValueCodes,
    QueryTiles,
    attend_decode,
    attend_prefill,
    attend_tiles,
    stage_keys,
)
from jetrl.kernels.attention.reference import quantize_keys_and_values

HEADS, GROUPS, HEAD_DIM = 32, 8, 128  # Qwen3-8B
DECODE = [(64, 8192), (8, 8192), (256, 512), (1, 32768)]
FORWARD = [(1, 8192), (4, 4096), (8, 2048), (1, 32768)]
PREFILL = [(2048, 8192), (512, 32768)]
PARTS = ["decode", "packed", "prefill", "torch"]
KV = ["fp8", "int8", "bf16"]
KV_CHOICES = [*KV, "int8+fp8", "fp8+int8"]


def milliseconds(f: Callable[[], Any]) -> float:
    """Return the median milliseconds of a call."""
    return float(do_bench(f, warmup=20, rep=100, return_mode="median"))


def random_codes(rows: tuple[int, ...], kv: str, head_dim: int = HEAD_DIM) -> KeyValueCodes:
    """Return random keys and values [*rows, GROUPS, head_dim] with their scales."""
    k, v = (
        torch.randn(*rows, GROUPS, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    (k_codes, k_scales), (v_codes, v_scales) = quantize_keys_and_values(k, v, kv)
    return KeyValueCodes(k_codes, k_scales, v_codes, v_scales)


def queries(tokens: int, head_dim: int = HEAD_DIM) -> Tensor:
    """Return random queries [tokens, HEADS, head_dim] in bfloat16."""
    return torch.randn(tokens, HEADS, head_dim, device="cuda", dtype=torch.bfloat16)


def check_bits(kv: str) -> int:
    """Count elements that differ between decode and the training forward, at 64 of 5000 tokens."""
    tokens = 5000
    q, codes = queries(tokens), random_codes((tokens,), kv)
    tiles = QueryTiles.packed([0, tokens], "cuda")
    o = attend_tiles(q, stage_keys(codes, tiles), tiles)[0]
    pages = -(-tokens // 64)

    def paged(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        out = x.new_zeros(pages * 64, *x.shape[1:])
        out[:tokens] = x
        return out.view(pages, 64, *x.shape[1:])

    cache = KeyValueCodes(*(paged(x) for x in (codes.k, codes.k_scales, codes.v, codes.v_scales)))  # type: ignore[arg-type]
    at = torch.randint(tokens, (64,), device="cuda")
    table = torch.arange(pages, dtype=torch.int32, device="cuda").expand(64, -1).contiguous()
    ours = attend_decode(q[at].contiguous(), cache, table, (at + 1).int(), tokens)
    return int((ours.view(torch.int16) != o[at].view(torch.int16)).sum())


def bench_decode(batch: int, length: int, kv: str) -> dict[str, Any]:
    """Return the row of decode."""
    pages = -(-length // 64)
    token_bytes = GROUPS * 2 * (2 * HEAD_DIM if kv == "bf16" else HEAD_DIM + 4)
    copies = 1 + int(3e8) // (batch * length * token_bytes)
    cache = random_codes((batch * pages * copies, 64), kv)
    order = torch.randperm(batch * pages * copies, device="cuda").int()
    tables = list(order.view(copies, batch, pages))
    q = queries(batch)
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")

    def step() -> None:
        for table in tables:
            attend_decode(q, cache, table, lengths, length)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    ms = milliseconds(graph.replay) / copies
    rate = batch * length * token_bytes / ms / 1e9
    return {"sequences": batch, "tokens": length, "us": 1e3 * ms, "tb_per_s": rate}


def bench_packed(sequences: int, length: int, kv: str, head_dim: int = HEAD_DIM) -> dict[str, Any]:
    """Return the row of the training forward and backward."""
    tokens = sequences * length
    q, codes = queries(tokens, head_dim), random_codes((tokens,), kv, head_dim)
    do = torch.randn_like(q)
    tiles = QueryTiles.packed(range(0, tokens + 1, length), "cuda")
    staged = stage_keys(codes, tiles)
    o, lse = attend_tiles(q, staged, tiles)
    flops = 2 * sequences * length**2 * HEADS * head_dim
    stage = milliseconds(lambda: stage_keys(codes, tiles))
    kernel = milliseconds(lambda: attend_tiles(q, staged, tiles))
    backward = milliseconds(lambda: attention_backward(do, q, codes, o, lse, tiles))
    return {
        "sequences": sequences,
        "tokens": length,
        "head_dim": head_dim,
        "stage_ms": stage,
        "forward_ms": kernel,
        "forward_tflops": flops / kernel / 1e9,
        "forward_with_staging_tflops": flops / (kernel + stage) / 1e9,
        "backward_ms": backward,
        "backward_tflops": 2.5 * flops / backward / 1e9,
    }


def bench_torch(sequences: int, length: int, backend: SDPBackend) -> dict[str, Any]:
    """Return the row of one of torch's own kernels, in BF16."""
    q = queries(sequences * length).view(sequences, length, HEADS, HEAD_DIM).transpose(1, 2)
    k, v = (
        torch.randn(
            sequences, HEADS, length, HEAD_DIM, device="cuda", dtype=torch.bfloat16
        ).requires_grad_()
        for _ in range(2)
    )
    q = q.contiguous().requires_grad_()
    do = torch.randn_like(q)
    flops = 2 * sequences * length**2 * HEADS * HEAD_DIM

    def forward() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    with sdpa_kernel([backend]):
        ahead = milliseconds(forward)
        o = forward()
        back = milliseconds(lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True))
    return {
        "backend": backend.name,
        "sequences": sequences,
        "tokens": length,
        "forward_tflops": flops / ahead / 1e9,
        "backward_tflops": 2.5 * flops / back / 1e9,
    }


def bench_prefill(chunk: int, context: int, kv: str) -> dict[str, Any]:
    """Return the row of prefill."""
    pages = -(-context // 64)
    cache = random_codes((pages, 64), kv)
    q = queries(chunk)
    tiles = QueryTiles.paged([chunk], [context], [list(range(pages))], "cuda")
    ms = milliseconds(lambda: attend_prefill(q, cache, tiles))
    flops = 4 * HEADS * HEAD_DIM * chunk * (context - chunk / 2)
    return {"chunk": chunk, "context": context, "ms": ms, "tflops": flops / ms / 1e9}


def copy_rate() -> float:
    """Return the terabytes read plus written a second by a copy of 2 GiB."""
    a = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() / milliseconds(lambda: b.copy_(a)) / 1e9


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print rows under a title."""
    print(title)
    for row in rows:
        print(
            "  "
            + "  ".join(
                f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
            )
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Run `jetrl bench attention`."""
    parser = bench_parser("attention", __doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="all unless named")
    parser.add_argument(
        "--kv", nargs="+", choices=KV_CHOICES, default=KV, help="formats of keys and values"
    )
    parser.add_argument("--out", type=Path, help="write the results here as well")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    results: dict[str, Any] = {
        "shape": {"heads": HEADS, "groups": GROUPS, "head_dim": HEAD_DIM},
        "copy_tb_per_s": copy_rate(),
        "elements_different": {kv: check_bits(kv) for kv in args.kv},
    }
    for kv in args.kv:
        if "decode" in args.parts:
            results[f"decode_{kv}"] = [bench_decode(b, n, kv) for b, n in DECODE]
        if "packed" in args.parts:
            results[f"packed_{kv}"] = [bench_packed(b, n, kv) for b, n in FORWARD]
            results[f"packed_{kv}"].append(bench_packed(1, 8192, kv, 64))
        if "prefill" in args.parts:
            results[f"prefill_{kv}"] = [bench_prefill(c, n, kv) for c, n in PREFILL]
    if "torch" in args.parts:
        results["torch_bf16"] = [
            bench_torch(1, 8192, b)
            for b in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
        ]
    print(json.dumps({k: v for k, v in results.items() if not isinstance(v, list)}))
    for key, rows in results.items():
        if isinstance(rows, list):
            show(key, rows)
    if args.out:
        command = command_typed("jetrl bench attention", argv)
        write_results(args.out, "attention", command, [], **results)


if __name__ == "__main__":
    main()
