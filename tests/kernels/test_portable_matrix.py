"""Kernels of `run.backend = triton` compile for each NVIDIA GPU from sm_80 on, by their rules."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="it is there on Linux alone")

sys.path.insert(0, str(Path(__file__).parent))
from portable_rules import (
    CARDS,
    PLANS,
    PORTABLE,
    forbidden,
    instructions,
    problems_of_products,
    spills_in_loops,
    sums_of_floats,
)

SOURCE = Path(__file__).parents[2] / "src" / "jetrl"


ALL_CARDS = "JETRL_ALL_CARDS" in os.environ


def compiled_by(program: str, folder: Path, capability: str, *words: str) -> list[dict[str, Any]]:
    """Return the kernels that a program of this folder compiled."""
    out = folder / "kernels.json"
    path = str(Path(__file__).with_name(program))
    command = [sys.executable, "-W", "ignore", path, capability, str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    kernels: list[dict[str, Any]] = json.loads(out.read_text())["kernels"]
    return kernels


@pytest.mark.parametrize("capability", CARDS if ALL_CARDS else (80, 90, 103, 120))
def test_kernels_compile_and_keep_the_rules(capability: int, tmp_path: Path) -> None:
    kernels = compiled_by("portable_matrix.py", tmp_path, str(capability))
    broken = {f"{one['case']} {one['kernel']}": one["problems"] for one in kernels}
    assert {name: problems for name, problems in broken.items() if problems} == {}
    compiled = {one["kernel"] for one in kernels}
    assert launched(PORTABLE) - compiled == set()


def launched(files: tuple[str, ...]) -> set[str]:
    """Return the kernels of some files that are launched."""
    return {
        f"{file.stem}.{name}"
        for pattern in files
        for file in SOURCE.glob(pattern)
        for name in re.findall(r"^ +(?:\w+ = )?(\w*kernel)\[", file.read_text(), re.MULTILINE)
    }


def assert_few_rows_have_the_instructions_of_many(kernels: list[dict[str, Any]]) -> None:
    """Check what batch invariance rests on; the columns of an instruction are free."""
    used: dict[str, set[str]] = {}
    for one in kernels:
        products = {re.sub(r"(m\d+)n\d+k", r"\1k", each) for each in one["products"]}
        used.setdefault(one["kernel"], set()).update(products)
    for name, products in used.items():
        if name.startswith(("float_tiles.", "grouped_bf16.", "adapter.")) and products:
            assert len(products) == 1, f"{name}: {products}"
        if name in ("forward_triton.tile_kernel", "decode.decode_kernel"):
            kinds = {each.split(".row.")[0] for each in products}
            assert kinds == {"mma.sync.aligned.m16k16"}, f"{name}: {products}"


# Every plan, shape and GPU with JETRL_ALL_CARDS=1; else these parts of a whole model.
PLANS_OF = {80: ("bf16", "int8/int8"), 86: ("bf16", "int8/int8")}
WITH_E4M3 = ("bf16", "int8/int8", "int8", "unified", "unified/saved", "jet", "mixed")
ALL = [(card, plan, "") for card in CARDS for plan in PLANS_OF.get(card, WITH_E4M3)]
SOME = [
    (
        80,
        "int8/int8",
        " ".join(f"qwen3-8b:{p}" for p in ("decode", "prefill", "update", "long_update")),
    ),
    (80, "int8/int8", "qwen3-8b:adapted"),
    (89, "unified/saved", "qwen3-8b:decode qwen3-8b:update"),
    (120, "unified", "smollm2-135m:adapted"),
    (120, "bf16", "smollm2-135m:update qwen3-30b-a3b:experts"),
    *((card, "bf16", "qwen3-30b-a3b:experts") for card in (80, 90)),
]


@pytest.mark.parametrize("capability, plan, pieces", ALL if ALL_CARDS else SOME)
def test_kernels_of_other_plans_compile(
    capability: int, plan: str, pieces: str, tmp_path: Path
) -> None:
    kernels = compiled_by("plans_matrix.py", tmp_path, str(capability), plan, *pieces.split())
    broken = {f"{one['case']} {one['kernel']}": one["problems"] for one in kernels}
    assert {name: problems for name, problems in broken.items() if problems} == {}
    assert_few_rows_have_the_instructions_of_many(kernels)
    compiled = {one["kernel"] for one in kernels}
    assert compiled & launched(PLANS)
    left_out = {name for name in launched(PLANS) if name.startswith("saved.") != ("/saved" in plan)}
    some = pieces or "int8" in plan or plan == "bf16"
    assert some or launched(PLANS) - left_out - compiled == set()


@pytest.mark.parametrize(
    "ptx",
    [
        "ex2.approx.f32 %f1, %f2;",
        "\t@%p1 div.full.f32 %f1, %f2, %f3;",
        "{ .reg .b32 a; add.rn.ftz.f32 %f1, %f2, %f3; }",
        "red.global.add.f32 [%rd1], %f1;",
        "atom.global.gpu.acq_rel.add.noftz.bf16 %rs1, [%rd1], %rs2;",
        "fma.rn.bf16x2 %r1, %r2, %r3, %r4;",
    ],
)
def test_a_forbidden_instruction_is_found(ptx: str) -> None:
    assert len(list(forbidden(instructions(ptx)))) == 1


@pytest.mark.parametrize(
    "ptx",
    [
        "div.rn.f32 %f1, %f2, %f3;",
        "sqrt.rn.f64 %fd1, %fd2;",
        "cvt.rn.bf16x2.f32 %r1, %f1, %f2;",
        "add.rn.f32.bf16 %f1, %rs1, %f2;",  # a float32 sum of a widened bfloat16
        "atom.global.max.s32 %r1, [%rd1], %r2;",
        "atom.global.gpu.acq_rel.add.u32 %r1, [%rd1], %r2;",
    ],
)
def test_other_instructions_are_let_pass(ptx: str) -> None:
    assert len(instructions(ptx)) == 1
    assert list(forbidden(instructions(ptx))) == []


def test_products_are_of_int8_by_tensor_cores() -> None:
    int8 = "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"
    assert problems_of_products(True, [int8]) == []
    assert problems_of_products(True, ["wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8"]) == []
    assert problems_of_products(True, ["tcgen05.mma.cta_group::1.kind::i8"]) == []
    assert problems_of_products(True, ["mad.lo.s32"]) != []
    bf16 = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    assert problems_of_products(True, [int8, bf16]) != []
    assert problems_of_products(True, [bf16], bf16=True) == []
    assert problems_of_products(True, [int8, bf16], bf16=True) != []
    assert problems_of_products(True, [], bf16=True) != []


def test_sums_of_floats_are_found_among_others() -> None:
    reduce = (
        '"tt.reduce"(%x) <{{axis = 1 : i32}}> ({{ %3 = arith.{} %1, %2 : {}'
        " tt.reduce.return %3 }}) : (tensor<128x64x{}, #blocked>) -> tensor<128x{}>\n"
    )
    kinds = [("addi", "i32"), ("addf", "f32"), ("maxnumf", "f32"), ("addf", "f64")]
    code = "".join(reduce.format(name, kind, kind, kind) for name, kind in kinds)
    assert list(sums_of_floats(code)) == [64, 64]


def test_spills_are_counted_in_innermost_loops() -> None:
    branch = "@P0 BRA `({})"
    outer = ["STL [R1], R2", ".L_x_0", "LDL R2, [R1]", branch.format(".L_x_0")]
    assert spills_in_loops(outer) == 1
    inner = [".L_x_1", "IMMA R4, R5", branch.format(".L_x_1")]
    assert spills_in_loops([*outer[:3], *inner, outer[3]]) == 0
