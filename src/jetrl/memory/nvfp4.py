"""Bytes that a product with a weight in NVFP4 takes on a GPU while it is made.

A product of many rows reads the weight widened to BF16, which is made for it alone
(`precision.hopper.nvfp4`), and so does DGrad of any number of rows. Float32 sums are held beside it
in two cases: the sum over K is added in parts (`nvfp4_layout.parts_of`), or the weight is stacked
of matrices that have scales of their own in the model's directory, such as those of Q, K and V.
Whether these scales really differ is known when the files are read; the plan takes it that they do.
"""

from __future__ import annotations

from jetrl.models.families import ModelConfig, parameter_shapes
from jetrl.models.hf_names import stored_tensors
from jetrl.models.nvfp4_files import is_nvfp4
from jetrl.precision.nvfp4 import FEW_ROWS, ROWS_AT_ONCE, SCALED_ROWS_AT_ONCE, parts_of
from jetrl.precision.plan import PrecisionPlan


def nvfp4_product_bytes(
    config: ModelConfig, plan: PrecisionPlan, tokens: int, backward: bool = False
) -> int:
    """Return the most bytes that one product of a layer takes: the BF16 weight and float32 sums.

    Args:
        config: The model's shape; of a directory in NVFP4 with its `quantization_config`.
        plan: The model's precision plan. Without a base in NVFP4 a product takes nothing.
        tokens: Tokens of the forward or backward; FProp of few reads the codes themselves.
    """
    if plan.base != "nvfp4" or (tokens <= FEW_ROWS and not backward):
        return 0
    shapes, coded = parameter_shapes(config), is_nvfp4(config)
    sizes = []
    for name, parts in stored_tensors(config).items():
        if parts[0].linear_weight and name.startswith("layers.0."):
            num_rows, num_columns = shapes[name]
            own_scales = coded and len(parts) > 1
            sums = sums_bytes(num_rows, num_columns, tokens, own_scales)
            sizes.append(2 * num_rows * num_columns + sums)
    return max(sizes)


def sums_bytes(num_rows: int, num_columns: int, tokens: int, own_scales: bool) -> int:
    """Return the most bytes of float32 sums that are held in FProp or DGrad of one weight.

    Args:
        own_scales: Whether the weight is stacked of matrices with scales of their own.
    """
    rows, fprop = min(tokens, ROWS_AT_ONCE), 0
    if tokens > FEW_ROWS:
        # Beside the sums, the product of the next part, or the sums of the piece of X before.
        in_parts = parts_of(num_rows, num_columns)[0] > 1
        scaled = 4 * min(tokens, 2 * SCALED_ROWS_AT_ONCE) * num_rows if own_scales else 0
        fprop = 8 * rows * num_rows if in_parts else scaled
    # DGrad holds the sums, and the product of one of the matrices.
    return max(fprop, 8 * rows * num_columns if own_scales else 0)
