"""GPU kernels for quantization, GEMMs and gradient sums that do not need Hopper."""
