"""Watching a forward: a function that is called with the output of each operation.

`parity.locating` finds the first operation that differs between two forwards by a trace, and
`training.guard` the first one whose output is not finite.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from jetrl.precision.quantize import QTensor, dequantize

Trace = Callable[[str, Tensor], None]  # (name of the operation, its output)


def tell(trace: Trace | None, name: str, value: Tensor | QTensor) -> None:
    """Call the trace, if there is one, with an operation's output; codes as the values they mean.

    Args:
        trace: The function that watches, or None.
    """
    if trace is not None:
        trace(name, dequantize(value) if isinstance(value, QTensor) else value)


def prefixed(trace: Trace | None, prefix: str) -> Trace | None:
    """Return a trace that puts `prefix` before the names of operations."""
    return None if trace is None else lambda name, value: trace(prefix + name, value)
