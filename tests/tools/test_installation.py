"""The wheel holds its recipes and data, and the lines of the Dockerfile fit the project."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from jetrl.settings.loading import packaged_recipes

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources without a network."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("recipes", "data", "src"):
        shutil.copytree(
            ROOT / name,
            source / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
        )
    build = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
    words = [sys.executable, "-c", build, str(out)]
    subprocess.run(words, cwd=source, check=True, capture_output=True)
    (file,) = out.glob("*.whl")
    return file


def test_a_wheel_has_the_recipes_the_data_and_the_program(wheel: Path, tmp_path: Path) -> None:
    """The unpacked wheel and its dependencies are enough: no file of the repository is used."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
        names = set(archive.namelist())
    data = ("py.typed", "runs/report.css", "runs/metrics.txt", "tasks/gsm8k/LICENSE")
    assert {f"jetrl/{name}" for name in data} <= names
    assert not any(name.startswith(("tests/", "tools/", "benchmarks/")) for name in names)
    environment = dict(os.environ, PYTHONPATH=str(tmp_path))

    def python(*words: str) -> str:
        command = [sys.executable, "-P", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    listed = json.loads(python("-m", "jetrl", "recipes", "--json"))
    assert [recipe["name"] for recipe in listed] == packaged_recipes()
    bench = [sys.executable, "-P", "-m", "jetrl", "bench", "step"]
    refused = subprocess.run(bench, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "comes with a checkout" in refused.stderr
    program = (
        "import jetrl; from jetrl.tasks import get_task; task = get_task('gsm8k'); "
        "print(jetrl.__file__, len(task.prompts('train')), len(task.prompts('test')))"
    )
    assert python("-c", program).split() == [str(tmp_path / "jetrl/__init__.py"), "7473", "1319"]


def test_the_dockerfile_copies_what_the_wheel_is_built_from() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    assert names == {"pyproject.toml", "README.md", "LICENSE", "recipes", "data", "src"}
    kept = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {f"!{name}" for name in names} <= set(kept)
    for name in names:
        assert (ROOT / name).exists()


def test_the_dockerfile_installs_what_the_project_asks_for() -> None:
    (toolkit,) = re.findall(r"nvidia/cuda:(\d+\.\d+)", DOCKERFILE)
    (wheels,) = re.findall(r"whl/cu(\d+)", DOCKERFILE)
    assert wheels == toolkit.replace(".", ""), "nvcc is as torch's CUDA"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (extras,) = re.findall(r"'\.\[(.+)\]'", DOCKERFILE)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    (version,) = re.findall(r"torch==(\S+)\"", DOCKERFILE)
    (least,) = (item for item in project["dependencies"] if item.startswith("torch>="))
    assert tuple(map(int, version.split("."))) >= tuple(map(int, least[7:].split(".")))
    text = re.sub(r"(?m)^#.*\n", "", DOCKERFILE)
    assert set(re.findall(r"python\d\.\d+", text)) == {"python3.12"}, "Ubuntu 24.04's own"
