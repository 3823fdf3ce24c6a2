r"""Speed of attention on one GPU: decode, training forward, prefill and backward.

    jetrl bench attention [--shape qwen3-8b] [--parts decode packed prefill torch] \
        [--kv fp8 int8 bf16 integer] [--out FILE]
    jetrl bench attention --kv int8 integer --parts decode packed torch  # portable kernels

Times are medians of repeated runs. Decode alternates between enough caches to exceed the L2 cache,
in a CUDA graph; its rate counts the bytes of keys, values and scales once. Other rates count the
FLOPs of causal attention (4 T^2 H D / 2 forward, 2.5 times that backward). The bits of decode and
training are compared first. `torch` measures torch's own BF16 kernels. `integer` is INT8 with the
portable kernels of that plan. A first run mostly compiles kernels, one after the other (about three
minutes per format of keys on an H200, then one minute); several processes with different --parts
fill the cache faster.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from benchmarks.harness import Row
from benchmarks.operations import Operation
from benchmarks.shapes import SHAPES
from benchmarks.timing import mark, milliseconds_between, seconds_per_call
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from jetrl.kernels.attention import backward, hopper
from jetrl.kernels.attention.layout import KeyValueCodes, QueryTiles
from jetrl.kernels.attention.reference import quantize_keys_and_values
from jetrl.kernels.portable import attention_backward as portable_backward
from jetrl.kernels.portable import attention_decode as portable_decode
from jetrl.kernels.portable import attention_forward as portable_forward
from jetrl.models.families import ModelConfig

DECODE = [(64, 8192), (64, 1024), (8, 8192), (256, 512), (1, 32768)]
FORWARD = [(1, 8192), (4, 4096), (8, 2048), (1, 32768)]
PREFILL = [(2048, 8192), (512, 32768)]
TORCH = [(1, 8192), (8, 2048)]
PARTS = ["decode", "packed", "prefill", "torch"]
INTEGER = "integer"
KV = ["fp8", "int8", "bf16"]
KV_CHOICES = [*KV, "int8+fp8", "fp8+int8", INTEGER]


@dataclass(frozen=True)
class Kernels:
    """Functions of one family of kernels, with the arguments of `attention.hopper`."""

    stage: Callable[[KeyValueCodes, QueryTiles], Any]
    forward: Callable[[Tensor, Any, QueryTiles], tuple[Tensor, Tensor]]
    backward: Callable[..., Any]
    prefill: Callable[[Tensor, KeyValueCodes, QueryTiles], Tensor]
    decode: Callable[[Tensor, KeyValueCodes, Tensor, Tensor, int], Tensor]


def decode_portably(
    q: Tensor, pages: KeyValueCodes, tables: Tensor, lengths: Tensor, longest: int
) -> Tensor:
    """Decode with the portable kernel."""
    split = portable_decode.SPLIT_KEYS
    return portable_decode.attend_decode(q, pages, tables, lengths, longest, split, None)


HOPPER = Kernels(
    stage=hopper.stage_keys,
    forward=hopper.attend_tiles,
    backward=backward.attention_backward,
    prefill=hopper.attend_prefill,
    decode=hopper.attend_decode,
)
PORTABLE = Kernels(
    stage=portable_forward.stage_keys,
    forward=portable_forward.attend_staged,
    backward=portable_backward.attention_backward,
    prefill=portable_forward.attend_prefill,
    decode=decode_portably,
)


def kernels_of(kv: str) -> Kernels:
    """Return the kernels of a format of keys and values."""
    return PORTABLE if kv == INTEGER else HOPPER


@dataclass(frozen=True)
class Heads:
    """The numbers of query heads and KV heads of a model, their size, and a device."""

    queries: int
    groups: int
    dim: int
    device: str = "cuda"

    def random(self, *shape: int) -> Tensor:
        """Return random heads [*shape, dim] in bfloat16."""
        return torch.randn(*shape, self.dim, device=self.device, dtype=torch.bfloat16)

    def random_queries(self, tokens: int) -> Tensor:
        """Return random queries [tokens, queries, dim]."""
        return self.random(tokens, self.queries)

    def random_codes(self, rows: tuple[int, ...], kv: str) -> KeyValueCodes:
        """Return random keys and values [*rows, groups, dim] with their scales."""
        k = self.random(*rows, self.groups)
        v = self.random(*rows, self.groups)
        stored = "int8" if kv == INTEGER else kv
        (k_codes, k_scales), (v_codes, v_scales) = quantize_keys_and_values(k, v, stored)
        return KeyValueCodes(k_codes, k_scales, v_codes, v_scales)


QWEN3_8B = Heads(32, 8, 128)


def milliseconds(f: Callable[[], Any]) -> float:
    """Return the median milliseconds of a call; without a GPU, those of one call."""
    if not torch.cuda.is_available():
        start = mark()
        f()
        return milliseconds_between(start, mark())
    return float(do_bench(f, warmup=20, rep=100, return_mode="median"))


def check_bits(kv: str, heads: Heads = QWEN3_8B, tokens: int = 5000) -> int:
    """Count elements that differ between decode and the training forward at 64 of the tokens."""
    kernels = kernels_of(kv)
    q = heads.random_queries(tokens)
    codes = heads.random_codes((tokens,), kv)
    tiles = QueryTiles.packed([0, tokens], heads.device)
    o = kernels.forward(q, kernels.stage(codes, tiles), tiles)[0]
    pages = -(-tokens // 64)

    def paged(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        out = x.new_zeros(pages * 64, *x.shape[1:])
        out[:tokens] = x
        return out.view(pages, 64, *x.shape[1:])

    cache = KeyValueCodes(*(paged(x) for x in (codes.k, codes.k_scales, codes.v, codes.v_scales)))  # type: ignore[arg-type]
    at = torch.randint(tokens, (64,), device=q.device)
    table = torch.arange(pages, dtype=torch.int32, device=q.device).expand(64, -1).contiguous()
    ours = kernels.decode(q[at].contiguous(), cache, table, (at + 1).int(), tokens)
    return int((ours.view(torch.int16) != o[at].view(torch.int16)).sum())


def bench_decode(heads: Heads, batch: int, length: int, kv: str) -> Row:
    """Return the row of decode."""
    pages = -(-length // 64)
    token_bytes = heads.groups * 2 * (2 * heads.dim if kv == "bf16" else heads.dim + 4)
    copies = 1
    if heads.device == "cuda":
        copies += int(3e8) // (batch * length * token_bytes)
    cache = heads.random_codes((batch * pages * copies, 64), kv)
    q = heads.random_queries(batch)
    order = torch.randperm(batch * pages * copies, device=q.device).int()
    tables = list(order.view(copies, batch, pages))
    lengths = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    decode = kernels_of(kv).decode
    seconds = seconds_per_call(
        [partial(decode, q, cache, each, lengths, length) for each in tables]
    )
    rate = batch * length * token_bytes / seconds / 1e12
    return {"sequences": batch, "tokens": length, "us": 1e6 * seconds, "tb_per_s": rate}


def bench_packed(heads: Heads, sequences: int, length: int, kv: str) -> Row:
    """Return the row of the training forward and backward."""
    tokens = sequences * length
    q, codes = heads.random_queries(tokens), heads.random_codes((tokens,), kv)
    do = torch.randn_like(q)
    tiles = QueryTiles.packed(range(0, tokens + 1, length), heads.device)
    kernels = kernels_of(kv)
    staged = kernels.stage(codes, tiles)
    o, lse = kernels.forward(q, staged, tiles)
    flops = 2 * sequences * length**2 * heads.queries * heads.dim
    stage = milliseconds(lambda: kernels.stage(codes, tiles))
    backward = milliseconds(lambda: kernels.backward(do, q, codes, o, lse, tiles))
    kernel = milliseconds(lambda: kernels.forward(q, staged, tiles))
    return {
        "sequences": sequences,
        "tokens": length,
        "head_dim": heads.dim,
        "stage_ms": stage,
        "forward_ms": kernel,
        "forward_tflops": flops / kernel / 1e9,
        "forward_with_staging_tflops": flops / (kernel + stage) / 1e9,
        "backward_ms": backward,
        "backward_tflops": 2.5 * flops / backward / 1e9,
    }


def bench_torch(heads: Heads, sequences: int, length: int, backend: SDPBackend) -> Row:
    """Return the row of one of torch's BF16 kernels."""
    q = heads.random_queries(sequences * length).unflatten(0, (sequences, length)).transpose(1, 2)
    q = q.contiguous().requires_grad_()
    k = torch.randn_like(q).requires_grad_()
    v = torch.randn_like(q).requires_grad_()
    do = torch.randn_like(q)
    flops = 2 * sequences * length**2 * heads.queries * heads.dim

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


