"""Rules for compiled kernels of the plan `integer`, and the limits of GPUs.

Read from Triton's code, PTX and machine code; the rules are those of docs/bits.md:

* no approximations, no flushed subnormals, no functions of a library;
* fma only if the source writes it;
* sums of floats in no order but a written one: reductions add two terms or integers;
* no atomics on floats, and products of INT8 by tensor cores only;
* nothing spilled, and shared memory and registers within a card's limits.

EXCEPTIONS and SPILLS name what may break a rule, and why.
"""

from __future__ import annotations

import collections
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.runtime.cache import get_cache_manager

KB = 1024


@dataclass(frozen=True)
class Card:
    """Limits of a compute capability: bytes of shared memory per program, SMs of one GPU.

    `bf16`: INT8 codes are multiplied by BF16 tensor cores, in pieces whose sums are exact.
    """

    name: str
    shared: int
    multiprocessors: int
    bf16: bool = False


# Files whose kernels portable_matrix.py compiles, in place of compile_kernels.py.
PORTABLE = (
    "kernels/portable/*.py",
    "precision/triton/portable_*.py",
    "precision/triton/int8_planes.py",
    "precision/triton/row_sums.py",
    "precision/triton/grouped_int8.py",
    "precision/triton/expert_rows.py",
)
# Files whose kernels plans_matrix.py compiles, for any plan.
PLANS = (
    "kernels/attention/forward_triton.py",
    "precision/triton/adapter.py",
    "precision/triton/float_tiles.py",
    "precision/triton/grouped_bf16.py",
    "precision/triton/saved.py",
)
CARDS = {
    80: Card("A100", 163 * KB, 108),
    86: Card("RTX 3090", 99 * KB, 82),
    89: Card("RTX 4090", 99 * KB, 128),
    90: Card("H100", 227 * KB, 132),
    100: Card("B200", 227 * KB, 148),
    103: Card("B300", 227 * KB, 148, bf16=True),
    120: Card("RTX 5090", 99 * KB, 170),
}
REGISTERS = 255
TENSOR_MEMORY = 512  # columns; a kernel that needs more is compiled to a trap

# Instructions that PTX may not have, and what they are called in a report.
FORBIDDEN = {
    r".*\.approx\b.*|div\.full\b.*": "approximation",
    r".*\.ftz\b.*": "subnormals flushed",
    r"(atom|red)\b.*\.add\b.*\.b?f\d+.*": "atomic on floats",
    r"(add|sub|mul|fma)\b(?!.*\.f32\.).*\.b?f16.*": "arithmetic in 16 bits",
}
TENSOR_CORES = ("wgmma.mma_async", "mma.sync", "tcgen05.mma")
# Functions that Triton's code may not have.
LIBRARY = re.compile(r"math\.(?:exp2?|log2?|log1p|expm1|rsqrt|sin|cos|tan|erf|tanh|powf?)\b")

# Kernel and instruction: why that changes no bit.
EXCEPTIONS = {
    ("rotary_triton._forward_kernel", "rsqrt.approx.ftz.f64"): (
        "a first guess; from any as near, the result is the same (test_inverse_root.py)"
    ),
    ("norm._rows_kernel", "add.rn.bf16x2"): "one sum, rounded to bfloat16, as defined",
    ("norm._rows_kernel", "fma.rn.bf16x2"): "the same, as 1 * a + b",
}
# What products of INT8 codes by BF16 tensor cores have: sums up to 2**24, exact.
BF16_PRODUCTS = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "tcgen05.mma.cta_group::1.kind::f16",
)
WIDENING = "sub.bf16x2"  # of INT8 codes, exact


class Spill(NamedTuple):
    """Bytes that a kernel may spill, and how often innermost loops may load and store them."""

    size: int
    in_loops: int
    reason: str


