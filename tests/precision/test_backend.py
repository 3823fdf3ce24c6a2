"""A backend is chosen by a tensor's device, and its tables have every operation."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.training.shared import config

import jetrl
from jetrl.cli import opening
from jetrl.errors import UserError
from jetrl.kernels.backend import TABLES, Kernels, kernels_of
from jetrl.models.adapter import Adapter, LoRA
from jetrl.models.families import ModelConfig
from jetrl.models.layer import fuses
from jetrl.models.model import check_device
from jetrl.models.policy import Policy
from jetrl.models.tiny import make_tiny
from jetrl.precision import PrecisionPlan
from jetrl.precision import backend as backends
from jetrl.precision.backend import BACKENDS, REFERENCE, Arithmetic, Backend
from jetrl.rollout.engine import RolloutEngine
from jetrl.session import parity
from jetrl.session.building import device_of
from jetrl.settings.loading import Settings, load_config, to_toml
from jetrl.types import SamplingParams

of_each = pytest.mark.parametrize(
    "backend", BACKENDS, ids=lambda backend: f"{backend.name}, {backend.kernels}"
)
# What plans that are defined for every machine never ask for, or refuse.
UNDEFINED = {
    *("fp8_matmul", "bf16_matmul", "bf16_matmul_free", "int8_squares_turned"),
    *("nvfp4_order", "nvfp4_matmul", "nvfp4_dgrad", "dithered_bf16"),
    *("quantize_rows", "quantize_rows_and_tokens", "quantize_squares", "quantize_weight"),
    *("turned_weight", "project_down", "project_up", "adapted_matmul"),
    *("quantized_adapted_matmul", "nvfp4_adapted_matmul", "lm_head_logprobs"),
    *("rms_norm_squares", "swiglu_quantize_with_values", "swiglu_backward_quantize"),
    *("swiglu_backward_values_", "attend_equal_lengths", "attend_equal_lengths_backward"),
    *("attend_prefill_quantized", "attend_decode_quantized"),
    *("fp8_grouped_matmul", "fp8_grouped_gradient", "fp8_grouped_dgrad", "add_fp8_grouped_wgrad"),
    *("bf16_grouped_matmul", "bf16_grouped_dgrad"),
    *("add_bf16_grouped_product", "add_bf16_grouped_wgrad", "save_codes", "load_values"),
}
# What only these plans ask for.
DEFINED = {
    *("planes_of_rows", "planes_fprop", "planes_dgrad", "add_planes_wgrad"),
    *("exact_logprobs", "exact_logits_gradient", "sum_of_rows"),
}


@pytest.fixture(autouse=True)
def selection() -> Iterator[None]:
    yield
    backends.select_backend()


def test_a_cpu_computes_the_references() -> None:
    x = torch.zeros(2, dtype=torch.bfloat16)
    assert backends.backend_of(x) is REFERENCE
    assert backends.arithmetic_of(x) is kernels_of(x) is None
    assert not fuses(x)


# Of other plans: what other GPUs than Hopper refuse so far.
MISSING = {"nvfp4_adapted_matmul", "nvfp4_order", "nvfp4_matmul", "nvfp4_dgrad"}


@of_each
@pytest.mark.parametrize("protocol", [Arithmetic, Kernels])
def test_tables_have_what_the_protocol_says(backend: Backend, protocol: type) -> None:
    """The type checker compares signatures; here the arguments of each name are counted."""
    pytest.importorskip("triton", reason="it is there on Linux alone")
    table = backend.arithmetic if protocol is Arithmetic else TABLES[backend.kernels]()
    functions = inspect.getmembers(protocol, inspect.isfunction)
    names = [name for name, _ in functions if not name.startswith("_")]
    assert len(names) > 10
    absent = UNDEFINED if backend.defined else DEFINED
    if not backend.takes(torch.uint8):
        absent = absent | MISSING
    names = [name for name in names if name not in absent]
    assert not [name for name in absent if hasattr(table, name)]
    for name in names:
        promised = list(inspect.signature(getattr(protocol, name)).parameters.values())[1:]
        positional = [p for p in promised if p.kind is not p.KEYWORD_ONLY]
        by_name = {p.name: None for p in promised if p.kind is p.KEYWORD_ONLY}
        inspect.signature(getattr(table, name)).bind(*positional, **by_name)


@of_each
def test_it_takes_its_gpus_and_heads(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    backends.select_backend(backend.name, defined=backend.defined)
    for number, capability in enumerate((*backend.capabilities, (7, 5))):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        expected = backend if capability in backend.capabilities else None
        assert backends.accelerator() is expected
        gpu = torch.device("cuda", 100 + number)  # which is in no cache
        if expected is not None:
            assert backends.backend_for(gpu) is expected
    with pytest.raises(UserError, match=r"a GPU has compute capability 7\.5; jetrl supports"):
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
def gpu_of_another_maker(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    return torch.device("cuda", 200)


def settings(*keys: str) -> Settings:
    return load_config(None, [f"run.{key}" for key in keys])


def test_references_run_on_any_gpu_if_selected(gpu_of_another_maker: torch.device) -> None:
    assert device_of(settings("device=cuda", "backend=reference")) == "cuda"
    assert backends.backend_for(gpu_of_another_maker) is backends.REFERENCE
    assert not backends.has_kernels(gpu_of_another_maker)
    assert device_of(settings("backend=reference")) == "cpu"
    device_of(settings("device=cuda"))
    with pytest.raises(UserError, match=r"use run\.device=cpu, or run\.backend=reference"):
        backends.backend_for(gpu_of_another_maker)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    return torch.device("cuda", 300)


def test_a_checkpoint_under_another_plan_has_its_kernels(hopper: torch.device) -> None:
    integer, int8 = (PrecisionPlan.preset(name) for name in ("integer", "int8"))
    for of_run, plan in (("int8", integer), ("integer", int8)):
        assert device_of(load_config(None, [f"precision.preset={of_run}"]), plan) == "cuda"
        assert backends.backend_for(hopper).defined == plan.defined


@pytest.mark.parametrize("preset", ["integer", "int8"])
def test_a_policy_is_refused_on_kernels_selected_since(preset: str, hopper: torch.device) -> None:
    policy = Policy.from_config(config(), preset)
    policy.device, defined = hopper, policy.plan.defined
    backends.select_backend(defined=not defined)
    with pytest.raises(UserError, match=rf"another precision plan: .*\(defined={defined}\)"):
        RolloutEngine.generate(SimpleNamespace(policy=policy), [[1]], SamplingParams())  # type: ignore[arg-type]
    backends.select_backend(defined=defined)
    policy.check_backend()


def test_an_adapter_has_no_kernels_with_defined_bits(hopper: torch.device) -> None:
    backends.select_backend(defined=True)
    shape = ModelConfig.from_hf(config())
    adapter = Adapter.new(shape, LoRA(8, 16.0), seed=0)
    with pytest.raises(UserError, match=r"no kernels for an adapter under .*preset = integer"):
        Policy.from_config(config(), "integer", device=hopper, adapter=adapter)


@pytest.mark.parametrize(
    "preset, gradients, message",
    [
        (
            "int8",
            None,
            r"grad_output = e4m3: .* no kernels for FP8; use precision\.grad_output=int8",
        ),
        ("unified", None, "no kernels for FP8; use another precision.preset"),
        ("mixed", None, "no kernels for FP8; use another precision.preset"),
        ("int8", "int8", None),
        ("int8", "bf16", None),
        ("bf16", None, None),
        ("integer", None, None),
    ],
)
def test_a_card_without_e4m3_refuses_by_name(
    preset: str, gradients: str | None, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    plan = PrecisionPlan.preset(preset)
    plan = plan.replace(grad_output=gradients) if gradients else plan
    backends.select_backend(defined=plan.defined)
    gpu = torch.device("cuda", 400)
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        check_device(ModelConfig.from_hf(config()), plan, gpu)


@pytest.mark.parametrize("preset", ["int8", "unified", "jet", "mixed", "bf16", "integer"])
def test_a_card_with_e4m3_takes_every_plan(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (12, 0))
    plan = PrecisionPlan.preset(preset)
    backends.select_backend(defined=plan.defined)
    check_device(ModelConfig.from_hf(config()), plan, torch.device("cuda", 402))
    nvfp4 = PrecisionPlan.preset("unified").replace(base="nvfp4")
    backends.select_backend()
    with pytest.raises(UserError, match="no kernels for NVFP4"):
        check_device(ModelConfig.from_hf(config()), nvfp4, torch.device("cuda", 403))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_an_adapter_is_refused_under_integer_only(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    model, gpu = ModelConfig.from_hf(config()), torch.device("cuda", 401 + capability[0])
    int8 = PrecisionPlan.preset("int8").replace(grad_output="int8")
    for plan in (int8, PrecisionPlan.preset("bf16")):
        backends.select_backend()
        check_device(model, plan, gpu, adapted=True)
    backends.select_backend(defined=True)
    with pytest.raises(UserError, match=r"has no kernels for an adapter under .* = integer"):
        check_device(model, PrecisionPlan.preset("integer"), gpu, adapted=True)


@pytest.mark.parametrize("backend, opened", [("triton", "auto"), ("reference", "reference")])
def test_a_run_of_a_backend_opens_on_a_cpu(backend: str, opened: str, tmp_path: Path) -> None:
    words = ["run.device=cuda", f"run.backend={backend}", "precision.preset=integer"]
    (tmp_path / "config.toml").write_text(to_toml(load_config(None, words)))
    found = opening._settings_on(tmp_path, "cpu").run
    assert (found.device, found.backend) == ("cpu", opened)


@pytest.mark.parametrize(
    "device, why",
    [
        ("auto", "and this machine has none: use run.backend=auto"),
        ("cuda", "and this machine has none: use run.backend=auto"),
        ("cpu", "and run.device is cpu: leave one of them out"),
    ],
)
def test_hopper_is_refused_elsewhere(
    device: str, why: str, gpu_of_another_maker: torch.device
) -> None:
    with pytest.raises(UserError, match=rf"run\.backend = hopper needs a Hopper card .*{why}"):
        device_of(settings(f"device={device}", "backend=hopper"))


def test_triton_needs_any_card_from_8_0_on(gpu_of_another_maker: torch.device) -> None:
    with pytest.raises(UserError, match=r"backend = triton needs an NVIDIA card from 8\.0 on"):
        device_of(settings("device=cuda", "backend=triton"))


def test_a_run_keeps_its_backend_to_itself(hopper: torch.device) -> None:
    with pytest.raises(UserError, match=r"run\.device is cpu"):
        jetrl.train("demo", run={"backend": "triton", "device": "cpu"})
    assert backends.accelerator() is backends.HOPPER


def test_a_model_on_a_gpu_without_kernels_gets_advice_in_options(
    tmp_path: Path, gpu_of_another_maker: torch.device
) -> None:
    make_tiny(tmp_path)
    for_all = r"jetrl supports an NVIDIA card from 8\.0 on .*; use --device cpu$"
    with pytest.raises(UserError, match=for_all) as refused:
        opening.open_policy(tmp_path, None, "cuda")
    assert "run." not in str(refused.value)


def test_the_self_check_runs_on_the_selected_backend(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []

    def measure(policy: Policy, **_: int) -> parity.ParityResult:
        used.append(backends.accelerator())
        return parity.ParityResult(1, 0, 0.0, 0.0, 0.0, 1.0)

    monkeypatch.setattr(parity, "measure", measure)
    for name in ("auto", "triton"):
        backends.select_backend(name, defined=True)
        assert parity._flow_check(PrecisionPlan.preset("integer"), "cpu").ok
    assert used == [backends.HOPPER_DEFINED, backends.TRITON_DEFINED]


@pytest.mark.parametrize(
    "capability, name, defined, expected",
    [
        ((9, 0), "auto", False, backends.HOPPER),
        ((9, 0), "auto", True, backends.HOPPER_DEFINED),
        ((9, 0), "hopper", True, backends.HOPPER_DEFINED),
        ((9, 0), "triton", True, backends.TRITON_DEFINED),
        ((9, 0), "triton", False, backends.TRITON),
        ((8, 0), "auto", True, backends.TRITON_DEFINED),
        ((8, 0), "auto", False, backends.TRITON_AMPERE),
        ((8, 9), "auto", False, backends.TRITON),
        ((12, 0), "auto", False, backends.TRITON),
        ((8, 0), "hopper", False, None),
        ((7, 5), "auto", True, None),
    ],
)
def test_a_backend_is_selected_by_card_name_and_plan(
    capability: tuple[int, int],
    name: str,
    defined: bool,
    expected: Backend | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    with backends.selected_backend(name, defined=defined):
        assert backends.accelerator() is expected


@pytest.mark.parametrize(
    "backend, defined, integer, message",
    [
        (backends.TRITON_DEFINED, False, False, r"another precision plan: .*\(defined=False\)"),
        (backends.TRITON, True, True, r"another precision plan: .*\(defined=True\)"),
        (backends.HOPPER_DEFINED, False, False, r"another precision plan: .*\(defined=False\)"),
        (backends.HOPPER, True, True, r"another precision plan: .*\(defined=True\)"),
        (backends.HOPPER, False, True, "INT8 queries: use precision.preset = integer"),
    ],
)
def test_a_backend_refuses_other_plans(
    backend: Backend, defined: bool, integer: bool, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        backend.check_plan(defined, integer)
    backend.check_plan(backend.defined, backend.defined)


def test_gpus_of_amd_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an AMD GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert backends.accelerator() is None
    with pytest.raises(UserError, match="an AMD GPU: jetrl has kernels for NVIDIA GPUs only"):
        backends.backend_for(torch.device("cuda", 201))
