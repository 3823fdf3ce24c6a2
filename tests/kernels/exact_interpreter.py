"""Triton's interpreter with an exact fma: its own rounds the product first.

TRITON_INTERPRET=1 python PROGRAM that imports this module before it launches a kernel
"""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime import interpreter

from jetrl.precision import exact


def _fma(_: Any, x: Any, y: Any, z: Any) -> Any:
    a, b, c = (torch.from_numpy(each.data.copy()) for each in (x, y, z))
    return interpreter.TensorHandle(exact.fma(a, b, c).numpy(), z.dtype.scalar)


def _with_index(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    # NumPy 2.4 refuses int() of an array of one element.
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


_patch = interpreter._patch_lang_tensor
interpreter.InterpreterBuilder.create_fma = _fma
interpreter._patch_lang_tensor = _with_index
