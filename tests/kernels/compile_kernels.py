"""Compile the GPU's kernels for sm_90 on a machine without a GPU, and launch none.

    python tests/kernels/compile_kernels.py OUT.json

What is compiled comes in pieces; `--serve` compiles those that standard input names, a line each,
and answers each with a line of JSON. Weights and activations are tensors of torch's `meta` device,
which pass for a GPU's in a copy of the sources that asks for `meta` where they ask for `cuda`. A
forward of the rollout, an update and the optimizer run over them with a driver of Triton that only
compiles. So a kernel is compiled with the arguments that it has in a run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import json
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import stage_reads
import torch
import triton
from portable_rules import cached, tool
from stage_reads import barrier_of, last_barrier, reads_under_way
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver, jit

sys.path.append(str(Path(__file__).parents[2]))  # benchmarks, of a process of its own

SOURCE = Path(__file__).parents[2] / "src" / "jetrl"
META = torch.device("meta")
# Shape, plan and rank of adapters, 0 without; the usual ones first.
MODELS = (("qwen3-8b", "unified", 0), ("qwen3-8b", "unified", 32), ("qwen3-30b-a3b", "int8", 0))
OTHER_MODELS = (("qwen2.5-7b", "mixed", 0), ("qwen3-8b", "bf16", 8))
STORED = (("int8", 64), ("int8+fp8", 128))
NVFP4 = ((24576, 4096), (4096, 12288), (384, 896))  # shapes of weights
DECODES = ((8, 1024), (64, 8192), (512, 1024))  # rows, longest context
VERIFIED = ((8, 8, 64), (512, 2, 640))  # sequences, tokens each, rows


# Kernels that give stages of shared memory back for bulk copies.
STAGED = ("gemm_rows.rows_gemm_kernel", "nvfp4_rows.nvfp4_rows_kernel", "forward.forward_kernel")

compiled: dict[str, int] = {}  # how often each kernel was, by the present piece
shared: dict[str, int] = {}  # bytes of shared memory of the kernel that was compiled last, by name
ttgir: dict[str, str] = {}  # Triton's code of that kernel
failed: dict[str, list[str]] = {}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


class Driver:
    """A stand-in for a Hopper GPU's driver that answers what Triton asks before a launch."""

    utils = SimpleNamespace(fill_tma_descriptor=lambda *_: 0)
    is_active = staticmethod(lambda: True)
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda _: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_device_interface = staticmethod(lambda: torch.cpu)


class NotCompiled:
    """In place of a kernel that does not compile."""

    function = packed_metadata = None
    run = launch_metadata = staticmethod(lambda *_, **__: None)


def check_stages(name: str, code: dict[str, Any], rings: int) -> None:
    """Raise ValueError for a kernel that gives back a stage of which reads may be under way.

    An NVFP4 product by wgmma has begun to read its next stage when it gives one back, which this
    cannot tell from reads of the same one: it is not examined. With two rings, the warps of one
    arrive at a barrier behind those of all stages, for sums that they hand over.
    """
    if name not in STAGED or (name.startswith("nvfp4") and "wgmma" in code["ptx"]):
        return
    found = early_arrivals(code["cubin"], rings)
    if found:
        raise ValueError(f"reads may be under way when a stage is given back: {found}")


def early_arrivals(cubin: bytes, rings: int) -> list[str]:
    """Return the arrivals that give a stage back too early."""

    def examined() -> str:
        text = tool(knobs.nvidia.nvdisasm.path, "-c -hex", cubin)
        found = reads_under_way(text)
        if rings > 1:
            of_sums = last_barrier(text)
            found = [arrival for arrival in found if barrier_of(arrival) != of_sums]
        return json.dumps(found)

    rule = Path(stage_reads.__file__).read_bytes()
    arrivals: list[str] = json.loads(cached(f"{rings}".encode() + rule + cubin, examined))
    return arrivals


def layouts_of_sums(code: str) -> list[str]:
    """Return the dimension and the layout of each float32 sum, in the order of Triton's code.

    Sums of two values are left out: they have no order.
    """
    named = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
    reduce = (
        r'"tt\.reduce"\(.*?axis = (\d).*?= arith\.(\w+).*?\(tensor<([\dx]*)f32, ([^\n]*?)>\) ->'
    )
    return [
        f"{axis} {re.sub('#[a-z]+[0-9]*', lambda name: named.get(name[0], name[0]), layout)}"
        for axis, operation, shape, layout in re.findall(reduce, code, re.DOTALL)
        if operation == "addf" and shape.split("x")[int(axis)] != "2"
    ]


