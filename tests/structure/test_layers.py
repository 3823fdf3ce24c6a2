"""Who may import whom, read from the sources: a failure names file, line and import.

    cli -> loop -> session -> reproduction
        -> {evaluate, environment, parity, building, judge, memory}
        -> {rollout, training, tasks, runs} -> {policy, scalar_model} -> model -> models
        -> {kernels, precision}

and everyone may use types, settings, config, errors and algorithms. rollout and training never
import each other; tasks and runs know neither the model nor torch.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "jetrl"
FILES = sorted(SOURCE.rglob("*.py"))

BASE = {"types", "config", "errors", "algorithms", "settings"}
BELOW_POLICY = {"models", "kernels", "precision"}
PARTS = {"rollout", "training", "tasks", "runs"}
EVERYTHING = (
    BASE
    | BELOW_POLICY
    | PARTS
    | {
        "policy",
        "memory",
        "building",
        "evaluate",
        "parity",
        "reproduction",
        "out_of_memory",
        "cpu_memory",
        "device_memory",
        "randomness",
        "ordering",
        "environment",
        "step_metrics",
        "preflight",
        "session",
        "judge",
        "model",
        "scalar_model",
        "loop",
        "reward_training",
    }
)

ALLOWED: dict[str, set[str]] = {
    "types": set(),
    "errors": set(),
    "algorithms": set(),
    "out_of_memory": {"errors"},
    "cpu_memory": set(),
    "device_memory": set(),
    "settings": {"algorithms"},
    "config": {"errors", "settings"},
    "documents": BASE | {"runs"},
    "precision": BASE,
    "kernels": BASE | {"precision"},
    "models": BASE | {"kernels", "precision"},
    "model": BASE | BELOW_POLICY,
    "policy": BASE | BELOW_POLICY | {"model"},
    "scalar_model": BASE | BELOW_POLICY | {"model"},
    "rollout": BASE | BELOW_POLICY | {"cpu_memory", "device_memory", "out_of_memory", "policy"},
    "training": BASE
    | BELOW_POLICY
    | {"ordering", "randomness", "out_of_memory", "model", "policy", "scalar_model"},
    "tasks": BASE,
    "runs": BASE,
    "environment": BASE | {"rollout", "tasks"},
    "evaluate": BASE | BELOW_POLICY | {"environment", "model", "policy", "rollout", "tasks"},
    "parity": BASE | BELOW_POLICY | {"policy", "rollout", "training", "randomness"},
    "judge": BASE | BELOW_POLICY | {"model", "scalar_model"},
    "building": BASE | BELOW_POLICY | {"judge", "model", "policy", "scalar_model", "tasks"},
    "reproduction": BASE | BELOW_POLICY | {"building", "policy", "runs", "tasks", "training"},
    "memory": BASE | BELOW_POLICY | {"cpu_memory", "rollout"},
    "randomness": set(),
    "ordering": {"randomness"},
    "step_metrics": BASE | {"evaluate", "runs"},
    "preflight": EVERYTHING - {"loop", "session"},
    "session": EVERYTHING - {"loop"},
    "loop": BASE | {"session"},
    "reward_training": EVERYTHING - {"loop"},
    "cli": EVERYTHING | {"cli", "bench"},
    "bench": EVERYTHING | {"cli", "bench"},
    "__main__": {"cli"},
    "": EVERYTHING,  # jetrl/__init__.py: public names, resolved on first use
}

# What the kernels may know of the precision package: how numbers are rounded, not which plan.
KERNELS_MAY_IMPORT = {
    "jetrl.precision.quantize",
    "jetrl.precision.exact",
    "jetrl.precision.layout",
    "jetrl.precision.hopper",
    "jetrl.precision.quantize_hopper",
    "jetrl.precision.tile_hopper",
    "jetrl.precision.gluon_hopper",
    "jetrl.precision.launch_hopper",
    "jetrl.precision.gemm_hopper",
    "jetrl.precision.plan.FP8_BLOCK",
}

OPTIONAL_PACKAGES = {
    "datasets",
    "deep_gemm",
    "reasoning_gym",
    "tensorboard",
    "torchao",
    "trackio",
    "triton",
    "wandb",
}

WITHOUT_TORCH = [
    "jetrl",
    "jetrl.types",
    "jetrl.errors",
    "jetrl.config",
    "jetrl.cli.main",
    "jetrl.rollout.scheduler",
    "jetrl.rollout.blocks",
    "jetrl.rollout.sequence",
    "jetrl.training.advantages",
    "jetrl.training.batch_policy",
    "jetrl.training.packing",
    "jetrl.tasks",
    "jetrl.runs",
]


def part_of(module: str) -> str:
    """`jetrl.training.packing` is of `training`, `jetrl.loop` of `loop`, `jetrl` of ``."""
    return module.split(".")[1] if "." in module else ""


def module_of(path: Path) -> str:
    parts = ["jetrl", *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import; `from jetrl import loop` is `jetrl.loop`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def offences(path: Path, text: str | None = None) -> list[str]:
    """The imports of a file that its layer does not have, with their lines."""
    text = path.read_text(encoding="utf-8") if text is None else text
    module = module_of(path)
    part = part_of(module)
    found = []
    for line, name in imports_of(ast.parse(text)):
        if not name.startswith("jetrl."):
            continue
        target = part_of(name)
        known = target in ALLOWED
        wrong = known and target != part and target not in ALLOWED[part]
        if part == "kernels" and target == "precision":
            wrong = not {name, ".".join(name.split(".")[:3])} & KERNELS_MAY_IMPORT
        if wrong:
            found.append(f"{path.relative_to(SOURCE.parent)}:{line}: {part} must not import {name}")
    return found


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_go_down_the_layers(path: Path) -> None:
    assert offences(path) == []


@pytest.mark.parametrize(
    "file, text",
    [
        ("training/x.py", "from jetrl.rollout.engine import RolloutEngine"),
        ("rollout/x.py", "import jetrl.training"),
        ("tasks/x.py", "from jetrl.policy import Policy"),
        ("runs/x.py", "def f():\n    from jetrl import training"),
        ("models/x.py", "from jetrl.policy import Policy"),
        ("kernels/x.py", "from jetrl.precision.plan import PrecisionPlan"),
        ("precision/x.py", "from jetrl.kernels.norm import rms_norm"),
        ("config.py", "from jetrl.types import Prompt"),
        ("policy.py", "from jetrl.loop import train"),
        ("loop.py", "from jetrl.cli.main import main"),
    ],
)
def test_the_check_sees_an_offence(file: str, text: str) -> None:
    found = offences(SOURCE / file, text)
    assert len(found) == 1
    assert f"{file}:{len(text.splitlines())}: " in found[0]


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_every_file_belongs_to_a_layer(path: Path) -> None:
    assert part_of(module_of(path)) in ALLOWED


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_inside_functions_are_for_optional_packages(path: Path) -> None:
    if part_of(module_of(path)) in ("cli", "bench"):
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    found = [
        f"{path.relative_to(SOURCE.parent)}:{line}: import of {name} inside {function.name}"
        for function in functions
        for line, name in imports_of(function)
        if not OPTIONAL_PACKAGES & set(name.split("."))
    ]
    assert found == []


def test_what_needs_no_torch_imports_none() -> None:
    """One process imports them one after the other and says which one brought torch."""
    code = (
        "import importlib, sys\n"
        f"for name in {WITHOUT_TORCH!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, f'{name} imports torch'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
