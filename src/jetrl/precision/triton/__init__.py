"""The GPU forms of quantizer, products and gradient sum that need no Hopper."""