def compile_only(
    gpu: type, made: Callable[[Any, Any, Any], None], failed: Callable[[Any, str], None]
) -> None:
    """Compile what is launched for the GPU of a driver, and launch nothing.

    `made` gets function, kernel and options; `failed` the function and why it did not compile.
    """
    driver.set_active(gpu())
    do_compile = jit.JITFunction._do_compile

    def instead(function: Any, key: str, signature: Any, device: int, *rest: Any) -> Any:
        try:
            kernel = do_compile(function, key, signature, device, *rest)
            made(function, kernel, rest[0])
        except Exception as error:  # the others go on
            told = [line for line in traceback.format_exception(error) if line.strip()]
            failed(function, told[-1][-2000:])
            kernel = function.device_caches[device][0][key] = NotCompiled()
        return kernel

    jit.JITFunction._do_compile = instead
    CompiledKernel.run = property(lambda _: lambda *_, **__: None)
    CompiledKernel.launch_metadata = lambda *_: None


def name_of(function: Any) -> str:
    return f"{function.module.rpartition('.')[2]}.{function.__name__}"


def note(function: Any, kernel: Any, options: Any) -> None:
    """Count a kernel of the present piece, and check its shared memory and its stages."""
    from jetrl.precision.backend import HOPPER

    name = name_of(function)
    compiled[name] = compiled.get(name, 0) + 1
    shared[name] = kernel.metadata.shared
    ttgir[name] = kernel.asm.get("ttgir", "")
    if shared[name] > HOPPER.shared_memory:
        raise ValueError(f"{shared[name]} bytes of shared memory, of {HOPPER.shared_memory}")
    rings = [options[i,] for i, name in enumerate(function.arg_names) if name == "RINGS"]
    check_stages(name, kernel.asm, rings[0] if rings else 1)


def note_failure(function: Any, why: str) -> None:
    failed.setdefault(name_of(function), []).append(why)


def take_torch(toolkit: Path) -> None:
    """Replace what the wrappers ask torch about a GPU; nvcc seems to be in an empty folder."""
    (toolkit / "bin").mkdir()
    (toolkit / "bin" / "nvcc").touch()
    torch.cuda.is_available = lambda: True
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.get_device_properties = lambda _=None: SimpleNamespace(multi_processor_count=132)
    torch.cuda.get_device_capability = lambda _=None: (9, 0)
    torch.backends.cuda.preferred_blas_library = lambda *_: None
    torch.Tensor.pin_memory = lambda self, *_: self
    deep_gemm = ModuleType("deep_gemm")
    deep_gemm.__spec__ = importlib.machinery.ModuleSpec("deep_gemm", None)
    deep_gemm.set_pdl = deep_gemm.fp8_gemm_nt = lambda *_, **__: None
    deep_gemm.find_cuda_home = lambda: toolkit
    sys.modules["deep_gemm"] = deep_gemm
    memory = ModuleType("jetrl.rollout.mapped_memory")

    class MappedMemory:
        mapped = True

        def __init__(self, size: int, _: torch.device) -> None:
            self.size, self.map = size, lambda: None

        def tensor(self) -> torch.Tensor:
            return empty(self.size, dtype=torch.uint8)

    memory.MappedMemory = MappedMemory
    sys.modules[memory.__name__] = memory


