"""Operations other than GEMMs, each with a PyTorch reference and GPU kernels."""
