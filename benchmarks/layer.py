"""A decoder layer, forward and backward: 8-bit plans against BF16, and the price of exactness.

    jetrl bench layer [--shape qwen3-8b] [--tokens 16384] [--length 4096] [--out FILE]

Rows: `bf16` (the fastest BF16 layer: plain GEMMs, torch's fastest attention, fused norms), `mixed`,
`jet`, `unified`, `int8` with variants, and `unified, fastest attention`: `unified` with the
attention of the `bf16` row, which is not exact. The difference of the last one from `unified` is
the price of exactness. Each row first compares bits with and without gradients. `--adapter-rank 32`
measures each row twice: with trained weights, and with adapters on frozen weights.

Times are medians over back-to-back passes, between CUDA events. Weights and activations exceed the
cache by far. FLOPs are 2 per multiply-add of the linears (forward, and twice that backward) and of
the causal half of attention (forward, and 2.5 times that backward).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections import defaultdict
from typing import Any

import torch
from benchmarks.harness import Row, add_adapter_argument, add_tokens_argument, print_table
from benchmarks.loads import multiplied
from benchmarks.operations import Operation
from benchmarks.policies import plan_of, random_source
from benchmarks.shapes import SHAPES
from benchmarks.timing import mark, milliseconds_between, watched
from torch import Tensor

from jetrl.kernels import hopper
from jetrl.kernels.attention import hopper as hopper_attention
from jetrl.models import dense_fused, layer_fused
from jetrl.models.adapter import Adapter, LoRA
from jetrl.models.attention import PackedKeyValues
from jetrl.models.decoder import DecoderLayer
from jetrl.models.families import ModelConfig
from jetrl.models.layer import Rotation
from jetrl.models.policy import Policy
from jetrl.precision import linear

ROWS = {  # name: (plan of the layer, plan of its attention)
    "bf16": ("bf16", "bf16"),
    "mixed": ("mixed", "mixed"),
    "jet": ("jet", "jet"),
    "unified": ("unified", "unified"),
    "int8": ("int8", "int8"),
    "int8, INT8 backward": ("int8 grad_output=int8", "int8"),
    "int8, saved codes": ("int8 saved=int8", "int8"),
    "int8, plain keys": ("int8 key_smoothing=false", "int8"),
    "int8, BF16 keys and values": ("int8 kv=bf16", "int8 kv=bf16"),
    "unified, fastest attention": ("unified", "bf16"),
}

WARM, REPEATS = 2, 10  # passes; on a CPU one is timed

# Modules and the operations that they call by name, for the time per operation.
OPERATIONS = {
    layer_fused: (
        "fprop", "dgrad", "wgrad", "quantize_output_gradient", "quantize_for_wgrad",
        "quantize_for_dgrad", "adapted_fprop", "adapter_gradients",
    ),
    dense_fused: (
        "fprop", "dgrad", "wgrad", "quantize_output_gradient", "quantize_for_wgrad",
        "quantize_for_dgrad", "adapter_gradients", "rank_gradient",
    ),
    hopper: (
        "rms_norm_quantize", "rms_norm_squares", "rms_norm_forward", "rms_norm_backward",
        "swiglu_quantize", "swiglu_quantize_with_values", "swiglu_forward", "swiglu_backward",
        "swiglu_backward_quantize", "swiglu_backward_values_",
        "qk_norm_rotary_cache", "qk_norm_rotary_backward",
        "attention_backward", "attend_equal_lengths", "attend_equal_lengths_backward",
    ),
    hopper_attention: ("stage_keys", "attend_tiles"),
    linear: (
        "fprop", "dgrad", "wgrad", "quantize_input", "quantize_output_gradient",
        "quantize_for_wgrad", "quantize_for_dgrad", "adapted_fprop", "adapter_gradients",
    ),
}  # fmt: skip


class LayerBench:
    """A decoder layer of a shape under a plan, with random inputs.

    Args:
        rank: The rank of adapters on frozen weights; 0: the weights are trained.
    """

    def __init__(
        self, shape: str, plan: str, attention: str, tokens: int, length: int, *, rank: int,
        device: str,
    ) -> None:  # fmt: skip
        config = {**SHAPES[shape], "num_hidden_layers": 1, "vocab_size": 256}
        beside = Adapter.new(ModelConfig.from_hf(config), LoRA(rank, 32.0), 0) if rank else None
        self.policy = Policy(random_source(config, device, beside), plan_of(plan), device)
        layer = self.policy.decoder.layers[0]
        assert isinstance(layer, DecoderLayer)
        self.layer, self.tokens, self.length, self.rank = layer, tokens, length, rank
        ends = torch.arange(0, tokens + 1, length, device=device)
        self.attention = plan_of(attention)
        self.kv = PackedKeyValues(ends, self.attention)
        self.positions = torch.arange(tokens, device=device) % length
        g = torch.Generator(device).manual_seed(0)
        self.x, self.delta, self.dx, self.ddelta = (
            torch.randn(tokens, self.policy.config.hidden_size, device=device, generator=g)
            .bfloat16()
            .requires_grad_(i < 2)
            for i in range(4)
        )

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the layer's outputs x and delta, [T, D] each."""
        decoder = self.policy.decoder
        exponents = None if decoder.exponents is None else decoder.exponents[0]
        rotation = Rotation(self.positions, decoder.rotary_table, exponents)
        out: tuple[Tensor, Tensor] = self.layer(
            self.x, self.delta, rotation, self.kv, "train", None
        )
        return out

    def backward(self, out: tuple[Tensor, Tensor]) -> None:
        """Run the backward pass from random gradients of the outputs."""
        torch.autograd.backward(out, (self.dx, self.ddelta))

    def clear(self) -> None:
        """Clear the gradients of inputs and weights."""
        for tensor in (self.x, self.delta, *self.policy.master_weights().values()):
            tensor.grad = None

    def flops(self) -> dict[str, float]:
        """Return the floating-point operations of forward and backward."""
        c = self.policy.config
        attention = 2 * self.tokens * self.length * c.num_heads * c.head_dim
        products = 2 * self.tokens * multiplied(c, c.layers[0])
        backward = products if self.policy.lora is not None else 2 * products
        return {"forward": products + attention, "backward": backward + 2.5 * attention}


