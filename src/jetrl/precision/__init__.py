"""What is FP8, by which rule, on which GEMM. `docs/precision.md` is the long form."""

from jetrl.precision.plan import PrecisionPlan
from jetrl.precision.quantize import QTensor, dequantize, quantize

__all__ = ["PrecisionPlan", "QTensor", "dequantize", "quantize"]