SPILLS = {
    "rotary_triton._forward_kernel": Spill(72, 0, "stored once and loaded once"),
    "decode_triton._take_verified_kernel": Spill(8, 4, "one program per forward"),
    "sampling._bounds_kernel": Spill(8, 0, "32 warps leave few registers"),
    "int8_planes._wgrad_kernel": Spill(80, 0, "a part of the total, stored and loaded once"),
    # Without wgmma, sums and operands share registers. No such GPU has been tuned for.
    "attention_forward._attend_kernel": Spill(288, 64, "mma.sync; none in loops on Hopper"),
    "attention_backward._dq_kernel": Spill(704, 352, "mma.sync; none in loops on Hopper"),
    "attention_backward._dk_dv_kernel": Spill(288, 128, "mma.sync; none on Hopper"),
    # Of plans_matrix.py.
    "forward_triton.tile_kernel": Spill(192, 0, "before and after the loops over keys"),
    "int8._squares_kernel": Spill(24, 0, "one tile per program, on sm_103"),
    "decode.decode_kernel": Spill(80, 29, "keys in BF16 with head_dim 128, on sm_100"),
    "adapter._down_kernel": Spill(16, 0, "before and after the loop over chunks"),
    "grouped_bf16._wgrad_kernel": Spill(192, 0, "the total, next to all sums, on Hopper"),
    "float_tiles._product_kernel": Spill(16, 0, "before the loop over K"),
    "backward._dkdv_kernel": Spill(640, 572, "mma.sync; with head_dim 64 on sm_120"),
    "backward._dq_kernel": Spill(104, 33, "mma.sync, dS not kept, with head_dim 64"),
    "norm_triton._backward_kernel": Spill(8, 1, "576 columns on sm_100 and sm_103"),
    "sampling_triton._exclude_kernel": Spill(24, 9, "32 warps leave few registers, on Hopper"),
    "rotary_triton._backward_kernel": Spill(16, 8, "head_dim 128 on sm_120"),
}
NO_SPILL = Spill(0, 0, "")


def problems_of(name: str, kernel: Any, card: Card) -> list[str]:
    """Return the rules that a compiled kernel breaks on a card."""
    ptx, code = instructions(kernel.asm["ptx"]), kernel.asm["ttgir"]
    allowed = {instruction for kernel_name, instruction in EXCEPTIONS if kernel_name == name}
    if card.bf16:
        allowed.add(WIDENING)
    used = tensor_cores(ptx)
    ptx = collections.Counter({one: count for one, count in ptx.items() if one not in allowed})
    found = [f"{what}: {one}" for one, what in forbidden(ptx)]
    found += [f"function of a library: {one}" for one in sorted(set(LIBRARY.findall(code)))]
    fused = sum(count for one, count in ptx.items() if one.startswith("fma."))
    if fused and "math.fma" not in code and "fma.rn" not in code:
        found.append(f"{fused} fma that the source does not write")
    products = any(re.fullmatch(r"mul\b.*\.f(32|64).*", one) for one in ptx)
    if products and kernel.metadata.enable_fp_fusion:
        found.append("products of floats without enable_fp_fusion=False")
    terms = [count for count in sums_of_floats(code) if count != 2]
    if terms:
        found.append(f"sums of {terms} floats in the order of a layout")
    # Triton's first code has a product even if a later one is a trap.
    dots = "tt.dot" in kernel.asm.get("ttir", "") or "dot_op" in code
    found += problems_of_products(dots, used, card.bf16)
    return found + problems_of_resources(name, kernel, card)


def instructions(ptx: str) -> collections.Counter[str]:
    """Return how often each instruction is in PTX, by its name with all suffixes."""
    name = re.compile(r"(?:^|[;{}])[ \t]*(?:@!?%\w+[ \t]+)?([a-z]\w*\.[\w.:]+)", re.MULTILINE)
    return collections.Counter(name.findall(ptx))


