"""NVFP4: weights of a frozen base in 4.5 bits a value, and their widening to BF16.

A value is a code of E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives) times an E4M3 scale, one
for each 16 values along K, times one float32 scale of the whole matrix. E2M1 times E4M3 has at most
five significant bits and is **exact in BF16**. So a product with such a weight is a product of BF16
values whose float32 sum is multiplied by the matrix's scale, once:

    widened = code * scale                        exact in BF16
    Y = bfloat16(float32(X @ widened^T) * s)      X is BF16: activations are not rounded to 4 bits

The rule, for a matrix with absolute maximum `A` and a group of 16 with absolute maximum `a`, each
operation a float32 one, rounded once:

    s  = max(A, 2**-100) / (6 * 448)              one of the matrix
    t  = e4m3(a / (6 * s)), at least 2**-9        one of the group; 2**-9 is E4M3's smallest
    q  = e2m1(x / (t * s))                        round to nearest, ties to even codes, saturating
    x' = (q * t) * s                              the product in brackets is exact

A group of zeros has codes 0 and the scale 2**-9; a matrix of zeros has a finite `s`. The sign of a
value that rounds to zero is kept. If any value is not finite, `s` is NaN, and all values come back
as NaN: neither E2M1 nor the scales of other groups could say so.

E4M3's range and casts are those of `precision.quantize`; E2M1's are here, since torch has no such
type and nothing else in jetrl uses it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.precision.quantize import AMAX_FLOOR, FORMATS

NVFP4_GROUP = 16
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MAXIMUM = _VALUES[-1]
# Between neighbours, the value from which on the upper one is nearer, and whether that value itself
# goes up: a tie goes to the code that is even.
_TIES = tuple(
    ((low + high) / 2, code % 2 == 1)
    for code, (low, high) in enumerate(itertools.pairwise(_VALUES))
)
_SCALE_TYPE, _SCALE_MAXIMUM = FORMATS["e4m3"]
_SMALLEST_SCALE = 2.0**-9
_VALUES_AT_ONCE = 2**24  # values that are quantized together, so that float32 copies stay small


@dataclass(frozen=True)
class NVFP4Tensor:
    """A matrix [N, K] in NVFP4, as checkpoints keep it.

    Attributes:
        codes: uint8 [N, K / 2], E2M1 codes, two to a byte: the value of even K in the lower bits.
        scales: float8_e4m3fn [N, K / 16], of the groups along K.
        scale: float32 [], of the matrix; values are multiplied by it. Or [P], one of each of P
            matrices that are stacked along N.
        rows: The rows of each of these P matrices; empty where `scale` is one.
    """

    codes: Tensor
    scales: Tensor
    scale: Tensor
    rows: tuple[int, ...] = ()

    @property
    def shape(self) -> torch.Size:
        """The shape [N, K] of the matrix."""
        return torch.Size((self.codes.shape[0], self.codes.shape[1] * 2))

    @property
    def row_scales(self) -> Tensor:
        """The scale of the matrix, float32 []; or that of each row, [N], where they differ."""
        if not self.rows:
            return self.scale
        return self.scale.repeat_interleave(torch.tensor(self.rows, device=self.scale.device))


def stacked_nvfp4(parts: Sequence[NVFP4Tensor]) -> NVFP4Tensor:
    """Return matrices stacked along N, as a copy: the same codes under the same scales.

    Where all have one scale, so has the result.

    Args:
        parts: One or more matrices [N, K] with one scale each, of one K, on one device.
    """
    codes = torch.cat([part.codes for part in parts])
    scales = torch.cat([part.scales.view(torch.uint8) for part in parts]).view(_SCALE_TYPE)
    scale = torch.stack([part.scale for part in parts])
    if bool((scale == scale[0]).all()):
        return NVFP4Tensor(codes, scales, scale[0])
    return NVFP4Tensor(codes, scales, scale, tuple(len(part.codes) for part in parts))


def quantize_nvfp4(x: Tensor) -> NVFP4Tensor:
    """Return a matrix in NVFP4, by the rule above; the same on every device.

    Args:
        x: bfloat16, float16 or float32 [N, K], K a multiple of 16.

    Raises:
        ValueError: Another dtype or shape.
    """
    if x.dim() != 2 or not x.dtype.is_floating_point or x.element_size() < 2:
        raise ValueError(f"quantize_nvfp4 takes [N, K] of bf16/fp16/fp32, not {x.dtype} {x.shape}")
    if x.shape[1] % NVFP4_GROUP:
        raise ValueError(
            f"NVFP4 needs columns in multiples of {NVFP4_GROUP}, and this matrix is {list(x.shape)}"
        )
    low, high = x.aminmax() if x.numel() else (x.new_zeros(()), x.new_zeros(()))
    largest = torch.maximum(-low, high).float()
    # Not finite whatever the value: Inf - Inf and NaN - NaN are NaN.
    floored = torch.maximum(largest, largest.new_tensor(AMAX_FLOOR)) + (largest - largest)
    scale = floored / floored.new_tensor(_MAXIMUM * _SCALE_MAXIMUM)
    codes = torch.empty(x.shape[0], x.shape[1] // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(x.shape[0], x.shape[1] // NVFP4_GROUP, dtype=_SCALE_TYPE, device=x.device)
    rows = max(1, _VALUES_AT_ONCE // max(x.shape[1], 1))
    for start in range(0, x.shape[0], rows):
        part = slice(start, start + rows)
        codes[part], scales[part] = _quantize_rows(x[part].float(), scale)
    return NVFP4Tensor(codes, scales, scale)


def _quantize_rows(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the packed codes and the scales of float32 rows, under the matrix's scale."""
    groups = x.unflatten(1, (-1, NVFP4_GROUP))
    # Tensor by tensor: with a Python number torch multiplies by a rounded reciprocal instead.
    amax = groups.abs().amax(2) / (scale * _MAXIMUM)
    scales = amax.clamp(_SMALLEST_SCALE, _SCALE_MAXIMUM).to(_SCALE_TYPE)
    codes = e2m1_codes(groups / (scales.float() * scale)[:, :, None]).flatten(1)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales


def e2m1_codes(x: Tensor) -> Tensor:
    """Return the E2M1 codes nearest to float32 values, uint8 in 0 to 15.

    Ties go to even codes, values beyond 6 become 6, and the sign is bit 3. NaN becomes 0.
    """
    magnitude = x.abs()
    codes = torch.zeros_like(x, dtype=torch.uint8)
    for tie, goes_up in _TIES:
        codes += magnitude >= tie if goes_up else magnitude > tie
    return codes | torch.signbit(x).to(torch.uint8) << 3


def unpacked_codes(q: NVFP4Tensor) -> Tensor:
    """Return the E2M1 codes one to a byte, uint8 [N, K]."""
    return torch.stack((q.codes & 15, q.codes >> 4), 2).flatten(1)


def widened(q: NVFP4Tensor) -> Tensor:
    """Return codes times group scales, bfloat16 [N, K]; exact, without the matrix's scale."""
    table = torch.tensor(_VALUES + tuple(-value for value in _VALUES), device=q.codes.device)
    values = table.index_select(0, unpacked_codes(q).flatten().int()).view(q.shape)
    scales = q.scales.float().repeat_interleave(NVFP4_GROUP, 1)
    return (values * scales).bfloat16()


def dequantize_nvfp4(q: NVFP4Tensor) -> Tensor:
    """Return float32 [N, K]: the widened values times their matrix's scale, one float32 product."""
    return widened(q).float() * q.row_scales[..., None]
