"""The adapter's product with A of few rows on Hopper: u = x A^T in one launch, with pinned bits.

Decode waits for this product in front of every linear layer, so latency is all that counts. Each
chunk of 512 along K has a program of its own for some rows of x and of A, which makes the chunk's
chain of tensor-core products from zero and writes the sum in float32. The program that arrives last
adds the sums of all chunks from the first to the last and rounds the result once. So the order of
every sum is that of `precision.hopper.adapter`, whichever program comes last. The tensor core is
asked by mma.sync, which has the bits of wgmma (tests/gpu/test_tensor_cores.py).

A is not written by the kernel in front, so in a captured graph it is read before that has ended.
The kernel behind may start at once, before this one has waited: it then reads weights while the
kernel in front and this one run. When it has waited for this kernel, it has waited for the one in
front too, since every program here does so. And with `SIGNAL` it need not wait for this kernel to
read what the one in front wrote: a word says when it can. The word is 0 again before the kernel
behind starts, since each program lets it start, and the first one has written the word by then.

Where nothing has quantized x yet, the programs of the first ranks do: they hold x anyway.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from jetrl.precision.hopper import gluon_names, tile
from jetrl.precision.hopper.checks import check_matrix, check_tensor
from jetrl.precision.hopper.launch import (
    OVERLAPPED,
    gluon_let_next_start,
    gluon_wait_for_previous,
)
from jetrl.precision.hopper.quantize import tile_rule
from jetrl.precision.layout import cdiv, empty_row_groups
from jetrl.precision.plan import FP8_BLOCK
from jetrl.precision.quantize import FORMATS, QTensor

CHUNK = 512  # along K; pinned, since the bits depend on it
MOST_ROWS = 4096  # fewer than these
_FEW_ROWS = 256  # up to here a program has 16 rows
_RANKS = 32  # rows of A that a program has
DOWN_PROGRAM_REGISTERS = 128 * 64  # of a program of 16 rows, at most: 128 threads of 64


@gluon.jit
def _copy_tile(
    smem, ptr, first_row, num_rows, first_column, num_columns, stride, loads: gl.constexpr
):
    """Start copying a tile of a matrix to shared memory, with zeros where it has none.

    Args:
        smem: bfloat16 [rows, columns].
        ptr: the matrix, bfloat16, 16 bytes of whose rows are copied at once.
    """
    ROWS: gl.constexpr = smem.shape[0]
    COLUMNS: gl.constexpr = smem.shape[1]
    rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, loads))
    columns = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, loads))
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    places = ptr + rows.to(gl.int64)[:, None] * stride + columns[None, :]
    gluon_names.async_load(smem, places, mask=inside)
    async_copy.commit_group()


@gluon.jit
def _write_word(ptr, value: gl.constexpr, mine, PUBLISH: gl.constexpr):
    """Write a word by the program's first thread.

    Args:
        ptr: int32.
        PUBLISH: whether who reads the word sees all that this thread has seen written; otherwise
            the word itself is seen by all before the thread goes on.
    """
    before: gl.constexpr = "@one fence.acq_rel.gpu;" if PUBLISH else ""
    behind: gl.constexpr = "" if PUBLISH else "@one fence.acq_rel.gpu;"
    write: gl.constexpr = (
        "{ .reg .pred one; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 one, thread, $3;"
        + before
        + "@one st.relaxed.gpu.global.b32 [$1], $2;"
        + behind
        + "mov.b32 $0, 0; }"
    )
    thread = gl.where(mine, 0, 4096)
    gl.inline_asm_elementwise(
        write, "=r,l,r,r", [ptr.to(gl.int64), value, thread], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _store_codes(
    smem, codes_ptr, scales_ptr, scale_stride, first_row, num_rows, first_column, num_columns, mine,
    MAXIMUM: gl.constexpr, FLOOR: gl.constexpr, POW2: gl.constexpr,
):  # fmt: skip
    """Quantize a tile in shared memory as 1 x 128 groups.

    Args:
        smem: bfloat16 [rows, columns], zeros where the matrix has nothing.
        codes_ptr: FP8 [num_rows, num_columns], written.
        scales_ptr: float32, one line of rows for each 128 columns, scale_stride apart, written.
        num_columns: of the matrix, a multiple of 128.
        MAXIMUM: as of `tile.scale_and_multiplier`.
        FLOOR: as of `tile.scale_and_multiplier`.
        POW2: as of `tile.scale_and_multiplier`.
    """
    ROWS: gl.constexpr = smem.shape[0]
    COLUMNS: gl.constexpr = smem.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = first_column + gl.arange(0, 128, gl.SliceLayout(0, layout))
    places = rows.to(gl.int64)[:, None] * num_columns + columns[None, :]
    if mine:
        for start in gl.static_range(0, COLUMNS, 128):
            column = first_column + start
            mask = (rows < num_rows) & (column < num_columns)
            values = smem.slice(start, 128, 1).load(layout).to(gl.float32)
            amax = tile.largest(values, 1)
            scale, multiplier = tile.scale_and_multiplier(amax, MAXIMUM, FLOOR, POW2)
            codes = (values * multiplier[:, None]).to(codes_ptr.dtype.element_ty)
            gl.store(codes_ptr + (places + start), codes, mask=mask[:, None])
            gl.store(scales_ptr + (column // 128 * scale_stride + rows), scale, mask=mask)


@gluon.jit(do_not_specialize=["num_rows", "scale_stride", "early"])
def down_rows_kernel(
    x_ptr, a_ptr, sums_ptr, out_ptr, arrived_ptr, ready_ptr, codes_ptr, scales_ptr, num_rows,
    num_columns, rank, x_stride, scale_stride, chunks, early, SIGNAL: gl.constexpr,
    CHUNK: gl.constexpr, ROWS: gl.constexpr, RANKS: gl.constexpr, QUANTIZE: gl.constexpr,
    MAXIMUM: gl.constexpr, FLOOR: gl.constexpr, POW2: gl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows of x by RANKS rows of A over one chunk of K; the last program adds up.

    Args:
        x_ptr: bfloat16 [num_rows, num_columns], rows x_stride apart.
        a_ptr: bfloat16 [rank, num_columns].
        sums_ptr: float32 [chunks, num_rows, rank], written.
        out_ptr: bfloat16 [num_rows, rank], written.
        arrived_ptr: int32, zero for each tile of the result, and zero again when the kernel ends.
        ready_ptr: int32, with SIGNAL 0 before the kernel behind starts, and 1 from when what the
            kernel in front wrote can be read.
        codes_ptr: FP8 [num_rows, num_columns], x's codes, written with QUANTIZE.
        scales_ptr: float32, their scales, as of `_store_codes`.
        early: 1 where A may be read before the kernel in front has ended.
        ROWS: 16 or 64.
        RANKS: 16 or 32.
        QUANTIZE: whether x is quantized, by the programs of the first ranks.
        MAXIMUM: as of `tile.scale_and_multiplier`.
        FLOOR: as of `tile.scale_and_multiplier`.
        POW2: as of `tile.scale_and_multiplier`.
    """
    loads: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[ROWS // 16, 64 // ROWS], instr_shape=[16, 8]
    )
    row0, rank0 = gl.program_id(0) * ROWS, gl.program_id(1) * RANKS
    chunk = gl.program_id(2)
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [ROWS, CHUNK], shared)
    a_smem = gl.allocate_shared_memory(gl.bfloat16, [RANKS, CHUNK], shared)
    tells = (gl.program_id(0) == 0) & (gl.program_id(1) == 0) & (chunk == 0)
    if SIGNAL:
        _write_word(ready_ptr, 0, tells, False)
        gluon_names.barrier()  # no thread lets the kernel behind start before that
    gluon_let_next_start()
    if early == 0:
        gluon_wait_for_previous()
    _copy_tile(a_smem, a_ptr, rank0, rank, chunk * CHUNK, num_columns, num_columns, loads)
    gluon_wait_for_previous()
    if SIGNAL:
        _write_word(ready_ptr, 1, tells, True)  # in front of copies, which its fence would wait for
    _copy_tile(x_smem, x_ptr, row0, num_rows, chunk * CHUNK, num_columns, x_stride, loads)
    async_copy.wait_group(0)
    gluon_names.barrier()

    # The chunk's chain: 16 products at a time, in the order of K.
    total = gl.zeros([ROWS, RANKS], gl.float32, mma)
    for column in gl.static_range(0, CHUNK, 64):
        x = x_smem.slice(column, 64, 1).load(gl.DotOperandLayout(0, mma, 2))
        a = a_smem.slice(column, 64, 1).permute((1, 0)).load(gl.DotOperandLayout(1, mma, 2))
        total = mma_v2(x, a, total)
    rows = row0 + gl.arange(0, ROWS, gl.SliceLayout(1, mma))
    ranks = rank0 + gl.arange(0, RANKS, gl.SliceLayout(0, mma))
    mask = (rows < num_rows)[:, None] & (ranks < rank)[None, :]
    places = rows[:, None] * rank + ranks[None, :]
    size = num_rows * rank
    gl.store(sums_ptr + chunk * size + places, total, mask=mask)
    if QUANTIZE:
        _store_codes(
            x_smem, codes_ptr, scales_ptr, scale_stride, row0, num_rows, chunk * CHUNK,
            num_columns, gl.program_id(1) == 0, MAXIMUM, FLOOR, POW2,
        )  # fmt: skip

    # Every thread has stored before one of them counts the program, which releases the stores of
    # all; who counts last acquires those of the other programs.
    gluon_names.barrier()
    counter = arrived_ptr + (gl.program_id(0) * gl.num_programs(1) + gl.program_id(1))
    before = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if before == chunks - 1:
        total = gl.zeros([ROWS, RANKS], gl.float32, mma)
        for first in range(0, chunks, 8):
            # Eight loads are under way at once; past the last chunk there is nothing to add.
            parts = ()
            for i in gl.static_range(8):
                part = gl.load(
                    sums_ptr + (first + i) * size + places, mask=mask & (first + i < chunks),
                    other=0.0, cache_modifier=".cg",
                )  # fmt: skip
                parts += (part,)  # type: ignore[assignment]
            for i in gl.static_range(8):
                total += parts[i]
        gl.store(out_ptr + places, total.to(gl.bfloat16), mask=mask)
        gl.store(counter, 0)  # for the next product


