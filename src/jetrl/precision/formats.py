"""The number formats: one record per format, so that no other code compares format names.

A `Format` has the properties of a format (bytes, divisor of weight dimensions, name in messages)
and the operations of a linear layer: round the weight, quantize X, multiply. Each dispatches to the
backend of the tensor's device. dY for a weight in codes is `precision.gradient_formats`.

`number_format` returns the record of a name in a plan or in settings, `format_of` that of a weight.
To add a format, add a record here and its name to `settings.presets`. `Emulated` formats round
operands to four bits (`precision.block_formats`, `precision.fp4`) and multiply their values in
BF16.

Legend: T tokens, K input features, N output features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as replaced
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from jetrl.errors import UserError
from jetrl.precision.backend import arithmetic_of
from jetrl.precision.block_formats import (
    BLOCK_ROTATION,
    NVFP4_ROWS,
    NVFP4_SQUARES,
    BlockFormat,
    block_values,
)
from jetrl.precision.fp4 import clamped, clamped_operands, estimate, fp4_values
from jetrl.precision.gemm import bf16_matmul, coded_matmul, fp8_matmul, free_matmul
from jetrl.precision.int8 import int8_matmul, int8_rows, int8_squares_turned, int8_turned
from jetrl.precision.int8_planes import planes_of_rows
from jetrl.precision.nvfp4 import NVFP4_GROUP, NVFP4Weight, quantize_nvfp4
from jetrl.precision.nvfp4_products import in_device_order, nvfp4_dgrad, nvfp4_matmul
from jetrl.precision.quantize import (
    FORMATS,
    FP8_BLOCK,
    INT8_CODES,
    ROTATION,
    CodeFormat,
    Planes,
    QTensor,
    dequantize,
    empty_int8_rows,
    quantize,
)
from jetrl.settings import presets
from jetrl.settings.presets import DEFAULT_SCALES, ScaleRule, WeightBlock

# FP8 in 128 x 128 groups, INT8 rows, rows in two INT8 planes, NVFP4, or BF16.
StoredWeight = QTensor | Planes | NVFP4Weight | Tensor
GEMMInput = QTensor | Tensor  # X or dY as a GEMM reads it: codes, or BF16 values
DrawKey = tuple[int | str, ...]  # of stochastic rounding: seed, update, micro-batch, tensor


class Rounding(NamedTuple):
    """The rounding of a weight for one side; two sides with equal roundings share a tensor.

    Attributes:
        scales: The format of scales; "fp32" if there are none.
        through_bf16: Whether the master weight is rounded to BF16 before it is quantized.
        dithered: Whether BF16 rounding is stochastic (with a fixed seed) instead of to nearest.
    """

    format: Format
    scales: ScaleRule = DEFAULT_SCALES
    through_bf16: bool = False
    dithered: bool = False


@dataclass(frozen=True)
class Format:
    """A number format; this class is BF16.

    Attributes:
        words: The name in messages, such as FP8.
        dtype: The dtype of one stored value.
        code: The quantizer's name of the format; None if values are not quantized.
        multiple: Number that both dimensions of a weight must be multiples of.
        coded: Whether products multiply codes of X.
        grouped: Whether X has scale groups of 1 x 128, which attention and adapters can write.
        has_rule: Whether `PrecisionPlan.scales` sets the format of scales.
        reads_masters: Whether forwards read the master weights.
        frozen: Whether the format is only for frozen weights.
        two_planes: Whether the format is only for lm_head, with weight and hidden rows in two INT8
            planes (`precision.int8_planes`).
        emulated: Whether products are those of BF16 values rounded to a format without kernels.
        whole: Whether rounding a weight needs all of its rows.
        options: The fields of `Recipe` that the format takes.
    """

    name: str
    words: str
    dtype: torch.dtype
    code: CodeFormat | None = None
    multiple: int = 1

    coded: ClassVar[bool] = False
    grouped: ClassVar[bool] = False
    has_rule: ClassVar[bool] = False
    reads_masters: ClassVar[bool] = False
    frozen: ClassVar[bool] = False
    two_planes: ClassVar[bool] = False
    emulated: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    options: ClassVar[tuple[str, ...]] = ()

    @property
    def estimates(self) -> bool:
        """True if the gradients of weights are those of a smooth quantizer (`estimate`)."""
        return False

    def estimate(self, gradient: Tensor, weight: Tensor) -> None:
        """Multiply a gradient, float32 [N, K], by the derivative of the quantizer, in place."""

    def with_recipe(self, recipe: Recipe) -> Format:
        """Return the format with the options of a plan, if it has any."""
        return self

    def operand(self, stored: StoredWeight) -> StoredWeight:
        """Return a stored weight as an operand of products; studies override this."""
        return stored

    def described(self, scales: ScaleRule) -> str:
        """Return the format of keys or values in words, scales included."""
        return self.words

    def described_linear(self, scales: ScaleRule) -> str:
        """Return the format of a linear layer in words, scales included."""
        return self.described(scales)

    def described_head(self, scales: ScaleRule) -> str:
        """Return the format of lm_head in words, scales included."""
        return self.described(scales)

    def head_bytes(self, head_dim: int) -> int:
        """Return the bytes of one head's key or value, including its scale."""
        return self.dtype.itemsize * head_dim + (4 if self.code else 0)

    def weight_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a quantized weight; 0 if the master weight is read."""
        return 2 * math.prod(shape)

    def empty(self, shape: Sequence[int], master: Tensor) -> StoredWeight:
        """Return an uninitialized weight on the device of its master weight."""
        return torch.empty(tuple(shape), dtype=torch.bfloat16, device=master.device)

    def round(self, weight: Tensor, scales: ScaleRule, into: StoredWeight | None) -> StoredWeight:
        """Return a float32 weight [N, K] or [D] in this format, written to `into` if given."""
        return into.copy_(weight) if isinstance(into, Tensor) else weight.bfloat16()

    def input(self, x: Tensor, scales: ScaleRule) -> GEMMInput:
        """Return X [T, K], quantized for FProp."""
        return x

    def fprop(
        self,
        x: GEMMInput,
        weight: StoredWeight,
        out_dtype: torch.dtype,
        pinned: bool,
        scales: ScaleRule,
    ) -> Tensor:
        """Return X @ weight^T, [T, N]; `pinned` fixes the reduction order of BF16 products."""
        return bf16_matmul(_values(x), _values(weight), out_dtype, pinned)

    def dgrad(self, rows: GEMMInput, weight: StoredWeight) -> Tensor:
        """Return dY @ weight, bfloat16 [T, K]."""
        return free_matmul(_values(rows), _values(weight))

    def rows(self, dy: Tensor, key: DrawKey) -> Tensor:
        """Return dY, bfloat16 [T, N], as values for DGrad, if no codes are multiplied."""
        return dy

    def tokens(self, dy: Tensor, key: DrawKey) -> Tensor | TokenValues:
        """Return dY, bfloat16 [T, N], as values for WGrad, if no codes are multiplied."""
        return dy


class _FP32(Format):
    """FP32 master weights, read directly."""

    reads_masters = True

    def weight_bytes(self, shape: tuple[int, ...]) -> int:
        return 0

    def empty(self, shape: Sequence[int], master: Tensor) -> StoredWeight:
        raise AssertionError("a weight that is read as it is cannot be divided")


class _Codes(Format):
    """Codes that multiply codes of X."""

    coded = True

    def described(self, scales: ScaleRule) -> str:
        return f"{self.words}, {scales} scales"

    def fprop(
        self,
        x: GEMMInput,
        weight: StoredWeight,
        out_dtype: torch.dtype,
        pinned: bool,
        scales: ScaleRule,
    ) -> Tensor:
        return coded_matmul(_codes(x), _codes(weight), out_dtype)

    def dgrad(self, rows: GEMMInput, weight: StoredWeight) -> Tensor:
        if isinstance(rows, Tensor):
            return free_matmul(rows, dequantize(_codes(weight)))
        return self._coded_dgrad(rows, _codes(weight))

    def _coded_dgrad(self, rows: QTensor, weight: QTensor) -> Tensor:
        raise NotImplementedError


class _FP8(_Codes):
    """E4M3, the weight in groups of 128 x 128."""

    grouped = has_rule = True

    def described(self, scales: ScaleRule) -> str:
        return f"{self.words} {self.code}, {scales} scales"

    def weight_bytes(self, shape: tuple[int, ...]) -> int:
        rows, columns = shape
        return -(-rows // FP8_BLOCK) * -(-columns // FP8_BLOCK) * (FP8_BLOCK**2 + 4)

    def empty(self, shape: Sequence[int], master: Tensor) -> QTensor:
        (rows, columns), device = shape, master.device
        if (arithmetic := arithmetic_of(master)) is not None:
            return arithmetic.empty_weight(rows, columns, self.dtype, device)
        blocks = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
        scales = torch.empty(blocks, dtype=torch.float32, device=device)
        codes = torch.empty(rows, columns, dtype=self.dtype, device=device)
        return QTensor(codes, scales, (FP8_BLOCK, FP8_BLOCK))

    def round(self, weight: Tensor, scales: ScaleRule, into: StoredWeight | None) -> QTensor:
        earlier = into if isinstance(into, QTensor) else None
        if (arithmetic := arithmetic_of(weight)) is not None:
            return arithmetic.quantize_weight(weight, "e4m3", scales, earlier)
        quantized = quantize(weight, (FP8_BLOCK, FP8_BLOCK), scales=scales)
        if earlier is None:
            return quantized
        earlier.codes.copy_(quantized.codes)
        earlier.scales.copy_(quantized.scales)
        return earlier

    def input(self, x: Tensor, scales: ScaleRule) -> QTensor:
        if (arithmetic := arithmetic_of(x)) is not None:
            return arithmetic.quantize_rows(x, "e4m3", scales)
        return quantize(x, (1, FP8_BLOCK), "e4m3", scales)

    def _coded_dgrad(self, rows: QTensor, weight: QTensor) -> Tensor:
        arithmetic = arithmetic_of(weight.codes)
        # The GPU's GEMM needs transposed bytes. They are freed after this product: stored, they
        # would take as much memory as the weights.
        turned = weight.mT if arithmetic is None else arithmetic.turned_weight(weight)
        return fp8_matmul(rows, turned)


class _INT8(_Codes):
    """Rotated rows with one scale each (`precision.int8`); keys and values are not rotated."""

    def described_linear(self, scales: ScaleRule) -> str:
        return f"{self.words}, rotated, one scale per row"

    def weight_bytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) + 4 * shape[0]

    def empty(self, shape: Sequence[int], master: Tensor) -> QTensor:
        return empty_int8_rows(shape[0], shape[1], master.device)

    def round(self, weight: Tensor, scales: ScaleRule, into: StoredWeight | None) -> QTensor:
        return int8_rows(weight, into if isinstance(into, QTensor) else None)

    def input(self, x: Tensor, scales: ScaleRule) -> QTensor:
        return int8_rows(x)

    def _coded_dgrad(self, rows: QTensor, weight: QTensor) -> Tensor:
        if rows.codes.dtype == self.dtype:
            return int8_matmul(rows, int8_turned(weight))
        return fp8_matmul(rows, int8_squares_turned(weight))  # an FP8 backward


class _INT8TwoPlanes(_Codes):
    """lm_head: weight and hidden rows in two INT8 planes (`precision.int8_planes`).

    Its dtype is that of a value in two planes. The vocabulary may have any size.
    """

    two_planes = True

    def described_head(self, scales: ScaleRule) -> str:
        return "15 bits in two INT8 planes, rotated, one scale per row; hidden rows too"

    def weight_bytes(self, shape: tuple[int, ...]) -> int:
        return 2 * math.prod(shape) + 4 * shape[0]

    def empty(self, shape: Sequence[int], master: Tensor) -> Planes:
        return Planes.empty(shape[0], shape[1], master.device)

    def round(self, weight: Tensor, scales: ScaleRule, into: StoredWeight | None) -> Planes:
        if weight.shape[-1] % ROTATION:
            raise UserError(
                f"precision.lm_head = {self.name} needs a hidden size that is a multiple of "
                f"{ROTATION}, not {weight.shape[-1]}; use precision.preset=bf16"
            )
        return planes_of_rows(weight, into if isinstance(into, Planes) else None)


class _NVFP4(Format):
    """4-bit weights that are not trained, next to BF16 values."""

    frozen = True

    def described_linear(self, scales: ScaleRule) -> str:
        return f"{self.words} weights, frozen; BF16 activations"

    def weight_bytes(self, shape: tuple[int, ...]) -> int:
        elements = math.prod(shape)
        return elements // 2 + elements // NVFP4_GROUP

    def round(self, weight: Tensor, scales: ScaleRule, into: StoredWeight | None) -> NVFP4Weight:
        return in_device_order(quantize_nvfp4(weight))

    def fprop(
        self,
        x: GEMMInput,
        weight: StoredWeight,
        out_dtype: torch.dtype,
        pinned: bool,
        scales: ScaleRule,
    ) -> Tensor:
        assert isinstance(weight, NVFP4Weight), "this is the format of NVFP4 weights"
        return nvfp4_matmul(_values(x), weight, out_dtype)

    def dgrad(self, rows: GEMMInput, weight: StoredWeight) -> Tensor:
        assert isinstance(weight, NVFP4Weight), "this is the format of NVFP4 weights"
        return nvfp4_dgrad(_values(rows), weight)


class Recipe(NamedTuple):
    """The options of emulated formats; fields of `PrecisionPlan`, of which a format takes some."""

    weight_block: WeightBlock = "16x16"
    wgrad_hadamard: bool = False
    stochastic_rounding: bool = False
    gradient_estimator: bool = False
    outlier_quantile: float = 1.0
    outlier_compensation: bool = False


_NO_OPTIONS = Recipe()


class TokenValues(NamedTuple):
    """dY for an emulated WGrad.

    Attributes:
        values: bfloat16 [T', N], T padded to whole blocks.
        format: Rounds X for this WGrad.
    """

    values: Tensor
    format: Emulated

    def along_tokens(self, x: Tensor) -> Tensor:
        """Return X, bfloat16 [T, K], as an operand of WGrad, [T', K]."""
        return self.format.wgrad_input(x)


@dataclass(frozen=True)
class Emulated(Format):
    """Operands in four bits, multiplied as BF16 values, which have codes' exact values.

    Weights are stored as BF16 values.
    """

    recipe: Recipe = _NO_OPTIONS

    emulated = True

    @property
    def preset(self) -> str:
        """The preset that trains in this format."""
        return self.name.removesuffix("-emulated")

    def with_recipe(self, recipe: Recipe) -> Format:
        return replaced(self, recipe=recipe)

    def described_training(self, scales: ScaleRule) -> str:
        """Return the format of a trained linear layer in words, with the options that are on."""
        return "; ".join((self.described_linear(scales), *self._options_in_words()))

    def operand(self, stored: StoredWeight) -> StoredWeight:
        weight = _values(stored)
        marked = weight.view_as(weight)
        marked.number_format = self  # type: ignore[attr-defined]  # read by `format_of`
        return marked

    def round(self, weight: Tensor, scales: ScaleRule, into: StoredWeight | None) -> StoredWeight:
        values = self.weight_values(weight)
        return into.copy_(values) if isinstance(into, Tensor) else values

    def fprop(
        self,
        x: GEMMInput,
        weight: StoredWeight,
        out_dtype: torch.dtype,
        pinned: bool,
        scales: ScaleRule,
    ) -> Tensor:
        main, *rest = self.input_parts(_values(x))
        if not rest:
            return bf16_matmul(main, _values(weight), out_dtype, pinned)
        total = bf16_matmul(main, _values(weight), torch.float32, pinned)
        for part in rest:
            total += bf16_matmul(part, _values(weight), torch.float32, pinned)
        return total.to(out_dtype)

    def weight_values(self, weight: Tensor) -> Tensor:
        """Return a float32 weight [N, K] in four bits, bfloat16."""
        raise NotImplementedError

    def input_parts(self, x: Tensor) -> Sequence[Tensor]:
        """Return the parts of X, bfloat16 [T, K], whose products with a weight are added."""
        raise NotImplementedError

    def wgrad_input(self, x: Tensor) -> Tensor:
        """Return X, bfloat16 [T, K], as an operand of WGrad, [T', K]."""
        raise NotImplementedError

    def operand_bytes(self, shape: tuple[int, ...], tokens: int, backward: bool) -> int:
        """Return the maximum bytes of operands that a weight's products have, and of their sums."""
        raise NotImplementedError

    def _options_in_words(self) -> list[str]:
        raise NotImplementedError


@dataclass(frozen=True)
class _EmulatedNVFP4(Emulated):
    """Operands in blocks of 16 along the sum: X to nearest, dY by draws, if the recipe says so.

    WGrad's operands are rotated along tokens first.

    Attributes:
        in_rows, in_squares: The block formats of rows along a sum, and of a weight that is read
            along both dimensions.
    """

    in_rows: BlockFormat = NVFP4_ROWS
    in_squares: BlockFormat = NVFP4_SQUARES

    whole = True
    options = ("weight_block", "wgrad_hadamard", "stochastic_rounding")

    @property
    def _of_weights(self) -> BlockFormat:
        return self.in_squares if self.recipe.weight_block == "16x16" else self.in_rows

    def described_linear(self, scales: ScaleRule) -> str:
        return f"{self.words}, weights {self.recipe.weight_block}, emulated by BF16 products"

    def _options_in_words(self) -> list[str]:
        words = ["rotated along tokens"] if self.recipe.wgrad_hadamard else []
        if self.recipe.stochastic_rounding:
            words.append("output gradients rounded stochastically")
        return words

    def weight_values(self, weight: Tensor) -> Tensor:
        return block_values(weight, self._of_weights)

    def input_parts(self, x: Tensor) -> Sequence[Tensor]:
        return (block_values(x, self.in_rows),)

    def dgrad(self, rows: GEMMInput, weight: StoredWeight) -> Tensor:
        values = _values(weight)
        if self._of_weights.block[0] == 1:  # blocks do not lie along this sum
            values = block_values(values.mT, self.in_rows).mT
        return free_matmul(_values(rows), values)

    def rows(self, dy: Tensor, key: DrawKey) -> Tensor:
        return block_values(dy, self.in_rows, self._draws((*key, "dgrad")))

    def tokens(self, dy: Tensor, key: DrawKey) -> TokenValues:
        return TokenValues(self._along_tokens(dy, self._draws((*key, "wgrad"))), self)

    def wgrad_input(self, x: Tensor) -> Tensor:
        return self._along_tokens(x, None)

    def operand_bytes(self, shape: tuple[int, ...], tokens: int, backward: bool) -> int:
        n, k = shape
        # In backward: dY for DGrad and WGrad, X for WGrad, and the weight if it is rounded again.
        return 4 * n * tokens + 2 * k * (tokens + n) if backward else 2 * k * tokens

    def _along_tokens(self, x: Tensor, key: DrawKey | None) -> Tensor:
        """Return X or dY [T, D] in blocks along tokens, padded with zeros, bfloat16 [T', D]."""
        turned = pad(x, (0, 0, 0, -len(x) % BLOCK_ROTATION)).mT
        return block_values(turned, self.in_rows, key, self.recipe.wgrad_hadamard).mT

    def _draws(self, key: DrawKey) -> DrawKey | None:
        return key if self.recipe.stochastic_rounding else None


class _EmulatedFP4(Emulated):
    """X and weights with a scale per row (`precision.fp4`); output gradients stay in BF16."""

    options = ("gradient_estimator", "outlier_quantile", "outlier_compensation")

    @property
    def estimates(self) -> bool:
        return self.recipe.gradient_estimator

    def estimate(self, gradient: Tensor, weight: Tensor) -> None:
        estimate(gradient, weight)

    def described_linear(self, scales: ScaleRule) -> str:
        words = f"{self.words}, a scale per row, emulated by BF16 products"
        if self.recipe.outlier_quantile == 1:
            return words
        kept = ", outliers compensated in BF16" if self.recipe.outlier_compensation else ""
        return f"{words}; tokens clamped at quantile {self.recipe.outlier_quantile:g}{kept}"

    def _options_in_words(self) -> list[str]:
        estimated = ["weight gradients by a smooth quantizer"] if self.estimates else []
        return [*estimated, f"output gradients {BF16.words}"]

    def weight_values(self, weight: Tensor) -> Tensor:
        return fp4_values(weight)

    def input_parts(self, x: Tensor) -> Sequence[Tensor]:
        quantile = self.recipe.outlier_quantile
        if quantile < 1 and self.recipe.outlier_compensation:
            return clamped_operands(x, quantile)
        return (fp4_values(clamped(x, quantile)),)

    def tokens(self, dy: Tensor, key: DrawKey) -> TokenValues:
        return TokenValues(dy, self)

    def wgrad_input(self, x: Tensor) -> Tensor:
        main, *rest = self.input_parts(x)
        return main + rest[0] if rest else main

    def operand_bytes(self, shape: tuple[int, ...], tokens: int, backward: bool) -> int:
        n, k = shape
        # The two parts of X and what they are made of; or the parts and both products in float32.
        made = 12 * k * tokens
        return made if backward else max(made, 4 * k * tokens + 8 * n * tokens)


_HALF_GROUP = 64  # minimum size of an FP8 group, and size of an INT8 rotation
_E4M3, _INT8_DTYPE = FORMATS["e4m3"][0], FORMATS[INT8_CODES][0]

FP32 = _FP32("fp32", "FP32", torch.float32)
BF16 = Format("bf16", "BF16", torch.bfloat16)
FP8 = _FP8("fp8", "FP8", _E4M3, "e4m3", _HALF_GROUP)
INT8 = _INT8("int8", "INT8", _INT8_DTYPE, INT8_CODES, _HALF_GROUP)
INT8_TWO_PLANES = _INT8TwoPlanes("int8x2", "INT8 in two planes", torch.int16, INT8_CODES)
NVFP4 = _NVFP4("nvfp4", "NVFP4", torch.uint8, multiple=FP8_BLOCK)
EMULATED_NVFP4 = _EmulatedNVFP4(
    presets.EMULATED_NVFP4, NVFP4.words, torch.bfloat16, multiple=BLOCK_ROTATION
)
EMULATED_FP4 = _EmulatedFP4(presets.EMULATED_FP4, "FP4", torch.bfloat16)
EMULATED = (EMULATED_NVFP4, EMULATED_FP4)
_ALL = (FP32, BF16, FP8, INT8, INT8_TWO_PLANES, NVFP4, *EMULATED)
_BY_NAME: dict[str, Format] = {format.name: format for format in _ALL}


def number_format(name: str) -> Format:
    """Return the record of a format's name in settings or in a plan."""
    return _BY_NAME[name]


def key_and_value_formats(kv: str) -> tuple[Format, Format]:
    """Return the formats of keys and of values for `PrecisionPlan.kv`, such as "int8+fp8"."""
    keys, _, values = kv.partition("+")
    return number_format(keys), number_format(values or keys)


def format_of(weight: StoredWeight) -> Format:
    """Return the record of a weight's format; BF16 for any unquantized weight.

    In studies a tensor may have the attribute `number_format`.
    """
    if isinstance(weight, QTensor):
        return INT8 if weight.codes.dtype == INT8.dtype else FP8
    if isinstance(weight, Planes):
        return INT8_TWO_PLANES
    if isinstance(weight, NVFP4Weight):
        return NVFP4
    return getattr(weight, "number_format", BF16)


def _codes(operand: StoredWeight) -> QTensor:
    """Return an operand that must be codes."""
    assert isinstance(operand, QTensor), f"codes multiply codes, not {type(operand)}"
    return operand


def _values(operand: StoredWeight) -> Tensor:
    """Return an operand that must be values."""
    assert isinstance(operand, Tensor), f"values multiply values, not {type(operand)}"
    return operand
