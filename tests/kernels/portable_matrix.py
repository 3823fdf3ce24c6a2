"""Compile the kernels of the plan `integer` for an NVIDIA GPU that is not there, and check them.

    python tests/kernels/portable_matrix.py CAPABILITY OUT.json [CASE ...]

Each case calls a host wrapper with tensors of torch's `meta` device, which stand for a GPU's as in
compile_kernels.py. So a kernel is compiled with the arguments that it has in a run, and Triton's
driver launches nothing. Of each kernel are checked:

* shared memory and registers against the card's limits, and that nothing is spilled;
* the rules of docs/bits.md in Triton's code and in PTX: no approximations, no flushed subnormals,
  fma only if the source writes it, float sums in no order but a written one, no atomics on floats,
  and products of INT8 by tensor cores.

EXCEPTIONS and SPILLS name what may break a rule, and why.
"""

from __future__ import annotations

import collections
import json
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compile_kernels
import torch
import triton
from compile_kernels import META, NotCompiled, empty, sources_for_meta
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver, jit

KB = 1024


@dataclass(frozen=True)
class Card:
    """Limits of a compute capability: bytes of shared memory per program, SMs of one GPU."""

    name: str
    shared: int
    multiprocessors: int


CARDS = {
    80: Card("A100", 163 * KB, 108),
    86: Card("RTX 3090", 99 * KB, 82),
    89: Card("RTX 4090", 99 * KB, 128),
    90: Card("H100", 227 * KB, 132),
    100: Card("B200", 227 * KB, 148),
    103: Card("B300", 227 * KB, 148),
    120: Card("RTX 5090", 99 * KB, 170),
}
REGISTERS = 255
TENSOR_CORES = r"(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*"

# What PTX may not have, and what it is called in a report.
FORBIDDEN = {
    r"[a-z0-9]+[\w.]*\.approx[\w.]*": "approximation",
    r"div\.full[\w.]*": "approximation",
    r"[a-z0-9]+[\w.]*\.ftz[\w.]*": "subnormals flushed",
    r"(?:atom|red)\.[\w.]*add[\w.]*\.(?:bf|f)\d+\w*": "atomic on floats",
    r"(?:add|sub|mul|fma)(?![\w.]*\.f32\.)[\w.]*\.(?:bf16|f16)\w*": "arithmetic in 16 bits",
}
# What Triton's code may not have.
LIBRARY = r"math\.(?:exp2?|log2?|log1p|expm1|rsqrt|sin|cos|tan|erf|tanh|powf?)\b"

# Kernel and PTX: why that changes no bit.
EXCEPTIONS = {
    ("rotary_triton._forward_kernel", "rsqrt.approx.ftz.f64"): (
        "a first guess; from any as near, the result is the same (test_inverse_root.py)"
    )
}
# Bytes that a kernel may spill: why that costs little.
SPILLS = {
    "rotary_triton._forward_kernel": (48, "no loop: stored once and loaded once"),
    "decode_triton._take_verified_kernel": (8, "one program per forward"),
}


def problems_of(name: str, kernel: Any, card: Card) -> list[str]:
    """Return the rules that a compiled kernel breaks."""
    ptx, code = kernel.asm["ptx"], kernel.asm["ttgir"]
    found = [f"{what}: {text}" for text, what in forbidden(ptx) if (name, text) not in EXCEPTIONS]
    found += [f"function of a library: {text}" for text in set(re.findall(LIBRARY, code))]
    fused = re.findall(r"\bfma\.rn[\w.]*", ptx)
    if fused and "math.fma" not in code and "fma.rn" not in code:
        found.append(f"{len(fused)} fma that the source does not write")
    if kernel.metadata.enable_fp_fusion and re.search(r"\bmul[\w.]*\.f(32|64)", ptx):
        found.append("products of floats without enable_fp_fusion=False")
    sums = compile_kernels.layouts_of_sums(code)
    if sums:
        found.append(f"{len(sums)} sums of float32 in the order of a layout")
    found += problems_of_products(kernel.asm.get("ttir", ""), ptx)
    registers, spilled = resources(kernel.asm["cubin"])
    if registers > REGISTERS:
        found.append(f"{registers} registers")
    if spilled > SPILLS.get(name, (0, ""))[0]:
        found.append(f"{spilled} bytes of registers spilled")
    if kernel.metadata.shared > card.shared:
        found.append(f"{kernel.metadata.shared} bytes of shared memory, of {card.shared}")
    return found


