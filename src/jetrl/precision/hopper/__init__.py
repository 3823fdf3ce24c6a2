"""The Hopper forms of GEMM and adapter (`jetrl.precision.backend`)."""

SHARED_MEMORY = 227 * 1024  # bytes per thread block
MULTIPROCESSORS = 132  # SMs of an H100 or H200 SXM, for which products are cut into tiles
