"""The Hopper forms of quantizer, GEMM and gradient sum, and what their kernels share.

The reference says what is right; on a CUDA tensor it hands over to the kernel of the same
signature, imported on first use, since a CPU install has no Triton. There is no third way: a device
is the CPU or a Hopper card, or it is refused at start.
"""
