"""FP4 with one scale per row, its gradient estimator, and outliers (arXiv 2501.17116).

A row of W [N, K] is an output channel, a row of X [T, K] a token. The rule for a row with absolute
maximum a, each operation one float32 rounding:

    a  = max(|x|), at least 2**-100
    t  = a / 6, rounded to 6 significant bits
    q  = the E2M1 code nearest to x / t, ties to even, saturating
    x' = bfloat16(q * t)          exact, or Inf from 2**128 on

Six bits of a scale and two of a code are exact in BF16, so BF16 products multiply codes' values. A
value that is not finite makes all values of its row NaN.

**Outliers of activations.** Of a row's K values the m = floor((1 - quantile) K) largest and the m
smallest are clamped to the next value, and the clamped row c is rounded. What clamping took away is
multiplied by the weight too:

    X W^T  is  (q(c) + (x - c)) W^T, as two products: main W^T + rest W^T
    rest   = x where it was clamped, else 0
    main   = q(c) - c where x was clamped, else q(c)

Both are exact in BF16: q(c) is 0 or between c / 2 and 2 c, so their difference has no more bits
than they have. The threshold is that of a token. That of a tensor would depend on its other tokens,
and sampler and trainer see a token among different ones.

**Gradient estimator.** Rounding a weight has the derivative 0. Between codes l and l + d, the
smooth function f stands for it, whose derivative multiplies the gradient of the rounded weight:

    u     = 2 (|x| - l) / d - 1                               in [-1, 1], of |x| = |w| / t
    f(x)  = l + d / 2 * (1 + sign(u) |u|**(1 / 5))
    f'(x) = |u|**(-4 / 5) / 5, at most 3                      3 for |u| < 15**(-5 / 4)

t is a constant of f. The power is exp(-4 / 5 log |u|) from IEEE operations (`precision.exact`), so
rows have the same bits wherever they are rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.precision.block_formats import E2M1, Grid, on_grid, over
from jetrl.precision.exact import exp, log_positive
from jetrl.precision.quantize import VALUES_AT_ONCE, finite_maximum, row_parts

_STEEPNESS = 5  # k of the paper: f has the slope 1 / k at a code
_MOST = 3.0  # of the derivative
_SCALES = Grid(mantissa=5, lowest=-126, highest=127, maximum=torch.finfo(torch.float32).max)
_SMALLEST = 2.0**-20  # of |u|, below which the derivative has its limit


def fp4_values(x: Tensor) -> Tensor:
    """Return the values of x [M, K], any floating dtype, in FP4 with a scale per row: bfloat16."""
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    for rows in row_parts(x):
        part = x[rows].float()
        scales = _scales(part)
        out[rows] = on_grid(part / scales, E2M1) * scales
    return out


def clamped(x: Tensor, quantile: float) -> Tensor:
    """Return x [T, K] with the outliers of each row clamped; NaN for values that are not finite."""
    count = num_outliers(x.shape[1], quantile)
    if not count:
        return x
    high = x.topk(count + 1, 1).values[:, -1:]
    low = x.topk(count + 1, 1, largest=False).values[:, -1:]
    return x.clamp(low, high) + (x - x)


def num_outliers(columns: int, quantile: float) -> int:
    """Return how many values of a row are clamped at each end."""
    return int(round((1 - quantile) * columns, 6))


def clamped_operands(x: Tensor, quantile: float) -> tuple[Tensor, Tensor]:
    """Return main and rest of X, bfloat16 [T, K], whose products with a weight are added."""
    inside = clamped(x, quantile)
    outlier = x != inside
    rounded = fp4_values(inside)
    return torch.where(outlier, rounded - inside, rounded), torch.where(outlier, x, 0.0)


def estimate(gradient: Tensor, weight: Tensor) -> None:
    """Multiply the gradient of a rounded weight, float32 [N, K], by f' of the weight, in place."""
    for rows in row_parts(weight, at_once=VALUES_AT_ONCE // 4):  # of float64 copies
        part = weight[rows].float()
        gradient[rows] *= derivative(part / _scales(part))


def derivative(x: Tensor) -> Tensor:
    """Return f' of a weight over its scale, float32 of any shape; beyond code 6 that at 6."""
    magnitude = x.abs().clamp(max=E2M1.maximum)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    place = magnitude / step  # codes are whole numbers
    u = (2 * (place - place.floor()) - 1).abs()
    logarithm = log_positive(u.double().clamp(min=_SMALLEST))
    power = exp((logarithm * (1 / _STEEPNESS - 1)).float())
    return over(power, _STEEPNESS).clamp(max=_MOST)


def _scales(x: Tensor) -> Tensor:
    """Return t of each row of float32 values, [M, 1]."""
    return on_grid(over(finite_maximum(x.abs().amax(1, keepdim=True)), E2M1.maximum), _SCALES)
