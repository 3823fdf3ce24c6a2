"""The Hopper forms of quantizer, GEMM, adapter and gradient sum (`jetrl.precision.backend`)."""
