"""Causal attention over quantized or BF16 keys and values: reference and Hopper kernels."""