@contextlib.contextmanager
def sources_for_meta() -> Iterator[None]:
    """A copy of jetrl to which meta tensors are a GPU's."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(SOURCE, Path(folder) / "jetrl")
        for file in copy.rglob("*.py"):
            text = file.read_text(encoding="utf-8").replace(".is_cuda", ".is_meta")
            text = re.sub(r'(type [!=]=) "cuda"', r'\1 "meta"', text)
            file.write_text(text, encoding="utf-8")
        sys.path.insert(0, folder)
        yield


def shapes() -> dict[str, dict[str, Any]]:
    from benchmarks.shapes import SHAPES

    halves = {"hidden_size": 64, "intermediate_size": 320}
    return SHAPES | {"halves": SHAPES["smollm2-135m"] | halves}


@functools.cache
def policy_of(shape: str, plan: Any, rank: int = 0) -> Any:
    """A policy of two layers; with a rank it has adapters."""
    import jetrl.models.model
    from jetrl.models.adapter import Adapter, LoRA
    from jetrl.models.families import ModelConfig, parameter_shapes
    from jetrl.models.policy import Policy
    from jetrl.models.source import ModelSource
    from jetrl.precision import PrecisionPlan

    jetrl.models.model.check_device = lambda *_, **__: None
    jetrl.models.model.base_digest = lambda *_: ""
    plan = PrecisionPlan.preset(plan) if isinstance(plan, str) else plan
    config = ModelConfig.from_hf({**shapes()[shape], "num_hidden_layers": 2})
    weights = {n: empty(*s, dtype=torch.float32) for n, s in parameter_shapes(config).items()}
    adapter = Adapter.new(config, LoRA(rank, 32.0), 0) if rank else None
    return Policy(ModelSource.from_tensors(config, weights, adapter=adapter), plan, META)


def decode(shape: str, plan: Any, rank: int = 0, sizes: Any = DECODES) -> None:
    """Decode at several sizes."""
    from jetrl.rollout.decode import DecodeBuffers, ForwardSize, GraphForwards
    from jetrl.rollout.kv_cache import PagedCache
    from jetrl.rollout.sampler import Filtering

    policy = policy_of(shape, plan, rank)
    cache = PagedCache(policy.config, policy.plan, 4096, 64, META)
    forwards = object.__new__(GraphForwards)  # no graphs, and no pool of theirs
    forwards.policy, forwards.cache = policy, cache
    forwards.buffers, forwards.speculation = DecodeBuffers.empty(512, 8, 256, META), None
    for rows, longest in sizes:
        for filtering in (Filtering(), Filtering(True)):
            forwards.forward(ForwardSize(rows, longest, filtering))


def speculation() -> None:
    """Drafts, their verification, and attention of several queries a sequence."""
    from jetrl.kernels.attention.decode import attend_decode, attend_decode_quantized
    from jetrl.kernels.attention.layout import KeyValueCodes, SequenceQueries
    from jetrl.kernels.decode import take_verified, verify_inputs
    from jetrl.kernels.decode_state import DecodeState, DraftText, Verified
    from jetrl.kernels.draft import propose
    from jetrl.precision.formats import number_format

    def ints(*shape: int) -> torch.Tensor:
        return empty(*shape, dtype=torch.int32)

    state = DecodeState.empty(513, 256, META)
    text = DraftText.empty(513, 16384, 2**12, 2**12, META)
    for count, width, size in VERIFIED:
        rows = empty(count, dtype=torch.int64)
        propose(text, state, rows, longest_only=True)
        drafts = propose(text, state, rows)
        inputs = verify_inputs(state, text, drafts, rows, 64, width, size)
        several = SequenceQueries(inputs.queries, inputs.first, inputs.keys, width)
        draws = (inputs.token_ids, *empty(2, size, dtype=torch.float32))
        logprobs = empty(16, 2048, dtype=torch.float32)
        out = Verified(ints(16, 2048), logprobs, ints(16, 512), ints(1))
        take_verified(state, text, drafts, inputs, rows, *draws, out, width)
        for kv, heads, head_dim in (("fp8", 32, 128), ("bf16", 40, 128), ("int8", 16, 64)):
            codes = empty(100, 64, 8, head_dim, dtype=number_format(kv).dtype)
            scales = None if kv == "bf16" else empty(100, 64, 8, dtype=torch.float32)
            pages = KeyValueCodes(codes, scales, codes, scales)
            q = empty(size, heads, head_dim)
            work = (ints(count, 32), inputs.lengths, 2048)
            if kv == "fp8":
                attend_decode_quantized(q, pages, *work, queries=several)
            attend_decode(q, pages, *work, queries=several)


def prefill(shape: str, plan: Any, rank: int = 0) -> None:
    """Prompts with and without a last layer of their ends alone."""
    from jetrl.models.packed import ForwardInputs
    from jetrl.rollout.kv_cache import PagedCache, Span

    policy = policy_of(shape, plan, rank)
    cache = PagedCache(policy.config, policy.plan, 4096, 64, META)
    spans = [Span(0, 0, 300, list(range(5))), Span(300, 64, 400, list(range(8)))]
    tokens = torch.zeros(700, dtype=torch.int64, device=META)
    for ends in (False, True):
        kv = cache.key_values(spans, ends=ends)
        policy.rollout_logits(policy.rollout_forward(ForwardInputs(tokens, tokens), kv))


def update(shape: str, plan: Any, rank: int = 0) -> None:
    """Forward and backward, with and without recomputation, and the quantized weights."""
    from jetrl.models.packed import ForwardInputs

    policy = policy_of(shape, plan, rank)
    ends, targets = torch.tensor([0, 1000, 4096]), torch.arange(1, 900)
    inputs = ForwardInputs.packed(torch.zeros(4096, dtype=torch.int64), ends)
    for recomputed in (False, True):
        with torch.enable_grad():
            logprobs, _ = policy.train_logprobs(inputs, ends, targets, 0.9, recomputed)
            logprobs.backward(torch.empty(899, device=META))
    policy.requantize()


def other_options() -> None:
    """Compile what other sampling and other gradients launch: one after the other, on one shape."""
    from jetrl.precision import PrecisionPlan

    jet = PrecisionPlan.preset("jet")
    for plan in (PrecisionPlan.preset("alike"), jet.replace(scales="pow2", kv="fp8")):
        prefill("qwen3-0.6b", plan)
        decode("qwen3-0.6b", plan, sizes=DECODES[:1])
    for plan in (jet.replace(grad_output="e5m2"), jet.replace(wgrad_input="1x128")):
        update("qwen3-0.6b", plan)


def short_groups(shape: str, rank: int) -> None:
    """Compile what launches otherwise if a width is no multiple of 128."""
    prefill(shape, "unified", rank)
    update(shape, "unified", rank)


def halves() -> None:
    from jetrl.precision import PrecisionPlan

    short_groups("halves", 8)
    update("halves", PrecisionPlan.preset("int8").replace(grad_output="e4m3"))


def stems_of(length: int, rows: int, branches: int = 2) -> Any:
    """Return the stems of a batch that is a stem of some length and branches, all but one short."""
    from jetrl.models.packed import Stems

    ends = [0, *(length + i for i in range(branches)), rows]
    empty = torch.zeros(0, dtype=torch.int64)
    return Stems(empty, empty, ends, [-1] + [0] * branches)


def attend(source: Any, tokens: int, head_dim: int, backward: bool = True) -> None:
    from jetrl.models.layer import Rotary

    positions = torch.zeros(tokens, dtype=torch.int64, device=META)
    table = torch.empty(1, 2, head_dim // 2, device=META)
    rope = Rotary(positions, table, norms=None, num_heads=32, num_kv_heads=8)
    with torch.set_grad_enabled(backward):
        out = source.attend(0, empty(tokens, 48 * head_dim).requires_grad_(), rope, last=False)
        if backward:
            out.backward(torch.empty_like(out))


def long_attention() -> None:
    """Compile the backward of a sequence whose dS is too large to be kept."""
    from jetrl.models.attention import PackedKeyValues
    from jetrl.precision import PrecisionPlan

    kinds = [("unified", None), ("jet", None), ("unified", stems_of(35_072, 70_000, 600))]
    for plan, stems in kinds:
        ends = torch.tensor([0, 70_000])
        attend(PackedKeyValues(ends, PrecisionPlan.preset(plan), META, stems), 70_000, 128)


def stored_formats(kv: str, head_dim: int) -> None:
    """Compile what reads and writes keys and values of a format: training, prompts and decode."""
    from benchmarks.shapes import SHAPES

    from jetrl.models.attention import PackedKeyValues
    from jetrl.models.families import ModelConfig
    from jetrl.precision import PrecisionPlan
    from jetrl.rollout.kv_cache import DecodeWork, PagedCache, Span

    plan = PrecisionPlan.preset("unified").replace(kv=kv)
    sizes = {"num_hidden_layers": 1, "head_dim": head_dim}
    cache = PagedCache(ModelConfig.from_hf(SHAPES["qwen3-8b"] | sizes), plan, 4096, 64, META)
    tables = torch.zeros(8, 32, dtype=torch.int32, device=META)
    work = DecodeWork(tables, tables[:, 0], 2048)
    slots = torch.zeros(8, dtype=torch.int64, device=META)
    attend(cache.decode_key_values(slots, work), 8, head_dim, backward=False)
    attend(cache.key_values([Span(0, 0, 300, list(range(5)))]), 300, head_dim, backward=False)
    for stems in (None, stems_of(128, 300), stems_of(128, 300, 20)):  # in one part, in two
        attend(PackedKeyValues(torch.tensor([0, 300]), plan, META, stems), 300, head_dim)


def small_operations() -> None:
    """Compile the optimizer's kernels, and the operations of the self-check, one by one."""
    from jetrl.kernels.adamw import adamw_
    from jetrl.kernels.adamw_scalars import adamw_scalars
    from jetrl.kernels.logprob import chosen_logprobs
    from jetrl.kernels.norm import block_squares, rms_norm
    from jetrl.kernels.swiglu import swiglu
    from jetrl.precision import quantize
    from jetrl.precision.triton.quantize import dithered_bf16, quantize_weight

    master = empty(512, 512, dtype=torch.float32)
    states = [empty(512, 512, dtype=kind) for kind in (torch.uint8, torch.int16)]
    scalars = adamw_scalars(1, lambda _: 0.1, (0.9, 0.95), 1e-8, 0.1)
    adamw_(master, master, *states, torch.empty((), device=META), scalars)
    dithered_bf16(master, "w")
    block_squares(master)
    x = empty(70, 256)
    rms_norm(x, x[0], 1e-6)
    swiglu(x)
    for scales in ("fp32", "pow2"):
        quantize(x, scales=scales)
        quantize_weight(empty(256, 384, dtype=torch.float32), scales=scales)
    logits = empty(70, 999, dtype=torch.float32).requires_grad_()
    with torch.enable_grad():
        chosen = torch.zeros(70, dtype=torch.int64, device=META)
        chosen_logprobs(logits, chosen, 0.7)[0].backward(torch.empty(70, device=META))


