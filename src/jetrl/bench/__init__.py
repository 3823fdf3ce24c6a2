"""The benchmarks of `jetrl bench`: one module each, and what they share (`_timing`, `_flow`)."""