def forbidden(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the instructions that are forbidden, and why."""
    for name in sorted(names):
        for pattern, what in FORBIDDEN.items():
            if re.fullmatch(pattern, name):
                yield name, what


def sums_of_floats(code: str) -> Iterator[int]:
    """Yield the number of terms of each reduction or scan that adds floats."""
    for piece in re.split(r'"tt\.(?:reduce|scan)"', code)[1:]:
        body, _, types = piece.partition("}) : (")
        axis, shape = re.search(r"axis = (\d)", body), re.match(r"tensor<([\dx]+)x", types)
        if "arith.addf" in body and axis and shape:
            yield int(shape[1].split("x")[int(axis[1])])


def problems_of_products(dots: bool, names: Iterable[str], bf16: bool = False) -> list[str]:
    """Return what is wrong with products: each is by tensor cores, of INT8 or all of BF16."""
    used = sorted(tensor_cores(names))
    right = BF16_PRODUCTS.__contains__ if bf16 else is_int8
    found = [
        f"not a product of {'BF16' if bf16 else 'INT8'}: {one}" for one in used if not right(one)
    ]
    if dots and not used:
        found.append("products without tensor cores")
    return found


def tensor_cores(names: Iterable[str]) -> set[str]:
    return {one for one in names if one.startswith(TENSOR_CORES)}


def is_int8(name: str) -> bool:
    return ".kind::i8" in name or re.search(r"\.[su]8\.[su]8", name) is not None


def problems_of_resources(name: str, kernel: Any, card: Card) -> list[str]:
    """Return what a kernel uses beyond the limits of a card, and spills in innermost loops."""
    found = []
    registers, stack = resources(kernel.asm["cubin"])
    if registers > REGISTERS:
        found.append(f"{registers} registers")
    if kernel.metadata.shared > card.shared:
        found.append(f"{kernel.metadata.shared} bytes of shared memory, of {card.shared}")
    if getattr(kernel.metadata, "tmem_size", 0) > TENSOR_MEMORY:
        found.append(f"{kernel.metadata.tmem_size} columns of tensor memory, of {TENSOR_MEMORY}")
    allowed = SPILLS.get(name, NO_SPILL)
    in_loops = spills_in_loops(machine_code(kernel.asm["cubin"])) if stack else 0
    if stack > allowed.size or in_loops > allowed.in_loops:
        found.append(f"{stack} bytes spilled, {in_loops} loads and stores of them in loops")
    return found


def resources(cubin: bytes) -> tuple[int, int]:
    """Return the registers per thread, and the bytes per thread that are spilled."""
    text = tool(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin)
    registers, stack, local = re.findall(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", text)[-1]
    return int(registers), int(stack) + int(local)


def machine_code(cubin: bytes) -> list[str]:
    """Return the instructions and labels of a kernel."""
    text = tool(knobs.nvidia.nvdisasm.path, "-c", cubin)
    return [
        label or line
        for label, line in re.findall(
            r"^(?:(\.L_x_\d+):|\s+/\*[0-9a-f]+\*/\s+(.*?);)", text, re.MULTILINE
        )
    ]


def spills_in_loops(code: list[str]) -> int:
    """Return the number of loads and stores of spilled registers in innermost loops."""
    places = {line: at for at, line in enumerate(code) if line.startswith(".L_x_")}
    loops = []
    for end, line in enumerate(code):
        target = re.search(r"\bBRA\b.*?(\.L_x_\d+)", line)
        if target and places.get(target[1], end) < end:
            loops.append((places[target[1]], end))
    inner = [
        (first, end)
        for first, end in loops
        if not any((a, b) != (first, end) and first <= a and b <= end for a, b in loops)
    ]
    spilled = {
        at
        for first, end in inner
        for at in range(first, end)
        if re.search(r"\b(LDL|STL)\b", code[at])
    }
    return len(spilled)


def tool(path: str, option: str, cubin: bytes) -> str:
    """Return what a tool prints of a kernel; nvdisasm takes seconds."""

    def printed() -> str:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(cubin)
            command = [path, *option.split(), file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    return cached(option.encode() + cubin, printed)


def cached(key: bytes, made: Callable[[], str]) -> str:
    """Return a text that is made once, cached where Triton caches kernels."""
    cache = get_cache_manager(hashlib.sha256(triton.__version__.encode() + key).hexdigest())
    file = cache.get_file("made.txt") or cache.put(made(), "made.txt")
    return Path(file).read_text(encoding="utf-8")
