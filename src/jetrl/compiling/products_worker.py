"""A process that computes products of given sizes on the GPU, for the kernels that they need.

    python src/jetrl/compiling/products_worker.py cuda:0 256x6144x4096 256x4096x4096

Each is computed once through DeepGEMM's own call, of operands with any numbers, and DeepGEMM
compiles the kernel into its cache on disk where it is not there yet. A product that cannot be
computed is printed with the reason, the others are computed, and the process ends with 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import torch

from jetrl.precision.hopper.gemm import fp8_matmul_hopper
from jetrl.precision.layout import empty_row_groups, empty_weight
from jetrl.precision.quantize import FORMATS

_FP8 = FORMATS["e4m3"][0]


def multiply(device: str, rows: int, outputs: int, inputs: int) -> None:
    """Compute a product of a size by DeepGEMM, and free its memory."""
    left = empty_row_groups(rows, inputs, _FP8, device)
    weight = empty_weight(outputs, inputs, _FP8, device)
    fp8_matmul_hopper(left, weight, backend="deep_gemm")
    del left, weight
    torch.cuda.empty_cache()  # The run reads its weights into the memory of the same GPU.


def compute(
    device: str, sizes: Iterable[str], product: Callable[[str, int, int, int], None] = multiply
) -> int:
    """Compute products, and return the exit status of the process.

    Args:
        sizes: Of each product the rows of the left operand, the rows of the weight and the columns
            of both, with an x between them.
    """
    status = 0
    for size in sizes:
        rows, outputs, inputs = map(int, size.split("x"))
        try:
            product(device, rows, outputs, inputs)
        except Exception as error:  # The run compiles this kernel, and says what is wrong.
            print(f"{size}: {error}", flush=True)
            status = 1
    return status


def main() -> int:
    """Compute the products that the command line names."""
    device, *sizes = sys.argv[1:]
    torch.cuda.set_device(device)
    return compute(device, sizes)


if __name__ == "__main__":
    sys.exit(main())
