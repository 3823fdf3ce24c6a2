"""Compile the kernels of the plan `integer` for an NVIDIA GPU that is not there, and check them.

    python tests/kernels/portable_matrix.py CAPABILITY OUT.json [CASE ...]

Each case calls host wrappers with tensors of torch's `meta` device, which stand for a GPU's as in
compile_kernels.py. So a kernel is compiled with the arguments that it has in a run, and Triton's
driver launches nothing. The rules are in portable_rules.py.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compile_kernels
import torch
import triton
from compile_kernels import META, compile_only, empty, name_of, sources_for_meta
from portable_rules import CARDS, Card, instructions, problems_of, resources, tensor_cores
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel

Rules = Callable[[str, CompiledKernel, Card], list[str]]


class Compiler:
    """Compiles for one card what the wrappers launch, and records each kernel."""

    def __init__(self, capability: int, rules: Rules = problems_of) -> None:
        self.capability, self.card, self.rules = capability, CARDS[capability], rules
        self.kernels: list[dict[str, Any]] = []
        self.case = ""

    def install(self) -> None:
        """Replace Triton's driver and compilation, and what wrappers ask torch about a GPU."""
        target = GPUTarget("cuda", self.capability, 32)
        stand_in = type("Stand", (compile_kernels.Driver,), {})
        stand_in.get_current_target = staticmethod(lambda: target)
        compile_only(stand_in, self.record, self.fail)
        major, minor = divmod(self.capability, 10)
        properties = SimpleNamespace(
            name=self.card.name,
            major=major,
            minor=minor,
            multi_processor_count=self.card.multiprocessors,
            shared_memory_per_block_optin=self.card.shared,
        )
        torch.cuda.is_available = lambda: True
        torch.cuda.current_device = lambda: 0
        torch.cuda.is_current_stream_capturing = lambda: False
        torch.cuda.get_device_properties = lambda _=None: properties
        torch.cuda.get_device_capability = lambda _=None: (major, minor)
        torch.cuda.get_device_name = lambda _=None: self.card.name
        torch.Tensor.pin_memory = lambda tensor, *_: tensor

    def record(self, function: Any, kernel: Any, _: Any) -> None:
        name = name_of(function)
        ptx = instructions(kernel.asm["ptx"])
        registers, stack = resources(kernel.asm["cubin"])
        self.kernels.append(
            {
                "case": self.case,
                "kernel": name,
                "registers": registers,
                "spilled": stack,
                "shared": kernel.metadata.shared,
                "warps": kernel.metadata.num_warps,
                "products": {one: ptx[one] for one in sorted(tensor_cores(ptx))},
                "problems": self.rules(name, kernel, self.card),
            }
        )

    def run(self, case: str, work: Callable[[], None]) -> None:
        self.case = case
        try:
            work()
        except Exception:  # the others are compiled too
            self.fail(None, traceback.format_exc()[-2000:])

    def fail(self, function: Any, why: str) -> None:
        name = name_of(function) if function else ""
        self.kernels.append({"case": self.case, "kernel": name, "problems": [why]})


ROWS, FEW, HIDDEN, HEADS, GROUPS, HEAD = 4096, 8, 4096, 32, 8, 128
VOCABULARY = 151_936


def ints(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int32)


def longs(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int64)


def floats(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.float32)


def norms() -> None:
    from jetrl.kernels.norm_triton import rms_norm_forward, rms_norm_quantize
    from jetrl.kernels.portable.norm import block_squares, rms_norm_backward
    from jetrl.precision.triton.row_sums import sum_of_rows

    for rows in (FEW, ROWS):
        x, weight = empty(rows, HIDDEN), empty(HIDDEN)
        rms_norm_forward(x, weight, 1e-6, x)
        rms_norm_quantize(x, weight, 1e-6, x, for_training=True, scales=None)
        rms_norm_backward(x, x, weight, floats(rows), x)
    sum_of_rows(empty(ROWS, HIDDEN))
    for rows, columns in ((ROWS, HIDDEN), (1, 777)):
        block_squares(floats(rows, columns))


