"""Kernels in plain Triton with the bits of the CPU references, for any NVIDIA GPU from 8.0 on."""
