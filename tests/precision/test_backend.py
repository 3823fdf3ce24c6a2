"""A backend is chosen by a tensor's device, and its tables have every operation."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch

from jetrl.errors import UserError
from jetrl.kernels.backend import TABLES, Kernels, kernels_of
from jetrl.models.layer import fuses
from jetrl.precision import backend as backends
from jetrl.precision.backend import BACKENDS, REFERENCE, Arithmetic, Backend
from jetrl.session.building import device_of
from jetrl.settings.sections import RunSettings

of_each = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)


def test_a_cpu_computes_the_references() -> None:
    x = torch.zeros(2, dtype=torch.bfloat16)
    assert backends.backend_of(x) is REFERENCE
    assert backends.arithmetic_of(x) is kernels_of(x) is None
    assert not fuses(x)


@of_each
@pytest.mark.parametrize("protocol", [Arithmetic, Kernels])
def test_tables_have_what_the_protocol_says(backend: Backend, protocol: type) -> None:
    """The type checker compares signatures; here the arguments of each name are counted."""
    pytest.importorskip("triton", reason="it is there on Linux alone")
    table = backend.arithmetic if protocol is Arithmetic else TABLES[backend.name]()
    functions = inspect.getmembers(protocol, inspect.isfunction)
    names = [name for name, _ in functions if not name.startswith("_")]
    assert len(names) > 10
    for name in names:
        promised = list(inspect.signature(getattr(protocol, name)).parameters.values())[1:]
        positional = [p for p in promised if p.kind is not p.KEYWORD_ONLY]
        by_name = {p.name: None for p in promised if p.kind is p.KEYWORD_ONLY}
        inspect.signature(getattr(table, name)).bind(*positional, **by_name)


@of_each
def test_it_takes_its_gpus_and_heads(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    backends.backend_for.cache_clear()
    for number, capability in enumerate((*backend.capabilities, (7, 5))):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        expected = backend if capability in backend.capabilities else None
        assert backends.accelerator() is expected
        gpu = torch.device("cuda", 100 + number)  # which is in no cache
        if expected is not None:
            assert backends.backend_for(gpu) is expected
    with pytest.raises(UserError, match=r"a GPU has compute capability 7\.5; FP8 on the GPU needs"):
        backends.backend_for(gpu)
    head_dim, group = backend.head_dims[0], backend.max_group
    backend.check_attention(head_dim, group)
    for heads in ((head_dim - 1, 1), (head_dim, group + 1)):
        with pytest.raises(UserError, match=r"GPU's attention takes head_dim \d+"):
            backend.check_attention(*heads)
    backend.check_formats({"INT8": torch.int8})
    others = {"FP64": torch.float64, "INT8": torch.int8, "E5M2": torch.float8_e5m2}
    with pytest.raises(UserError, match=r"no kernels for FP64 and E5M2; use another precision\."):
        backend.check_formats(others)


@pytest.fixture
def gpu_of_another_maker(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    yield torch.device("cuda", 200)
    backends.select_backend("auto")


def test_references_run_on_any_gpu_if_selected(gpu_of_another_maker: torch.device) -> None:
    run = RunSettings(device="cuda", backend="reference")
    assert device_of(run) == "cuda"
    assert backends.backend_for(gpu_of_another_maker) is backends.REFERENCE
    assert not backends.has_kernels(gpu_of_another_maker)
    assert device_of(RunSettings(backend="reference")) == "cpu"
    device_of(RunSettings(device="cuda"))
    with pytest.raises(UserError, match=r"use run\.device=cpu, or run\.backend=reference"):
        backends.backend_for(gpu_of_another_maker)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_hopper_is_refused_elsewhere(device: str, gpu_of_another_maker: torch.device) -> None:
    with pytest.raises(UserError, match=r"run\.backend = hopper needs a Hopper card"):
        device_of(RunSettings(device=device, backend="hopper"))
