"""The operations that `jetrl bench` times one by one, by their references on a CPU."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.command import OPERATIONS
from tests.kernels.interpreted import interpreted
from torch import Tensor

from benchmarks import experts, head, operations, products
from jetrl.errors import MismatchError, UserError
from jetrl.precision import PrecisionPlan


def rows_of(name: str, tmp_path: Path, *words: str) -> list[dict[str, Any]]:
    tiny = ["--shape", "tiny", "--device", "cpu", "--out", f"{tmp_path}/rows.json"]
    operations.main(name, [*tiny, *words])
    found = json.loads((tmp_path / "rows.json").read_text())
    assert (found["benchmark"], found["command"][:12]) == (name, "jetrl bench ")
    return list(found["rows"])


def test_products_of_a_plan(tmp_path: Path) -> None:
    words = ["--plan", "bf16", "--plan", "int8", "--tokens", "5", "--decode", "2"]
    rows = rows_of("products", tmp_path, *words)
    found = {(row["plan"], row["rows"], row["operation"]) for row in rows}
    assert ("int8", 5, "wgrad") in found
    assert ("int8", 2, "dgrad") not in found


def test_products_of_integer_are_compared_between_backends(tmp_path: Path) -> None:
    words = ["--plan", "integer", "--plan", "integer backend=triton"]
    rows = rows_of("products", tmp_path, *words, "--tokens", "3", "--decode")
    found = {(row["plan"], row["operation"]) for row in rows}
    assert {(plan, "fprop") for plan in words[1::2]} < found
    args = argparse.Namespace(plan=words[1::2], device="cpu", tokens=3, decode=[2])
    assert products.different(args) == 0


def test_a_head_has_a_row_per_operation(tmp_path: Path) -> None:
    rows = rows_of("head", tmp_path, "--rows", "3", "70")
    names = ["fprop", "dgrad", "wgrad", "X", "W"]
    assert [row["operation"] for row in rows] == names * 2
    assert all(row["of_bf16_time"] > 0 for row in rows if row["operation"] in head.PRODUCTS)
    assert head.different(argparse.Namespace(device="cpu")) == 0


def test_experts_have_a_row_per_product_and_layer(tmp_path: Path) -> None:
    plans = ["int8", "integer"]
    tiny = ["--shape", "tiny", "--device", "cpu", "--tokens", "256", "6"]
    tiny += [word for plan in plans for word in ("--plan", plan)]
    experts.main([*tiny, "--out", f"{tmp_path}/rows.json"])
    found = json.loads((tmp_path / "rows.json").read_text())
    assert found["command"] == f"jetrl bench experts {' '.join(tiny)}"
    names = [(row["layer"], row["operation"]) for row in found["rows"]]
    products = itertools.product(("gate_up", "down"), ("fprop", "quantize", "dgrad", "wgrad"))
    layers = (("router", "forward"), ("both", "forward"), ("both", "both"))
    assert names == [*products, *layers] * 4
    sizes = [(row["plan"], row["tokens"]) for row in found["rows"]]
    assert sizes == [(plan, tokens) for plan in plans for tokens in (256, 6) for _ in range(11)]
    with pytest.raises(UserError, match="--tiles"):
        experts.main([*tiny, "--tiles"])


@pytest.mark.parametrize("words", ["int8", "integer", "unified"])
def test_experts_are_compared_with_dense_layers(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, sizes = PrecisionPlan.preset(words), experts.SIZES["tiny"]
    experts.check(sizes, plan, "cpu", tokens=5)
    summed, calls = experts.combine, []

    def once_wrong(*operands: Tensor) -> Tensor:
        calls.append(1)
        return summed(*operands) * (1.5 if len(calls) == 1 else 1.0)

    monkeypatch.setattr(experts, "combine", once_wrong)
    with pytest.raises(MismatchError, match="elements differ"):
        experts.check(sizes, plan, "cpu", tokens=5)


def test_attention_is_timed_with_portable_kernels_in_the_interpreter() -> None:
    rows = interpreted("interpreted_benchmark.py")
    decode, packed, prefill, by_torch = rows
    assert (decode["tokens"], prefill["context"], by_torch["tokens"]) == (70, 70, 70)
    assert packed["tokens"] == 70
    assert all(value > 0 for row in rows for value in row.values() if isinstance(value, float))


def test_a_layer_has_a_row_for_each_plan_with_and_without_adapters(tmp_path: Path) -> None:
    words = ["--row", "bf16", "--row", "int8", "--tokens", "4", "--length", "2"]
    rows = rows_of("layer", tmp_path, *words, "--adapter-rank", "2")
    names = ["bf16", "bf16, adapters of rank 2", "int8", "int8, adapters of rank 2"]
    assert [row["name"] for row in rows] == names
    assert {row["bits_different"] for row in rows} == {0}
    assert all(row["total_ms"] > 0 and row["times_bf16"] > 0 for row in rows)


def test_norm_and_swiglu_are_timed_in_training_and_in_decode(tmp_path: Path) -> None:
    rows = rows_of("norm", tmp_path, "--tokens", "3")
    names = ("add, norm, quantize", "swiglu, quantize")
    shapes = [f"{tokens} x {width}" for tokens in (3, 8, 64, 256) for width in (256, 512)]
    assert [row["shape"] for row in rows] == shapes
    assert [row["name"] for row in rows] == [*names] * 4


def test_kernels_without_a_reference_are_refused_on_a_cpu(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="bench attention: the reference has no such kernels"):
        rows_of("attention", tmp_path)


def test_every_operation_has_a_record() -> None:
    assert all(operations.operation_named(name).document for name in OPERATIONS)