def int8_codes() -> None:
    from jetrl.precision.quantize import empty_int8_rows
    from jetrl.precision.triton.int8 import int8_rows, int8_tokens, int8_turned

    int8_rows(empty(ROWS, HIDDEN))
    int8_rows(floats(ROWS, HIDDEN))
    for tokens in (ROWS, 16 * ROWS):  # in one pass, in two
        int8_tokens(empty(tokens, HIDDEN))
    int8_turned(empty_int8_rows(HIDDEN, HIDDEN, META))


def rotary() -> None:
    from jetrl.kernels.attention.layout import KeyValueCodes
    from jetrl.kernels.portable.rotary import qk_norm_rotary_backward
    from jetrl.kernels.rotary_triton import qk_norm_rotary_cache

    table, exponents = floats(2048, 2, HEAD // 2), empty(HEADS + GROUPS, HEAD // 2).to(torch.int8)
    for tokens in (FEW, ROWS):
        qkv = empty(tokens, (HEADS + 2 * GROUPS) * HEAD)
        cache = KeyValueCodes.empty(tokens, GROUPS, HEAD, "int8", META)
        work = (cache, longs(tokens), "fp32", exponents)
        weights = (empty(HEAD), empty(HEAD))
        qk_norm_rotary_cache(qkv, longs(tokens), table, weights, 1e-6, HEADS, *work)
        grads = [empty(tokens, heads, HEAD) for heads in (HEADS, GROUPS, GROUPS)]
        for norm_weights, factors in ((weights, exponents), (None, None)):
            given = (qkv, longs(tokens), table, norm_weights, 1e-6, factors)
            qk_norm_rotary_backward(*grads, *given)


def swiglu() -> None:
    from jetrl.kernels.portable.swiglu import swiglu_backward, swiglu_quantize

    gate_up, dy = empty(ROWS, 2 * HIDDEN), empty(ROWS, HIDDEN)
    swiglu_quantize(gate_up, None)
    for y in (None, dy):
        swiglu_backward(dy, gate_up, y)


def decode_state() -> None:
    from jetrl.kernels.decode_state import DecodeState, DraftText, Drawn, Verified
    from jetrl.kernels.decode_triton import (
        next_inputs,
        propose,
        take_draws,
        take_verified,
        verify_inputs,
    )

    state = DecodeState.empty(513, 256, META)
    text = DraftText.empty(513, 16384, 2**12, 2**12, META)
    rows, count, width, size = longs(64), 64, 8, 256
    draws = (longs(count), floats(count), floats(count))
    next_inputs(state, rows, 64)
    take_draws(state, rows, *draws, Drawn(ints(16, 512), floats(16, 512), ints(1)))
    drafts = propose(text, state, rows)
    inputs = verify_inputs(state, text, drafts, rows, 64, width, size)
    out = Verified(ints(16, 2048), floats(16, 2048), ints(16, 512), ints(1))
    draws = (inputs.token_ids, floats(size), floats(size))
    take_verified(state, text, drafts, inputs, rows, *draws, out, width)


def optimizer() -> None:
    from jetrl.kernels.adamw_scalars import adamw_scalars
    from jetrl.kernels.portable.adamw import adamw_
    from jetrl.precision.triton.add import add_products
    from jetrl.precision.triton.quantize import dithered_bf16

    master = floats(512, 512)
    states = (empty(512, 512, dtype=torch.uint8), empty(512, 512, dtype=torch.int16))
    scalars = adamw_scalars(1, lambda _: 0.1, (0.9, 0.95), 1e-8, 0.1)
    for ratio, root in (states, (master, master)):
        adamw_(master, master, ratio, root, floats(), scalars)
    add_products(floats(3, 512, 512), master)
    dithered_bf16(master, "w")


def backward_rows() -> None:
    """Backward of norms and rotary, and the squares of gradients."""
    from jetrl.kernels.portable.norm import block_squares, rms_norm_backward
    from jetrl.kernels.portable.rotary import qk_norm_rotary_backward
    from jetrl.precision.triton.row_sums import sum_of_rows

    x = empty(ROWS, HIDDEN)
    rms_norm_backward(x, x, empty(HIDDEN), floats(ROWS), x)
    sum_of_rows(x)
    block_squares(floats(ROWS, HIDDEN))
    q, k, qkv = (empty(ROWS, heads, HEAD) for heads in (HEADS, GROUPS, HEADS + 2 * GROUPS))
    table, exponents = floats(2048, 2, HEAD // 2), empty(HEADS + GROUPS, HEAD // 2).to(torch.int8)
    norms = (empty(HEAD), empty(HEAD))
    work = (longs(ROWS), table, norms, 1e-6, exponents)
    qk_norm_rotary_backward(q, k, k, qkv.flatten(1), *work)


def logprobs_and_samples() -> None:
    from jetrl.kernels.portable.logprob import exact_logits_gradient, exact_logprobs
    from jetrl.kernels.portable.sampling import exclude_tokens, sample

    logits, temperature = floats(64, VOCABULARY), floats(64, 1)
    exact_logprobs(logits, longs(64), temperature)
    exact_logits_gradient(logits, longs(64), temperature, floats(2, 64), floats(64))
    for rows in (FEW, 512):
        one = floats(rows)
        sample(floats(rows, VOCABULARY), longs(rows), one)
        exclude_tokens(floats(rows, VOCABULARY), one, one, longs(rows), one, longs(rows))


def attention_forward() -> None:
    """Training and prefill."""
    from jetrl.kernels.attention.layout import KeyValueCodes, QueryTiles
    from jetrl.kernels.portable.attention_forward import attend_batch, attend_prefill

    codes = KeyValueCodes.empty(ROWS, GROUPS, HEAD, "int8", META)
    tiles = QueryTiles.packed([0, 256, ROWS - 300, ROWS], META, [-1, 0, -1])
    q = empty(ROWS, HEADS, HEAD)
    attend_batch(q, codes, tiles)
    attend_prefill(q[:100], pages_of(40), QueryTiles.paged([100], [2048], [range(32)], META))


def attention_backward() -> None:
    from jetrl.kernels.attention.layout import KeyValueCodes, QueryTiles
    from jetrl.kernels.portable.attention_backward import attention_backward

    codes = KeyValueCodes.empty(ROWS, GROUPS, HEAD, "int8", META)
    tiles = QueryTiles.packed([0, 256, ROWS - 300, ROWS], META, [-1, 0, -1])
    q = empty(ROWS, HEADS, HEAD)
    attention_backward(q, q, codes, q, floats(2, ROWS, HEADS), tiles)


def attention_decode() -> None:
    from jetrl.kernels.attention.layout import SequenceQueries
    from jetrl.kernels.portable.attention_decode import attend_decode

    work = (pages_of(100), ints(64, 32), ints(64), 2048, 1024)
    attend_decode(empty(64, HEADS, HEAD), *work, None)
    several = SequenceQueries(ints(64), ints(64), ints(256), 4)
    attend_decode(empty(256, HEADS, HEAD), *work, several)


def pages_of(count: int) -> Any:
    from jetrl.kernels.attention.layout import KeyValueCodes

    codes, scales = empty(count, 64, GROUPS, HEAD, dtype=torch.int8), floats(count, 64, GROUPS)
    return KeyValueCodes(codes, scales, codes, scales)


def products() -> None:
    from jetrl.precision.quantize import empty_int8_rows
    from jetrl.precision.triton.portable_int8 import int8_matmul

    for k, sizes in ((HIDDEN, (1, 64, ROWS)), (576, (ROWS,))):
        weight = empty_int8_rows(1152, k, META)
        for rows in sizes:
            int8_matmul(empty_int8_rows(rows, k, META), weight)


def experts() -> None:
    """The rows of experts at Qwen3-30B-A3B's shape, also a width that is an odd number of 64."""
    from jetrl.precision.groups import Groups
    from jetrl.precision.quantize import empty_int8_rows
    from jetrl.precision.triton.expert_rows import combine, combine_backward, group_rows, sum_slots
    from jetrl.precision.triton.grouped_int8 import add_int8_grouped_wgrad, int8_grouped_matmul
    from jetrl.precision.triton.int8 import int8_turned

    count, slots = 128, 8
    for k, all_tokens in ((2880, (ROWS,)), (2048, (64, 320, 640, 2048, ROWS))):
        weight = empty_int8_rows(count * 1536, k, META)
        for tokens in all_tokens:  # one for each size of tiles
            groups = Groups(ints(tokens * slots), ints(count), ints(tokens, slots))
            int8_grouped_matmul(empty_int8_rows(tokens, k, META), weight, groups, by_token=True)
    int8_grouped_matmul(empty_int8_rows(ROWS * slots, k, META), weight, groups, by_token=False)
    group_rows(longs(ROWS, slots), count)
    int8_turned(weight, count)
    x, dy = empty(ROWS, 2048), empty(ROWS * slots, 1536)
    for total, begun in ((floats(count * 1536, 2048), True), (empty(count * 1536, 2048), False)):
        add_int8_grouped_wgrad(total, begun, dy, x, groups, by_token=True)
    y, weights = empty(ROWS * slots, 2048), floats(ROWS, slots)
    combine(y, weights, groups)
    combine_backward(x, y, weights, groups)
    sum_slots(y, groups)


def routing() -> None:
    from jetrl.kernels.portable.routing import route, route_backward
    from jetrl.kernels.routing_rule import RoutingRule

    sigmoid = RoutingRule(8, "sigmoid", floor=1e-20, scale=2.5)
    for logits, bias, rule in (
        (empty(ROWS, 128), None, RoutingRule(8)),
        (floats(ROWS, 60), floats(60), sigmoid),
        (empty(ROWS, 512), None, RoutingRule(10, normalized=False)),
    ):
        chosen, weights, scores = route(logits, rule, bias)
        route_backward(weights, scores, chosen, rule, logits.dtype)


def planes_head() -> None:
    from jetrl.precision.quantize import Planes
    from jetrl.precision.triton.int8_planes import (
        add_planes_wgrad,
        planes_dgrad,
        planes_fprop,
        planes_of_rows,
    )

    vocabulary, width = VOCABULARY, 1024
    weight, x = Planes.empty(vocabulary, width, META), empty(1728, width)
    planes_of_rows(floats(vocabulary, width), weight)
    for rows in (1, 32, 64, 1728):  # one for each size of tiles
        planes_fprop(planes_of_rows(x[:rows]), weight)
    dlogits = floats(1728, vocabulary)
    planes_dgrad(dlogits, weight)
    add_planes_wgrad(floats(vocabulary, width), dlogits, planes_of_rows(x))


CASES: dict[str, Callable[[], None]] = {
    work.__name__: work
    for work in (
        norms, int8_codes, rotary, swiglu, decode_state, optimizer, backward_rows,
        logprobs_and_samples, attention_forward, attention_backward, attention_decode, products,
        experts, routing, planes_head,
    )
}  # fmt: skip


def main(capability: str, out: str, *cases: str) -> None:
    compiler = Compiler(int(capability))
    compiler.install()
    with sources_for_meta():
        for case in cases or CASES:
            compiler.run(case, CASES[case])
    result = {"triton": triton.__version__, "kernels": compiler.kernels}
    Path(out).write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