def bench_prefill(heads: Heads, chunk: int, context: int, kv: str) -> Row:
    """Return the row of prefill."""
    pages = -(-context // 64)
    cache = heads.random_codes((pages, 64), kv)
    q = heads.random_queries(chunk)
    tiles = QueryTiles.paged([chunk], [context], [list(range(pages))], heads.device)
    prefill = kernels_of(kv).prefill
    ms = milliseconds(lambda: prefill(q, cache, tiles))
    flops = 4 * heads.queries * heads.dim * chunk * (context - chunk / 2)
    return {"chunk": chunk, "context": context, "ms": ms, "tflops": flops / ms / 1e9}


def different(args: argparse.Namespace) -> int:
    """Count elements that differ between decode and the training forward."""
    return sum(check_bits(kv) for kv in args.kv)


def attention_rows(shape: str, args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of the chosen parts, for each format of the KV cache."""
    config = ModelConfig.from_hf(SHAPES[shape])
    heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
    small = replace(heads, dim=64)
    packed = [*((heads, *case) for case in FORWARD), (small, 1, 8192)]
    for kv in args.kv:
        for case in DECODE if "decode" in args.parts else []:
            yield {"part": "decode", "kv": kv, **bench_decode(heads, *case, kv)}
        for own, sequences, length in packed if "packed" in args.parts else []:
            yield {"part": "packed", "kv": kv, **bench_packed(own, sequences, length, kv)}
        for case in PREFILL if "prefill" in args.parts else []:
            yield {"part": "prefill", "kv": kv, **bench_prefill(heads, *case, kv)}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        for case in TORCH if "torch" in args.parts else []:
            yield {"part": "torch", "kv": "bf16", **bench_torch(heads, *case, backend)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --parts and --kv."""
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="all unless named")
    parser.add_argument(
        "--kv", nargs="+", choices=KV_CHOICES, default=KV, help="formats of keys and values"
    )


OPERATION = Operation(__doc__, attention_rows, add_arguments, different, on_cpu=False)
