"""Causal attention over stored keys and values: the reference, and the kernels for Hopper."""
