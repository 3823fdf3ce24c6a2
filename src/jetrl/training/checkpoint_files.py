"""The files of a checkpoint: written and flushed to the disk, fingerprinted, compared."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A safetensors file, on the disk when this returns."""
    save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, path)
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    """A UTF-8 file, on the disk when this returns."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def fingerprint(path: Path) -> dict[str, Any]:
    """{"bytes": size, "sha256": of the contents}."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def as_json(value: Any) -> Any:
    """A value as JSON reads it back."""
    return json.loads(json.dumps(value))


def differences(what: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """One sentence for each key that the two do not agree on."""
    return [
        f"{what} {key} is {saved.get(key)!r} in the checkpoint and {current.get(key)!r} here"
        for key in sorted({*saved, *current})
        if saved.get(key) != current.get(key)
    ]


def tensor_differences(
    tensors: Mapping[str, torch.Tensor], masters: Mapping[str, torch.Tensor]
) -> list[str]:
    """One sentence for each tensor that is missing, superfluous, or of another shape or type."""
    found = [f"the checkpoint lacks {name}" for name in masters if name not in tensors]
    found += [f"this model has no {name}" for name in tensors if name not in masters]
    found += [
        f"{name} is {t.dtype} {tuple(t.shape)} there and {masters[name].dtype} "
        f"{tuple(masters[name].shape)} here"
        for name, t in tensors.items()
        if name in masters and (t.shape != masters[name].shape or t.dtype != masters[name].dtype)
    ]
    return found
