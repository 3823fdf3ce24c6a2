"""Model directories in NVFP4, in the two layouts of model hubs, with random codes and scales."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from tests.models.stored_weights import change_config, change_tensors
from torch import Tensor

LAYOUTS = ("modelopt", "modelopt-sidecar", "compressed-tensors")
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_PROJECTIONS = ("o_proj", "down_proj", "qkv_proj", "gate_up_proj", *_FUSED[0], *_FUSED[1])


def quantization(layout: str, ignore: Collection[str] = ("lm_head",)) -> dict[str, Any]:
    """Return what a layout says about its weights."""
    group = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    if layout == "modelopt-sidecar":
        return {
            "producer": {"name": "modelopt", "version": "0.29.0"},
            "quantization": {
                "quant_algo": "NVFP4",
                "kv_cache_quant_algo": "FP8",
                "group_size": 16,
                "exclude_modules": list(ignore),
            },
        }
    if layout == "modelopt":
        return {
            "config_groups": {"group_0": {"weights": group, "input_activations": group}},
            "ignore": list(ignore),
            "quant_algo": "NVFP4",
            "quant_method": "modelopt",
            "producer": {"name": "modelopt", "version": "0.33.0"},
        }
    weights = group | {"strategy": "tensor_group", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}
        },
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def to_nvfp4(
    path: Path, layout: str, apart: bool = False, left: Collection[str] = (), head: bool = False
) -> dict[str, Tensor]:
    """Put random codes in place of a directory's linear layers, and return the widened values.

    Args:
        apart: Give Q, K and V scales of their own, and gate and up.
        left: Endings of the names of layers that stay as they are.
    """
    generator = torch.Generator().manual_seed(len(layout))
    widened: dict[str, Tensor] = {}

    def change(tensors: dict[str, Tensor]) -> None:
        for name in sorted(tensors):
            layer = name.removesuffix(".weight")
            projection = layer.rpartition(".")[2]
            coded = projection in _PROJECTIONS or (head and layer == "lm_head")
            if name == layer or not coded or layer.endswith(tuple(left)):
                continue
            family = next((f for f in _FUSED if projection in f), (projection,))
            place = family.index(projection) if apart else 0
            shape = tensors.pop(name).shape
            stored, widened[name] = _random(layer, shape, layout, place, generator)
            tensors |= stored
            if projection in ("k_proj", "v_proj"):  # of keys and values in FP8, for others
                tensors[f"{layer}.{projection[0]}_scale"] = torch.tensor(0.5)

    change_tensors(path, change)
    said = quantization(layout, ["lm_head", *(f"*{ending}" for ending in left)])
    if layout == "compressed-tensors":
        said["ignore"] = ["lm_head", *(f"re:.*{ending}$" for ending in left)]
    if layout == "modelopt-sidecar":
        (path / "hf_quant_config.json").write_text(json.dumps(said))
    else:
        change_config(path, quantization_config=said)
    return widened


def _random(
    layer: str, shape: torch.Size, layout: str, place: int, generator: torch.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the stored tensors of a layer, and the values made number by number."""
    rows, columns = shape
    low, high = (
        torch.randint(16, (rows, columns // 2), generator=generator, dtype=torch.uint8)
        for _ in range(2)
    )
    scales = torch.randint(1, 127, (rows, columns // 16), generator=generator, dtype=torch.uint8)
    scales = scales.view(torch.float8_e4m3fn)
    table = torch.tensor([*VALUES, *(-value for value in VALUES)])
    codes = torch.empty(rows, columns)
    codes[:, 0::2], codes[:, 1::2] = table[low.long()], table[high.long()]
    groups = scales.float().repeat_interleave(16, 1)
    packed = low + 16 * high
    of_matrix = torch.tensor(2e-5 * (1 + 0.37 * place))
    if layout == "compressed-tensors":
        stored = {
            f"{layer}.weight_packed": packed,
            f"{layer}.weight_scale": scales,
            f"{layer}.weight_global_scale": (1 / of_matrix).reshape(1),
        }
        return stored, codes * groups * (1 / stored[f"{layer}.weight_global_scale"])
    stored = {
        f"{layer}.weight": packed,
        f"{layer}.weight_scale": scales,
        f"{layer}.weight_scale_2": of_matrix,
        f"{layer}.input_scale": torch.tensor(0.25),
    }
    return stored, codes * groups * of_matrix