def ready_word(arrived: Tensor) -> Tensor:
    """Return the word that says when what stands before the product with A can be read, int32 [1].

    Args:
        arrived: int32, as of `project_down_rows`.
    """
    return arrived[-1:]


def down_program_bytes(rows: int) -> int:
    """Return the bytes of shared memory of a program of the product with A."""
    return (_tile_rows(rows) + _RANKS) * CHUNK * 2


def project_down_rows(x: Tensor, down: Tensor, arrived: Tensor, signal: bool = False) -> Tensor:
    """Return u = x A^T, bfloat16 [T, R], as `precision.adapter.project_down`, of few rows.

    Captured in a graph, the kernel must not directly follow the one that writes A. The kernel
    behind may start before the one in front has ended: it may then read what neither writes, and
    once it has waited it may read what both wrote.

    Args:
        x: bfloat16 [T, K], its rows contiguous, T below `MOST_ROWS` and K a multiple of 16.
        down: bfloat16 [R, K], A.
        arrived: int32 zeros [256 * (R / 16) + 1], a counter for each 16 rows of x and of A, and the
            word of `ready_word`; no two products that run at once share it.
        signal: whether `ready_word` tells the kernel behind when it may read what the kernel in
            front wrote.
    """
    return _launch(x, down, arrived, signal, None, "fp32")