def forbidden(ptx: str) -> Iterator[tuple[str, str]]:
    for pattern, what in FORBIDDEN.items():
        for text in sorted(set(re.findall(rf"(?m)(?<![\w.]){pattern}", ptx))):
            yield text, what


def problems_of_products(code: str, ptx: str) -> list[str]:
    """Return what is wrong with products: each is of INT8 codes, and by tensor cores."""
    instructions = set(re.findall(TENSOR_CORES, ptx))
    floats = [one for one in sorted(instructions) if not is_int8(one)]
    found = [f"not a product of INT8: {one}" for one in floats]
    if "tt.dot" in code and not instructions:
        found.append("products without tensor cores")
    return found


def is_int8(instruction: str) -> bool:
    return ".kind::i8" in instruction or bool(re.search(r"\.[su]8\.[su]8", instruction))


def resources(cubin: bytes) -> tuple[int, int]:
    """Return the registers per thread, and the bytes per thread that are spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = re.findall(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", text)[-1]
    return int(registers), int(stack) + int(local)


class Compiler:
    """Compiles for one card what the wrappers launch, and records each kernel."""

    def __init__(self, capability: int) -> None:
        self.capability, self.card = capability, CARDS[capability]
        self.kernels: list[dict[str, Any]] = []
        self.case = ""

    def install(self) -> None:
        """Replace Triton's driver and compilation, and what wrappers ask torch about a GPU."""
        target = GPUTarget("cuda", self.capability, 32)
        stand_in = type("Stand", (compile_kernels.Driver,), {})
        stand_in.get_current_target = staticmethod(lambda: target)
        driver.set_active(stand_in())
        do_compile = jit.JITFunction._do_compile

        def compile_only(function: Any, key: str, signature: Any, device: int, *rest: Any) -> Any:
            try:
                began = time.monotonic()
                kernel = do_compile(function, key, signature, device, *rest)
                self.record(function, kernel, time.monotonic() - began)
            except Exception as error:  # the others are compiled too
                told = [line for line in traceback.format_exception(error) if line.strip()]
                self.kernels.append(
                    {"case": self.case, "kernel": name_of(function), "problems": [told[-1][-2000:]]}
                )
                kernel = function.device_caches[device][0][key] = NotCompiled()
            return kernel

        jit.JITFunction._do_compile = compile_only
        CompiledKernel.run = property(lambda _: lambda *_, **__: None)
        CompiledKernel.launch_metadata = lambda *_: None
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

    def record(self, function: Any, kernel: Any, seconds: float) -> None:
        name = name_of(function)
        products = collections.Counter(re.findall(TENSOR_CORES, kernel.asm["ptx"]))
        registers, _ = resources(kernel.asm["cubin"])
        self.kernels.append(
            {
                "case": self.case,
                "kernel": name,
                "registers": registers,
                "shared": kernel.metadata.shared,
                "warps": kernel.metadata.num_warps,
                "products": dict(products),
                "seconds": round(seconds, 2),
                "problems": problems_of(name, kernel, self.card),
            }
        )

    def run(self, case: str) -> None:
        self.case = case
        try:
            CASES[case]()
        except Exception:  # the others are compiled too
            self.kernels.append(
                {"case": case, "kernel": "", "problems": [traceback.format_exc()[-2000:]]}
            )


def name_of(function: Any) -> str:
    return f"{function.module.rpartition('.')[2]}.{function.__name__}"


ROWS, FEW, HIDDEN, HEADS, GROUPS, HEAD = 4096, 8, 4096, 32, 8, 128


def ints(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int32)


def longs(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int64)


def floats(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.float32)


def norms() -> None:
    from jetrl.kernels.norm_triton import rms_norm_forward, rms_norm_quantize
    from jetrl.kernels.portable.norm import block_squares, rms_norm_backward, sum_of_rows

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


CASES: dict[str, Callable[[], None]] = {
    work.__name__: work for work in (norms, int8_codes, rotary, decode_state, optimizer)
}


def main(capability: str, out: str, *cases: str) -> None:
    compiler = Compiler(int(capability))
    compiler.install()
    with sources_for_meta():
        for case in cases or CASES:
            compiler.run(case)
    result = {"triton": triton.__version__, "kernels": compiler.kernels}
    Path(out).write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
