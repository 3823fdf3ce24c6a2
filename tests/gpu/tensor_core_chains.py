"""A chain of tensor-core products by mma.sync or by wgmma, for test_tensor_cores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jetrl.precision.triton.gluon_names import barrier


@gluon.jit
def chain_kernel(
    a_ptr, b_ptr, c_ptr, out_ptr, K: gl.constexpr, N: gl.constexpr, WGMMA: gl.constexpr
):  # fmt: skip
    """out [64, N] = c + a [64, K] @ b [N, K]^T, one problem a program."""
    M: gl.constexpr = 64
    loads: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128 if K >= 64 else 2 * K, element_bitwidth=16, rank=2
    )
    if WGMMA:
        mma: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16]
        )
    else:
        mma: gl.constexpr = gl.NVMMADistributedLayout(
            version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8]
        )
    m = gl.arange(0, M, gl.SliceLayout(1, loads))
    n = gl.arange(0, N, gl.SliceLayout(1, loads))
    k = gl.arange(0, K, gl.SliceLayout(0, loads))
    a = gl.load(a_ptr + gl.program_id(0) * M * K + m[:, None] * K + k[None, :])
    b = gl.load(b_ptr + gl.program_id(0) * N * K + n[:, None] * K + k[None, :])
    a_smem = gl.allocate_shared_memory(a.dtype, [M, K], shared)
    b_smem = gl.allocate_shared_memory(a.dtype, [N, K], shared)
    a_smem.store(a)
    b_smem.store(b)
    fence_async_shared()
    barrier()
    rows = gl.arange(0, M, gl.SliceLayout(1, mma))
    columns = gl.arange(0, N, gl.SliceLayout(0, mma))
    at = gl.program_id(0) * M * N + rows[:, None] * N + columns[None, :]
    c = gl.load(c_ptr + at)
    left = a_smem.load(gl.DotOperandLayout(0, mma, 2))
    if WGMMA:
        c = warpgroup_mma(left, b_smem.permute((1, 0)), c, is_async=True)
        c = warpgroup_mma_wait(0, deps=(c,))
    else:
        c = mma_v2(left, b_smem.permute((1, 0)).load(gl.DotOperandLayout(1, mma, 2)), c)
    gl.store(out_ptr + at, c)