def portable_probs() -> None:
    """Compile log-probs and sampling with the bits of the references, for few and many rows."""
    from jetrl.kernels.portable import logprob, sampling

    for rows, columns in ((8, 151_936), (70, 999)):
        logits = empty(rows, columns, dtype=torch.float32)
        floats, ints = empty(rows, dtype=torch.float32), empty(rows, dtype=torch.int64)
        logprob.exact_logprobs(logits, ints, floats[:, None])
        of_rows = empty(2, rows, dtype=torch.float32)
        logprob.exact_logits_gradient(logits, ints, floats[:, None], of_rows, floats)
        sampling.sample(logits, ints, floats)
        sampling.exclude_tokens(logits, floats, floats, ints, floats, ints)


def integers() -> None:
    """Compile the operations of the `int8` plan, at odd and at wide shapes."""
    from jetrl.kernels.norm_triton import rms_norm_quantize
    from jetrl.kernels.swiglu_triton import swiglu_quantize
    from jetrl.precision.hopper.int8_rows import TILES, int8_matmul, rows_matmul
    from jetrl.precision.quantize import empty_int8_rows
    from jetrl.precision.triton import int8

    rms_norm_quantize(empty(5, 576), empty(576), 1e-6, scales=None)
    swiglu_quantize(empty(300, 2 * 12288), None)
    for rows, k in ((5, 576), (300, 4096), (300, 24576)):
        int8.int8_rows(empty(rows, k))
    for tokens in (300, 20_000):  # in one pass, in two
        int8.int8_tokens(empty(tokens, 960))
    weight = empty_int8_rows(24576, 4096, META)
    for rows in (5, 100, 200, 1000):
        int8_matmul(empty_int8_rows(rows, 4096, META), weight)
    for rows, choices in TILES.items():
        for tiles, _ in choices:
            rows_matmul(empty_int8_rows(rows, 4096, META), weight, tiles=tiles)
    int8.int8_turned(weight)
    int8.int8_squares_turned(weight)


