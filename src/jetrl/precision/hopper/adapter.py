"""Both LoRA GEMMs on Hopper (`precision.adapter`), batch-invariant.

The GEMM with A sums over K in chunks of 512, each a chain of tensor-core products from zero; chunks
are added in float32 in order. For many rows, one program computes all chunks. For few rows, each
chunk has its own program, and the last to finish adds the sums in that order and rounds once.

In decode, this GEMM is on the critical path of every linear layer. In a captured graph, it
prefetches A before the previous kernel has ended, and the next kernel can start at once. With
`SIGNAL`, a flag tells that kernel when the output of the previous kernel is ready. The programs of
the first ranks also quantize x if needed.

The GEMM with B sums over the rank in one chain from zero, 16 at a time. y and u B^T are rounded to
bfloat16 separately, and their sum is rounded again. GEMMs with few rows do so in their epilogue.
mma.sync and wgmma give the same bits (tests/gpu/test_tensor_cores.py).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jetrl.precision.quantize import AMAX_FLOOR, FORMATS, QTensor
from jetrl.precision.triton import gluon_names, tile
from jetrl.precision.triton.adapter import CHUNK, project_down_whole
from jetrl.precision.triton.launch import gluon_let_next_start, gluon_wait_for_previous, overlapped
from jetrl.precision.triton.layout import cdiv, empty_row_groups, is_ragged
from jetrl.settings.presets import DEFAULT_SCALES

LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
MOST_RANKS = 64  # maximum rank of a part that fits next to the stages of the GEMM


@dataclass(frozen=True)
class AdapterOperands:
    """Operands of the adapter GEMM u B^T that is added to the output of a linear layer.

    Attributes:
        u: bfloat16 [T, P * R], x A^T.
        up: bfloat16 [N, R], s B.
        columns: int32 [N / 64 rounded up], first column of u per 64 outputs of y, or -1.
        ready: int32 [1], nonzero when X is ready (`ready_word`); None: wait for u instead.
    """

    u: Tensor
    up: Tensor
    columns: Tensor
    ready: Tensor | None = None

    def descriptors(self, box: int, block_n: int) -> tuple[TensorDescriptor, TensorDescriptor]:
        """Return TMA descriptors of u, with boxes of `box` rows, and of B, of `block_n` rows."""
        (rows, width), (n, rank) = self.u.shape, self.up.shape
        return (
            TensorDescriptor(self.u, [rows, width], [self.u.stride(0), 1], [box, 16], LAYOUT),
            TensorDescriptor(self.up, [n, rank], [rank, 1], [block_n, 16], LAYOUT),
        )


@gluon.jit
def wait_for_rows(ready_ptr, SIGNALLED: gl.constexpr):
    """Wait until X is ready: for the flag at `ready_ptr`, or for the end of the previous kernel.

    The fence orders later TMA loads after the flag, since they use the async proxy.
    """
    if SIGNALLED:
        gl.inline_asm_elementwise(
            """
            {
            .reg .pred none;
            .reg .b32 word;
            again:
            ld.acquire.gpu.global.b32 word, [$1];
            setp.eq.b32 none, word, 0;
            @none bra again;
            fence.proxy.async.global;
            mov.b32 $0, word;
            }
            """,
            "=r,l",
            [ready_ptr.to(gl.int64)],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        gluon_wait_for_previous()


@gluon.jit
def load_adapter(
    u_desc,
    b_desc,
    columns_ptr,
    u_smem,
    b_smem,
    beside,
    m0,
    n0,
    N,
    early,
    PARTS: gl.constexpr,
    BOX_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    RANK: gl.constexpr,
):
    """Load the tiles of B, wait for the kernel that computes u, and load its tiles (one warp).

    Args:
        u_desc: bfloat16 [M, P * R], u in boxes of [BOX_M, 16].
        b_desc: bfloat16 [N, RANK], B in boxes of [BLOCK_N, 16].
        columns_ptr: int32 [N / 64 rounded up], first column of u per 64 rows of B, or -1.
        n0: first row of B of the program; a part does not cross a multiple of 64.
        early: 1 to read B before the previous kernel has ended.
    """
    STEPS: gl.constexpr = RANK // 16
    if early == 0:
        gluon_wait_for_previous()
    bar = beside.index(0)
    mbarrier.expect(bar, PARTS * STEPS * (u_desc.block_type.nbytes + b_desc.block_type.nbytes))
    for part in gl.static_range(PARTS):
        for i in gl.static_range(STEPS):
            place = b_smem.index(part * STEPS + i)
            gluon_names.tma_load(b_desc, [n0 + part * BLOCK_N, i * 16], bar, place)
    firsts = first_columns(columns_ptr, n0, N, PARTS, BLOCK_N)
    gluon_wait_for_previous()
    for part in gl.static_range(PARTS):
        first = gl.maximum(firsts[part], 0)
        for i in gl.static_range(STEPS):
            place = u_smem.index(part * STEPS + i).slice(0, BOX_M, 0)
            gluon_names.tma_load(u_desc, [m0, first + i * 16], bar, place)


@gluon.jit
def first_columns(columns_ptr, n0, N, PARTS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Load the first column of u, or -1, for each of PARTS tiles of BLOCK_N columns of y."""
    firsts = ()
    for part in gl.static_range(PARTS):
        first = gl.load(columns_ptr + gl.minimum(n0 + part * BLOCK_N, N - 1) // 64)
        firsts += (first,)  # type: ignore[assignment]
    return firsts


@gluon.jit
def with_adapter(total, u_smem, b_smem, first, part: gl.constexpr, STEPS: gl.constexpr):
    """Return a tile of y plus the adapter product, bfloat16.

    Args:
        total: float32 [BLOCK_M, BLOCK_N], output tile of the layer, in a wgmma layout.
        first: first column of u for this tile, or -1 if there is no adapter.
    """
    BLOCK_M: gl.constexpr = total.shape[0]
    BLOCK_N: gl.constexpr = total.shape[1]
    product: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=total.type.layout.warps_per_cta, instr_shape=[16, 8]
    )
    added = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, product)
    for i in gl.static_range(STEPS):
        u = u_smem.index(part * STEPS + i).load(gl.DotOperandLayout(0, product, 2))
        b = b_smem.index(part * STEPS + i).permute((1, 0)).load(gl.DotOperandLayout(1, product, 2))
        added = mma_v2(u, b, added)
    added = gl.convert_layout(added, total.type.layout, assert_trivial=True).to(gl.bfloat16)
    y = total.to(gl.bfloat16)
    both = (y.to(gl.float32) + added.to(gl.float32)).to(gl.bfloat16)
    return gl.where(first >= 0, both, y)


