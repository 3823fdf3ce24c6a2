"""The operations next to the GEMM, each with its reference and its Hopper form."""
