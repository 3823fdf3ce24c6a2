"""Compile what other plans than `integer` launch on a GPU that is not there, from sm_80 on.

    python tests/kernels/plans_matrix.py CAPABILITY OUT.json PLAN [SHAPE:PIECE ...]

As in portable_matrix.py and compile_kernels.py, but whole models by the tables of `run.backend =
triton`. Floating-point sums may follow the layouts of a GPU, so only its limits are checked.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compile_kernels
import portable_matrix
import triton
from compile_kernels import META, sources_for_meta
from portable_rules import problems_of_resources

# Shapes with head_dim 128, with 64 and short groups, and with biases.
SHAPES = ("qwen3-8b", "smollm2-135m", "qwen2.5-7b")


def plan_of(name: str) -> Any:
    """Return the plan NAME, or NAME/FORMAT with another format of output gradients, or saved."""
    from jetrl.precision import PrecisionPlan

    preset, _, gradients = name.partition("/")
    plan = PrecisionPlan.preset(preset)
    if gradients == "saved":
        return plan.replace(saved="int8")
    return plan.replace(grad_output=gradients) if gradients else plan


def decode(shape: str, plan: str) -> None:
    compile_kernels.decode(shape, plan_of(plan))


def prefill(shape: str, plan: str) -> None:
    compile_kernels.prefill(shape, plan_of(plan))


def update(shape: str, plan: str) -> None:
    compile_kernels.update(shape, plan_of(plan))


def adapted(shape: str, plan: str) -> None:
    """Decode and an update with adapters, and products of many rows."""
    from jetrl.precision.triton.adapter import project_down, project_up

    for rank in (16, 64):
        compile_kernels.decode(shape, plan_of(plan), rank, compile_kernels.DECODES[:1])
    compile_kernels.update(shape, plan_of(plan), 16)
    for rank, n, k in ((8, 12288, 4096), (100, 768, 1152)):
        weight, x = compile_kernels.adapter_of(rank, n, k), compile_kernels.empty(5000, k)
        u = project_down(x, weight.down, weight.arrived)
        project_up(compile_kernels.empty(5000, n), u, weight.up, weight.columns)


def long_update(shape: str, plan: str) -> None:
    """A backward of attention whose dS is too large to be kept, and stems in parts."""
    import torch

    from jetrl.models.attention import PackedKeyValues

    stems = compile_kernels.stems_of
    for tokens, shared in ((70_000, None), (70_000, stems(35_072, 70_000, 600)),
                           (300, stems(128, 300, 20))):  # fmt: skip
        kept = PackedKeyValues(torch.tensor([0, tokens]), plan_of(plan), META, shared)
        compile_kernels.attend(kept, tokens, 64 if shape == "smollm2-135m" else 128)


def experts(shape: str, plan: str) -> None:
    """BF16 products of experts at Qwen3-30B-A3B's shape and an odd one, for all sizes of tiles."""
    from jetrl.precision.groups import Groups
    from jetrl.precision.triton.grouped_bf16 import (
        add_bf16_grouped_product,
        add_bf16_grouped_wgrad,
        bf16_grouped_dgrad,
        bf16_grouped_matmul,
    )

    ints, count, slots = portable_matrix.ints, 128, 8
    for tokens, n, k in ((64, 1536, 2048), (4096, 1536, 2048), (4096, 2048, 768), (4096, 96, 208)):
        groups = Groups(ints(tokens * slots), ints(count), ints(tokens, slots))
        weight = compile_kernels.empty(count * n, k)
        for by_token in (True, False):
            x = compile_kernels.empty(tokens if by_token else tokens * slots, k)
            dy = bf16_grouped_matmul(x, weight, groups, by_token)
            total = portable_matrix.floats(count * n, k)
            add_bf16_grouped_wgrad(total, dy, x, groups, by_token)
        bf16_grouped_dgrad(dy, weight, groups)
        for rank in (16, 64):
            u, up = compile_kernels.empty(len(dy), 2 * rank), compile_kernels.empty(count, n, rank)
            half = slice(n // 2, n)
            add_bf16_grouped_product(dy[:, half], u[:, rank:], up[:, half], groups, False)
            add_bf16_grouped_product(u[:, rank:], dy[:, half], up[:, half], groups, True)


PIECES: dict[str, Callable[[str, str], None]] = {
    work.__name__: work for work in (decode, prefill, update, adapted, long_update, experts)
}


def main(capability: str, out: str, plan: str, *pieces: str) -> None:
    from jetrl.precision.backend import select_backend

    compile_kernels.take_torch(Path(out).parent)
    compiler = portable_matrix.Compiler(int(capability), problems_of_resources)
    compiler.install()
    select_backend("triton")
    for name in pieces or [f"{shape}:{piece}" for piece in PIECES for shape in SHAPES]:
        shape, piece = name.split(":")
        compiler.run(f"{name} {plan}", lambda p=piece, s=shape: PIECES[p](s, plan))
    result = {"triton": triton.__version__, "kernels": compiler.kernels}
    Path(out).write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    with sources_for_meta():
        main(*sys.argv[1:])
