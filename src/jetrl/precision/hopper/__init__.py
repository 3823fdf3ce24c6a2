"""The Hopper forms of GEMM and adapter (`jetrl.precision.backend`)."""
