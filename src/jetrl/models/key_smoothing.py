"""Key smoothing: fixed powers of two per channel that let INT8 keys keep their small channels.

Some models have key channels many times as large as the rest (Qwen2.5: 145 next to a median of 4),
so one INT8 scale per head rounds the other channels away. Keys are divided by a factor per channel
and queries are multiplied by it, then both heads are multiplied by a Hadamard matrix
(`kernels.rotary.smooth`). Scores stay the same; only the rounding error changes.

The factors are functions of the weights that a model is opened with, not of any text: the square
root of each rotary pair's expected size, rounded to a power of two. A pair has one factor, so the
factors commute with rotary positions; if a head rotates in part, channels i and i + D / 2 have one
all the same, which no score depends on. A run keeps its factors; they are stored in its checkpoints
and never recomputed from trained weights.

Sources: SmoothQuant (arXiv 2211.10438) for the factors, QuaRot (arXiv 2404.00456) for the rotation.

Legend: H query heads, G key-value heads, D head size, P = D / 2 rotary pairs.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.models.families import ModelConfig
from jetrl.models.mixer import AttentionShape

_SMALLEST = -10  # below the largest of a head, so that no channel that grows later dominates


def key_exponents(
    weights: Mapping[str, Tensor], config: ModelConfig, device: torch.device
) -> Tensor:
    """Return the exponents of all layers' key factors, int8 [layers, G, P], from the weights.

    They are zeros for a layer without keys, and for a model on device "meta", without weights.
    """
    attention = config.attention
    shape = len(config.layers), attention.num_kv_heads, attention.head_dim // 2
    exponents = np.zeros(shape, dtype=np.int8)
    for i, layer in enumerate(config.layers):
        if device.type == "meta" or not isinstance(layer.mixer, AttentionShape):
            continue
        bias = weights[f"layers.{i}.qkv.bias"] if attention.qkv_bias else None
        norm = weights[f"layers.{i}.k_norm.weight"] if attention.qk_norm else None
        exponents[i] = pair_exponents(
            weight=_key_rows(weights[f"layers.{i}.qkv.weight"], attention),
            bias=None if bias is None else _key_rows(bias, attention),
            norm=None if norm is None else _float64(norm),
            num_heads=attention.num_kv_heads,
        )
    return torch.from_numpy(exponents)


def _float64(tensor: Tensor) -> np.ndarray:
    return tensor.detach().to("cpu", torch.float64).numpy()


def _key_rows(tensor: Tensor, attention: AttentionShape) -> np.ndarray:
    """Return the key heads' rows of a fused qkv weight or bias, float64 [G * D, ...]."""
    size = attention.head_dim
    first, count = attention.num_heads * size, attention.num_kv_heads * size
    return _float64(tensor[first : first + count])


def pair_exponents(
    weight: np.ndarray, bias: np.ndarray | None, norm: np.ndarray | None, num_heads: int
) -> np.ndarray:
    """Return the exponents of one layer's key factors, int8 [G, P]; each head's largest is 0.

    A key's channel is w . x + b with x of unit variance, so a pair's size is the root of its b^2
    plus the root mean square of its |w|. The factor is the root of the size, rounded to a power of
    two in the logarithm. Sums have one order and only exact operations follow, so every machine
    gets the same exponents.

    Args:
        weight: float64 [G * D, K]. bias: float64 [G * D]. norm: the key norm's weight, [D].
    """
    # Along the first axis NumPy adds row by row, in order.
    squares = np.add.reduce(np.square(np.ascontiguousarray(weight.T)), axis=0)
    squares = squares.reshape(num_heads, 2, -1)
    offsets = np.zeros_like(squares) if bias is None else np.square(bias).reshape(squares.shape)
    if norm is not None:
        gains = np.square(norm).reshape(-1, 2, squares.shape[-1])
        squares, offsets = squares * gains, offsets * gains
    sizes = np.sqrt(offsets[:, 0] + offsets[:, 1]) + np.sqrt((squares[:, 0] + squares[:, 1]) / 2)
    # round(log2(size) / 2) without a logarithm: frexp has floor(log2(size)) + 1.
    exponents = np.floor_divide(np.frexp(sizes)[1], 2)
    # A pair of zeros keeps factor 1: it may be trained, and dividing it would make it dominate.
    unused = sizes == 0
    largest = np.where(unused, -(2**15), exponents).max(axis=1, keepdims=True)
    exponents = np.where(unused, largest, exponents)
    return np.maximum(exponents - largest, _SMALLEST).astype(np.int8)


def head_exponents(exponents: Tensor, num_heads: int) -> Tensor:
    """Return the exponents by which heads are multiplied, int8 [layers, H + G, P].

    Query heads come first, each with its key head's factors. The Hadamard matrix has entries of 1
    and -1; the 1 / D of the product of two of them is divided between queries and keys here.
    """
    stages = hadamard_stages(2 * exponents.shape[-1])
    groups = num_heads // exponents.shape[1]
    queries = exponents.repeat_interleave(groups, dim=1) - (stages - stages // 2)
    return torch.cat([queries, -exponents - stages // 2], dim=1)


def hadamard_stages(head_dim: int) -> int:
    """Return log2 of the block that is rotated: the largest power of two that divides D."""
    return (head_dim & -head_dim).bit_length() - 1


def to_text(exponents: Tensor) -> str:
    """Return exponents as a checkpoint's state.json keeps them: hexadecimal digits."""
    return exponents.numpy().tobytes().hex()


def from_text(text: str, shape: torch.Size, where: str) -> Tensor:
    """Return the exponents that `to_text` described; UserError if they have another shape."""
    try:
        values = np.frombuffer(bytes.fromhex(text), dtype=np.int8)
        found = torch.from_numpy(values.copy()).reshape(shape)
    except (ValueError, RuntimeError):
        raise UserError(f"{where}: key_exponents are not those of this model") from None
    return found