def project_down_quantize(
    x: Tensor, down: Tensor, arrived: Tensor, scales: str = "fp32"
) -> tuple[Tensor, QTensor]:
    """Return what `project_down_rows` returns, and x in 1 x 128 groups, from one pass.

    Args:
        x: as of `project_down_rows`, K a multiple of 128.
        down: as of `project_down_rows`.
        arrived: as of `project_down_rows`.
        scales: "fp32" or "pow2", the quantizer's scales.
    """
    rows = empty_row_groups(x.shape[0], x.shape[1], FORMATS["e4m3"][0], x.device)
    return _launch(x, down, arrived, False, rows, scales), rows


def _tile_rows(rows: int) -> int:
    """Return the rows of a program: few where there are multiprocessors for more programs."""
    return 16 if rows <= _FEW_ROWS else 64


def _launch(
    x: Tensor, down: Tensor, arrived: Tensor, signal: bool, codes: QTensor | None, scales: str
) -> Tensor:
    """Launch down_rows_kernel over rows, ranks and chunks; x stands in for codes that are not."""
    check_matrix("project_down", x, (torch.bfloat16,))
    (num_rows, num_columns), rank = x.shape, len(down)
    check_tensor("project_down", "A", down, torch.bfloat16, (rank, num_columns))
    counters = MOST_ROWS // 16 * rank // 16
    check_tensor("project_down", "arrived", arrived, torch.int32, (counters + 1,))
    multiple = 16 if codes is None else FP8_BLOCK
    if num_rows >= MOST_ROWS or num_columns % multiple or x.stride(0) % 16:
        raise ValueError(
            f"project_down: fewer than {MOST_ROWS} rows and K a multiple of {multiple}, not "
            f"{list(x.shape)} with strides {list(x.stride())}"
        )
    out = torch.empty(num_rows, rank, dtype=torch.bfloat16, device=x.device)
    if not num_rows:
        return out
    chunks, ranks, rows = cdiv(num_columns, CHUNK), min(_RANKS, rank), _tile_rows(num_rows)
    sums = torch.empty(chunks, num_rows, rank, dtype=torch.float32, device=x.device)
    constants = tile_rule("e4m3", scales)
    down_rows_kernel[(cdiv(num_rows, rows), cdiv(rank, ranks), chunks)](
        x, down, sums, out, arrived, ready_word(arrived), x if codes is None else codes.codes,
        x if codes is None else codes.scales, num_rows, num_columns, rank, x.stride(0),
        0 if codes is None else codes.scales.stride(1), chunks,
        int(torch.cuda.is_current_stream_capturing()), signal, CHUNK, rows, ranks,
        codes is not None, constants["MAXIMUM"], constants["FLOOR"], constants["POW2"],
        num_warps=4, enable_fp_fusion=False, **OVERLAPPED,
    )  # fmt: skip
    return out