def nvfp4_weight_of(n: int, k: int, by_row: bool = False) -> Any:
    """Return an NVFP4 weight [n, k] without contents, with one scale or with scales of rows."""
    from jetrl.precision.nvfp4 import OrderedNVFP4, RowFactors

    codes = empty(n // 2 * k // 128, 32, dtype=torch.int32)
    scales = empty(n // 32, k // 2, dtype=torch.int32)
    of_rows = RowFactors(((0, n // 4, 0.5), (n // 4, n, 0.25)), torch.empty(n, device=META))
    return OrderedNVFP4(codes, scales, of_rows if by_row else 0.5, torch.Size((n, k)))


def nvfp4(n: int, k: int) -> None:
    """Compile the products with NVFP4 weights, at the rows of decode and of training."""
    from jetrl.precision.nvfp4_products import nvfp4_dgrad, nvfp4_matmul

    for by_row in (False, True):
        weight = nvfp4_weight_of(n, k, by_row)
        for rows in (1, 64, 128, 4096):
            x = empty(rows, k)
            nvfp4_dgrad(nvfp4_matmul(x, weight), weight)


def adapter_of(rank: int, n: int, k: int) -> Any:
    from jetrl.precision.adapter_weight import AdapterShape, AdapterWeight

    shape = AdapterShape(rank, 1.0, n, k, ((0, n // 2), (n // 2, n // 2)))
    sizes = (shape.a_shape, shape.b_shape)
    a, b = (torch.nn.Parameter(empty(*size, dtype=torch.float32)) for size in sizes)
    return AdapterWeight("qkv", a, b, shape, torch.bfloat16)


def adapters() -> None:
    """Compile the products of adapters of other ranks and shapes than those of a whole model."""
    from jetrl.precision.hopper.adapter_linear import adapted_matmul, quantized_adapted_matmul
    from jetrl.precision.triton.layout import empty_weight
    from jetrl.precision.triton.quantize import quantize_rows

    for rank, rows, n, k in ((48, 33, 1152, 896), (64, 8, 24576, 4096), (100, 200, 768, 1152)):
        weight, x = adapter_of(rank, n, k), empty(rows, k)
        base = empty_weight(n, k, torch.float8_e4m3fn, META)
        adapted_matmul(quantize_rows(x), x, base, weight)
        quantized_adapted_matmul(x, base, weight, "pow2")


def adapters_on_nvfp4() -> None:
    """Compile the products of NVFP4 weights with adapters, of each cut and instruction."""
    from jetrl.precision.hopper.adapter_linear import nvfp4_adapted_matmul

    for rank, rows, n, k in (
        (32, 8, 24576, 4096), (8, 1, 6144, 4096), (64, 16, 24576, 4096), (48, 32, 1152, 896),
        (32, 64, 4096, 12288), (100, 8, 384, 896), (32, 128, 6144, 4096), (8, 5000, 384, 896),
    ):  # fmt: skip
        weight = nvfp4_weight_of(n, k, by_row=rank < 32)
        nvfp4_adapted_matmul(empty(rows, k), weight, adapter_of(rank, n, k))


def nvfp4_shared_memory() -> None:
    """Compare the shared memory that is counted for cuts of NVFP4 products with Triton's."""
    from jetrl.precision.hopper.adapter import AdapterOperands
    from jetrl.precision.hopper.nvfp4_rows import (
        fused_tiles,
        nvfp4_rows_kernel,
        nvfp4_rows_matmul,
        shared_bytes,
        tiles_for,
    )
    from jetrl.precision.nvfp4 import parts_of
    from jetrl.precision.triton.launch import TRITONS_OWN

    for rank, rows, n, k in (
        (0, 8, 5120, 25600), (64, 16, 4096, 12288), (0, 64, 24576, 4096), (32, 128, 6144, 4096),
    ):  # fmt: skip
        x = empty(rows, k)
        words = empty(-(-n // 64), dtype=torch.int32)
        adapter = AdapterOperands(empty(rows, rank), empty(n, rank), words, words) if rank else None
        nvfp4_rows_kernel.device_caches.clear()  # what another piece compiled is compiled again
        nvfp4_rows_matmul(x, nvfp4_weight_of(n, k), adapter=adapter)
        parts, _ = parts_of(n, k)
        tiles = fused_tiles(rows, n, parts, rank) if rank else tiles_for(rows, n, parts)
        more = shared_bytes(tiles, rows, parts, rank) - shared["nvfp4_rows.nvfp4_rows_kernel"]
        if not 0 <= more <= TRITONS_OWN:
            raise ValueError(f"{more} bytes more are counted than there are: {rows}, {n}, {k}")


def lanes_of_rows() -> None:
    """Compare the layouts in which trainer and sampler sum over the lanes of a row of logits."""
    from jetrl.kernels import logprob_triton, sampling_triton
    from jetrl.kernels.sampling import sample

    kernels = (
        logprob_triton._forward_kernel,
        sampling_triton._sample_lanes_kernel,
        sampling_triton._sample_draw_kernel,
    )
    for vocabulary in (4096, 1000):  # Triton is told that the first is a multiple of 16
        logits = empty(8, vocabulary, dtype=torch.float32)
        some, whole = logits[:, 0], torch.zeros(8, dtype=torch.int64, device=META)
        for kernel in kernels:
            kernel.device_caches.clear()  # what another piece compiled is compiled again
        logprob_triton.chosen_logprobs(logits, whole, 0.7)
        sample(logits, whole, some.contiguous())
        ours, lanes, drawn = (
            layouts_of_sums(ttgir[f"{kernel.module.rpartition('.')[2]}.{kernel.__name__}"])
            for kernel in kernels
        )
        within = {re.sub("warpsPerCTA = .*?]", "", sums) for sums in ours if sums[0] == "1"}
        if {re.sub("warpsPerCTA = .*?]", "", sums) for sums in lanes} != within or not within:
            raise ValueError(f"{vocabulary}: lanes are summed as {lanes}, the trainer's {ours}")
        if not drawn or not set(drawn) <= {sums for sums in ours if sums[0] == "0"}:
            raise ValueError(f"{vocabulary}: rows are summed as {drawn}, the trainer's {ours}")


def chains() -> None:
    """The GPU tests' own kernel."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
    from tensor_core_chains import chain_kernel

    a, b = (empty(2, rows, 128) for rows in (64, 128))
    c = empty(2, 64, 128, dtype=torch.float32)
    for wgmma in (False, True):
        chain_kernel[(2,)](a, b, c, c, 128, 128, wgmma, num_warps=4, enable_fp_fusion=False)


def pieces_of(*models: tuple[str, str, int]) -> dict[str, Callable[[], object]]:
    return {
        f"{work.__name__} {model}": functools.partial(work, *model)
        for model in models
        for work in (decode, prefill, update)
    }


USUAL: dict[str, Callable[[], object]] = {
    **pieces_of(*MODELS),
    **{f"keys and values {kind}": functools.partial(stored_formats, *kind) for kind in STORED},
    f"nvfp4 {NVFP4[0]}": functools.partial(nvfp4, *NVFP4[0]),
    "short_groups smollm2-135m": functools.partial(short_groups, "smollm2-135m", 0),
}
USUAL |= {
    work.__name__: work
    for work in (
        long_attention, speculation, small_operations, chains, lanes_of_rows,
        adapters_on_nvfp4, nvfp4_shared_memory, integers, portable_probs,
    )
}  # fmt: skip
PIECES = USUAL | pieces_of(*OTHER_MODELS)
PIECES |= {f"nvfp4 {size}": functools.partial(nvfp4, *size) for size in NVFP4[1:]}
PIECES |= {work.__name__: work for work in (adapters, halves, other_options)}


def compile_piece(name: str) -> dict[str, Any]:
    """Return what a piece compiled, what Triton could not compile, and the error that ended it."""
    compiled.clear()
    failed.clear()
    broken = ""
    try:
        PIECES[name]()
    except Exception:  # the others go on
        broken = traceback.format_exc()
    return {"compiled": dict(compiled), "failed": dict(failed), "broken": broken}


def main(out: str) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else is printed
    compile_only(Driver, note, note_failure)
    with tempfile.TemporaryDirectory() as toolkit, sources_for_meta():
        take_torch(Path(toolkit))
        if out == "--serve":
            for line in sys.stdin:
                print(json.dumps(compile_piece(line.strip())), file=answers, flush=True)
            return
        pieces = {name: compile_piece(name) for name in PIECES}
    results = {"triton": triton.__version__, "pieces": pieces}
    Path(out).write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
