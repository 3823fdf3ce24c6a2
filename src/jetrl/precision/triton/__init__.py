"""The Triton kernels of quantizer, products and gradient sum that need no Hopper GPU."""
