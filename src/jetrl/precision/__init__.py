"""Numbers: which are FP8, by which rule, multiplied by which GEMM (`docs/precision.md`)."""

from jetrl.precision.plan import PrecisionPlan
from jetrl.precision.quantize import QTensor, dequantize, quantize

__all__ = ["PrecisionPlan", "QTensor", "dequantize", "quantize"]
