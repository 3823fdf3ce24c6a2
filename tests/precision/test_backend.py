"""A backend is chosen by a tensor's device, and its tables have every operation."""

from __future__ import annotations

import inspect

import pytest
import torch

from jetrl.kernels.backend import Kernels, kernels_of
from jetrl.models.layer import fuses
from jetrl.precision.backend import REFERENCE, Arithmetic, arithmetic_of, backend_of


def test_a_cpu_computes_the_references() -> None:
    x = torch.zeros(2, dtype=torch.bfloat16)
    assert backend_of(x) is REFERENCE
    assert arithmetic_of(x) is None
    assert kernels_of(x) is None
    assert not fuses(x)


@pytest.mark.parametrize("protocol", [Arithmetic, Kernels])
def test_tables_have_what_the_protocol_says(protocol: type) -> None:
    """The type checker compares signatures; here the arguments of each name are counted."""
    pytest.importorskip("triton", reason="it is there on Linux alone")
    from jetrl.kernels import hopper
    from jetrl.precision.hopper import operations

    table = operations if protocol is Arithmetic else hopper
    functions = [f for f in vars(protocol).values() if inspect.isfunction(f)]
    names = [f.__name__ for f in functions if not f.__name__.startswith("_")]
    assert len(names) > 10
    for name in names:
        promised = list(inspect.signature(getattr(protocol, name)).parameters.values())[1:]
        positional = [p for p in promised if p.kind is not p.KEYWORD_ONLY]
        by_name = {p.name: None for p in promised if p.kind is p.KEYWORD_ONLY}
        inspect.signature(getattr(table, name)).bind(*positional, **by_name)