def different_without_gradients(bench: LayerBench) -> int:
    """Count output elements that differ between a forward with and without gradients."""
    with_gradients = bench.forward()
    with torch.no_grad():
        without = bench.forward()
    return sum(int((a != b).sum()) for a, b in zip(with_gradients, without, strict=True))


def milliseconds(bench: LayerBench, accumulate: bool) -> tuple[float, float]:
    """Return the median milliseconds of forward and backward."""
    measured = []
    for _ in range(WARM + (REPEATS if torch.cuda.is_available() else 1)):
        if not accumulate:
            bench.clear()
        start = mark()
        out = bench.forward()
        middle = mark()
        bench.backward(out)
        measured.append((start, middle, mark()))
        del out
    bench.clear()
    forwards = [milliseconds_between(start, middle) for start, middle, _ in measured[WARM:]]
    backwards = [milliseconds_between(middle, end) for _, middle, end in measured[WARM:]]
    return statistics.median(forwards), statistics.median(backwards)


def shares(bench: LayerBench) -> dict[str, float]:
    """Return the milliseconds per pass of each operation; `other` is the rest of the layer."""
    functions = [
        (module, name, name, False) for module, names in OPERATIONS.items() for name in names
    ]
    totals: dict[str, float] = defaultdict(float)
    repeats = 5 if torch.cuda.is_available() else 1
    for _ in range(repeats):
        bench.clear()
        log: list[tuple[str, Any, Any]] = []
        if torch.cuda.is_available():
            torch.cuda._sleep(20_000_000)  # the host runs ahead, so that no launch is waited for
        start = mark()
        with watched(functions, log):
            bench.backward(bench.forward())
        totals["all"] += milliseconds_between(start, mark()) / repeats
        for name, a, b in log:
            totals[name] += milliseconds_between(a, b) / repeats
    named = sum(ms for name, ms in totals.items() if name != "all")
    totals["other"] = totals["all"] - named
    return {name: round(ms, 3) for name, ms in totals.items()}


def saved_mib(bench: LayerBench) -> float:
    """Return the MiB that a forward leaves for backward on a GPU."""
    before = torch.cuda.memory_allocated()
    _, delta = bench.forward()  # the next layer saves the sum of both outputs
    return round((torch.cuda.memory_allocated() - before - delta.nbytes) / 2**20, 1)


def measure(name: str, bench: LayerBench) -> Row:
    """Return a row of the benchmark."""
    different = different_without_gradients(bench)
    saved = saved_mib(bench) if torch.cuda.is_available() else None
    forward, backward = milliseconds(bench, accumulate=False)
    accumulating = milliseconds(bench, accumulate=True)[1]
    flops = bench.flops()
    return {
        "name": f"{name}, adapters of rank {bench.rank}" if bench.rank else name,
        "forward_ms": round(forward, 3),
        "backward_ms": round(backward, 3),
        "total_ms": round(forward + backward, 3),
        "backward_accumulating_ms": round(accumulating, 3),
        "teraflops": round(sum(flops.values()) / (forward + backward) / 1e9),
        "bits_different": different,
        "saved_mib": saved,
        "operations_ms": shares(bench),
    }


def layer_rows(shape: str, args: argparse.Namespace) -> list[Row]:
    """Return the rows, with ratios to `bf16` and to `unified, fastest attention`."""
    rows, rank = [], args.adapter_rank
    for name, with_rank in itertools.product(args.row or ROWS, (0, rank) if rank else (0,)):
        bench = LayerBench(
            shape, *ROWS[name], args.tokens, args.length, rank=with_rank, device=args.device
        )
        rows.append(measure(name, bench))
        print(f"{rows[-1]['name']}: {rows[-1]['total_ms']} ms", flush=True)
    times = {row["name"]: row["total_ms"] for row in rows}
    for row in rows:
        if "bf16" in times:
            row["times_bf16"] = round(times["bf16"] / row["total_ms"], 3)
        if "unified, fastest attention" in times:
            price = row["total_ms"] / times["unified, fastest attention"] - 1
            row["above_fastest_attention"] = round(price, 4)
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --tokens, --length, --row and --adapter-rank."""
    add_tokens_argument(parser)
    parser.add_argument("--length", type=int, default=4096, help="tokens per sequence")
    parser.add_argument("--row", action="append", choices=ROWS, help="repeatable; default: all")
    add_adapter_argument(parser)


def show(rows: list[Row]) -> None:
    """Print the rows, and the time per operation."""
    tables = {row["name"]: row["operations_ms"] for row in rows}
    print_table([{k: v for k, v in row.items() if k != "operations_ms"} for row in rows])
    print("\nmilliseconds per operation")
    operations = sorted({operation for table in tables.values() for operation in table})
    print_table(
        [
            {"operation": operation} | {n: table.get(operation, "") for n, table in tables.items()}
            for operation in operations
        ]
    )


OPERATION = Operation(__doc__, layer_rows, add_arguments, show=show)
