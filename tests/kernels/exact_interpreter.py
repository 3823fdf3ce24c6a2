"""Triton's interpreter with an exact fma (its own rounds the product), and with bfloat16.

Casts round as on a GPU, also to E4M3, and products of bfloat16 have float32 sums in any order.

TRITON_INTERPRET=1 python PROGRAM that imports this module before it launches a kernel
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from triton.runtime import interpreter

from jetrl.precision import exact


def _fma(_: Any, x: Any, y: Any, z: Any) -> Any:
    a, b, c = (torch.from_numpy(each.data.copy()) for each in (x, y, z))
    return interpreter.TensorHandle(exact.fma(a, b, c).numpy(), z.dtype.scalar)


def _cast(builder: Any, source: Any, dtype: Any) -> Any:
    """Cast between float32 and bfloat16 by torch: Triton truncates, and changes tiny values."""
    kinds = source.dtype.scalar, dtype.scalar
    if kinds == (tl.int8, tl.bfloat16):  # whose bits Triton would take for those of an integer
        wide = interpreter.TensorHandle(source.data.astype("float32"), tl.float32)
        return _cast(builder, wide, dtype)
    if kinds == (tl.float32, tl.bfloat16):
        rounded = torch.from_numpy(source.data.copy()).bfloat16().view(torch.int16)
        return interpreter.TensorHandle(rounded.numpy().view("uint16"), tl.bfloat16)
    if kinds == (tl.bfloat16, tl.float32):
        wide = torch.from_numpy(source.data.view("int16").copy()).view(torch.bfloat16).float()
        return interpreter.TensorHandle(wide.numpy(), tl.float32)
    return _other_cast(builder, source, dtype)


def _to_e4m3(builder: Any, source: Any, dtype: Any, rounding: Any) -> Any:
    """Cast float32 to E4M3 by torch: Triton wraps large values around."""
    if (source.dtype.scalar, dtype.scalar) != (tl.float32, tl.float8e4nv):
        return _other_narrowing(builder, source, dtype, rounding)
    codes = torch.from_numpy(source.data.copy()).to(torch.float8_e4m3fn)
    return interpreter.TensorHandle(codes.view(torch.uint8).numpy(), tl.float8e4nv)


def _dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
    """Multiply bfloat16 as float32: Triton would multiply its bits."""
    if a.dtype.scalar == tl.bfloat16:
        a, b = (_cast(builder, operand, tl.float32) for operand in (a, b))
    return _other_dot(builder, a, b, *rest)


def _with_index(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    # NumPy 2.4 refuses int() of an array of one element.
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


_patched: set[str] = set()  # modules whose language is patched, by the present launch


def _patch_of_launch(function: Any) -> Any:
    _patched.clear()
    return _patch_language(function)


def _call(function: Any, *values: Any, **named: Any) -> Any:
    """Call a device function; Triton would patch its language again for each call: milliseconds."""
    if function.fn.__module__ not in _patched:
        _patch_language(function.fn)
        _patched.add(function.fn.__module__)
    return function.rewrite()(*values, **named)


_patch = interpreter._patch_lang_tensor
_patch_language = interpreter._patch_lang
interpreter._patch_lang = _patch_of_launch
interpreter.InterpretedFunction.__call__ = _call
interpreter.InterpreterBuilder.create_fma = _fma
_other_dot = interpreter.InterpreterBuilder.create_dot
interpreter.InterpreterBuilder.create_dot = _dot
_other_narrowing = interpreter.InterpreterBuilder.create_fp_to_fp
interpreter.InterpreterBuilder.create_fp_to_fp = _to_e4m3
_other_cast = interpreter.InterpreterBuilder.cast_impl
interpreter.InterpreterBuilder.cast_impl = _cast
interpreter._patch_lang_tensor = _with_index