MOST_ROWS = 4096  # `project_down_rows` takes fewer rows than this
_FEW_ROWS = 256  # up to this many rows, a program has 16
_RANKS = 32  # rows of A per program
DOWN_PROGRAM_REGISTERS = 128 * 64  # maximum for a program of 16 rows: 128 threads of 64


@gluon.jit
def _copy_tile(
    smem, ptr, first_row, num_rows, first_column, num_columns, stride, loads: gl.constexpr
):
    """Start copying a tile of a matrix to shared memory, with zeros outside the matrix."""
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
    """Store a word from the first thread of a program, with a fence before (PUBLISH) or after."""
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
    smem,
    codes_ptr,
    scales_ptr,
    scale_stride,
    first_row,
    num_rows,
    first_column,
    num_columns,
    mine,
    RAGGED: gl.constexpr,
    MAXIMUM: gl.constexpr,
    FLOOR: gl.constexpr,
    POW2: gl.constexpr,
):
    """Quantize a tile in shared memory in 1 x 128 groups."""
    ROWS: gl.constexpr = smem.shape[0]
    COLUMNS: gl.constexpr = smem.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = first_column + gl.arange(0, 128, gl.SliceLayout(0, layout))
    width = (num_columns + 127) // 128 * 128 if RAGGED else num_columns
    places = rows.to(gl.int64)[:, None] * width + columns[None, :]
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
    x_ptr,
    a_ptr,
    sums_ptr,
    out_ptr,
    arrived_ptr,
    ready_ptr,
    codes_ptr,
    scales_ptr,
    num_rows,
    num_columns,
    rank,
    x_stride,
    scale_stride,
    chunks,
    early,
    SIGNAL: gl.constexpr,
    CHUNK: gl.constexpr,
    ROWS: gl.constexpr,
    RANKS: gl.constexpr,
    QUANTIZE: gl.constexpr,
    RAGGED: gl.constexpr,
    MAXIMUM: gl.constexpr,
    FLOOR: gl.constexpr,
    POW2: gl.constexpr,
):
    """Multiply ROWS rows of x by RANKS rows of A over a chunk of K; the last program reduces.

    Args:
        x_ptr: bfloat16 [num_rows, num_columns], with row stride x_stride.
        a_ptr: bfloat16 [rank, num_columns].
        sums_ptr: float32 [chunks, num_rows, rank], written.
        out_ptr: bfloat16 [num_rows, rank], written.
        arrived_ptr: int32 counter per output tile, zero before and after the kernel.
        ready_ptr: int32; if SIGNAL, 0 before the next kernel starts, and 1 once it can read x.
        early: 1 to read A before the previous kernel has ended.
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
        gluon_names.barrier()  # no thread starts the next kernel before the flag is cleared
    gluon_let_next_start()
    if early == 0:
        gluon_wait_for_previous()
    _copy_tile(a_smem, a_ptr, rank0, rank, chunk * CHUNK, num_columns, num_columns, loads)
    gluon_wait_for_previous()
    if SIGNAL:
        _write_word(ready_ptr, 1, tells, True)  # before the copies, which its fence would wait for
    _copy_tile(x_smem, x_ptr, row0, num_rows, chunk * CHUNK, num_columns, x_stride, loads)
    async_copy.wait_group(0)
    gluon_names.barrier()

    # Multiply the chunk, 16 products at a time in the order of K.
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
            x_smem,
            codes_ptr,
            scales_ptr,
            scale_stride,
            row0,
            num_rows,
            chunk * CHUNK,
            num_columns,
            gl.program_id(1) == 0,
            RAGGED,
            MAXIMUM,
            FLOOR,
            POW2,
        )

    # All threads store before one of them counts the program, which releases their stores. The last
    # program to count acquires the stores of the others.
    gluon_names.barrier()
    counter = arrived_ptr + (gl.program_id(0) * gl.num_programs(1) + gl.program_id(1))
    before = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if before == chunks - 1:
        total = gl.zeros([ROWS, RANKS], gl.float32, mma)
        for first in range(0, chunks, 8):
            # Keep eight loads in flight; chunks past the last add zeros.
            parts = ()
            for i in gl.static_range(8):
                part = gl.load(
                    sums_ptr + (first + i) * size + places,
                    mask=mask & (first + i < chunks),
                    other=0.0,
                    cache_modifier=".cg",
                )
                parts += (part,)  # type: ignore[assignment]
            for i in gl.static_range(8):
                total += parts[i]
        gl.store(out_ptr + places, total.to(gl.bfloat16), mask=mask)
        gl.store(counter, 0)  # for the next call


def ready_word(arrived: Tensor) -> Tensor:
    """Return the flag, int32 [1], that signals when the input of the GEMM with A is ready."""
    return arrived[-1:]


def down_program_bytes(rows: int) -> int:
    """Return the shared memory of a program of `project_down_rows`, in bytes."""
    return (_tile_rows(rows) + _RANKS) * CHUNK * 2


def project_down_rows(
    x: Tensor,
    down: Tensor,
    arrived: Tensor,
    signal: bool = False,
    codes: QTensor | None = None,
    scales: str = DEFAULT_SCALES,
) -> Tensor:
    """Return u = x A^T, bfloat16 [T, R], equal to `precision.adapter.project_down`, for few rows.

    In a captured graph, this kernel must not directly follow the kernel that writes A. The next
    kernel can start before the previous one has ended: until it waits, it may read only what
    neither the previous kernel nor this one writes.

    Args:
        x: bfloat16 [T, K], each row contiguous, T below `MOST_ROWS` and K a multiple of 16.
        down: bfloat16 [R, K], A.
        arrived: int32 zeros [256 * (R / 16) + 1], one counter per 16 rows of x and of A, then the
            flag of `ready_word`; concurrent calls must not share it.
        signal: whether to set `ready_word` once the output of the previous kernel is ready.
        codes: 1 x 128 groups to quantize x into, with `scales`; None: x is not quantized.
    """
    (num_rows, num_columns), rank = x.shape, len(down)
    assert num_rows < MOST_ROWS, f"{num_rows} rows"
    assert num_columns == down.shape[1], f"{list(x.shape)} and {list(down.shape)}"
    assert not num_columns % 16, f"{num_columns} columns"
    assert (x.stride(0) % 16, x.stride(1)) == (0, 1), f"strides {list(x.stride())}"
    assert len(arrived) == MOST_ROWS // 16 * rank // 16 + 1, f"{len(arrived)} counters"
    out = torch.empty(num_rows, rank, dtype=torch.bfloat16, device=x.device)
    if not num_rows:
        return out
    chunks, ranks, rows = cdiv(num_columns, CHUNK), min(_RANKS, rank), _tile_rows(num_rows)
    sums = torch.empty(chunks, num_rows, rank, dtype=torch.float32, device=x.device)
    down_rows_kernel[(cdiv(num_rows, rows), cdiv(rank, ranks), chunks)](
        x,
        down,
        sums,
        out,
        arrived,
        ready_word(arrived),
        x if codes is None else codes.codes,
        x if codes is None else codes.scales,
        num_rows,
        num_columns,
        rank,
        x.stride(0),
        0 if codes is None else codes.scales.stride(1),
        chunks,
        int(torch.cuda.is_current_stream_capturing()),
        signal,
        CHUNK,
        rows,
        ranks,
        codes is not None,
        is_ragged(num_columns),
        FORMATS["e4m3"][1],
        AMAX_FLOOR,
        scales == "pow2",
        num_warps=4,
        enable_fp_fusion=False,
        **overlapped(),
    )
    return out


def project_down_quantize(
    x: Tensor, down: Tensor, arrived: Tensor, scales: str = DEFAULT_SCALES
) -> tuple[Tensor, QTensor]:
    """Return u as `project_down_rows` does, and x in 1 x 128 groups, in one pass."""
    codes = empty_row_groups(x.shape[0], x.shape[1], FORMATS["e4m3"][0], x.device)
    return project_down_rows(x, down, arrived, codes=codes, scales=scales), codes


def _tile_rows(rows: int) -> int:
    """Return the rows per program: fewer if more programs still fit the SMs."""
    return 16 if rows <= _FEW_ROWS else 64


def project_down_hopper(x: Tensor, down: Tensor, arrived: Tensor) -> Tensor:
    """`precision.adapter.project_down` on Hopper."""
    if len(x) < MOST_ROWS:
        return project_down_rows(x, down, arrived)
    return project_down_whole(x, down)
