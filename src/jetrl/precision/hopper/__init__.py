"""Hopper kernels for GEMMs and adapters (`jetrl.precision.backend`)."""

SHARED_MEMORY = 227 * 1024  # bytes per thread block
MULTIPROCESSORS = 132  # SMs of an H100 or H200 SXM, for which tile sizes are chosen
