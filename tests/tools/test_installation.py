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
    assert {"jetrl/py.typed", "jetrl/data/gsm8k/LICENSE"} <= names
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


LINES = [  # of the Dockerfile, in their order; what a group holds is checked below
    r"FROM nvidia/cuda:(?P<toolkit>13\.\d+)\.\d+-devel-ubuntu24\.04",
    r"RUN apt-get update && apt-get install -y --no-install-recommends (?P<packages>[\w. -]+) "
    r"&& rm -rf /var/lib/apt/lists/\*",
    r"ENV VIRTUAL_ENV=/venv PATH=/venv/bin:\$PATH CUDA_HOME=/usr/local/cuda",
    r"ENV HF_HOME=/cache PYTHONUNBUFFERED=1",
    r"RUN (?P<python>python3\.\d+) -m venv /venv",
    r'RUN pip install --no-cache-dir "torch==(?P<torch>[\d.]+)" '
    r"--index-url https://download\.pytorch\.org/whl/(?P<wheels>cu\d+)",
    r"WORKDIR /src",
    r"COPY pyproject\.toml README\.md LICENSE \./",
    r"COPY recipes recipes",
    r"COPY data data",
    r"COPY src src",
    r"RUN pip install --no-cache-dir '\.\[[\w,-]+\]'",
    r"WORKDIR /jetrl",
    r'CMD \["jetrl", "doctor"\]',
]


def test_each_line_of_the_dockerfile_is_one_that_was_checked() -> None:
    """No docker is needed: instructions have their forms, and lines that name one thing agree."""
    text = re.sub(r"(?m)^#.*\n", "", DOCKERFILE)
    lines = [" ".join(line.split()) for line in text.replace("\\\n", " ").splitlines() if line]
    named: dict[str, str] = {}
    for line, form in zip(lines, LINES, strict=True):
        match = re.fullmatch(form, line)
        assert match, line
        named |= match.groupdict()
    assert named["wheels"] == "cu" + named["toolkit"].replace(".", ""), "nvcc is as torch's CUDA"
    python = named["python"]  # Ubuntu 24.04's own; headers, which Triton's launcher is built with
    assert named["packages"].split() == [python, f"{python}-dev", f"{python}-venv"]
    assert python == "python3.12"
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "jetrl" in scripts["scripts"], "the command of the image"


def test_the_dockerfile_copies_what_the_wheel_is_built_from() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    assert names == {"pyproject.toml", "README.md", "LICENSE", "recipes", "data", "src"}
    kept = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {f"!{name}" for name in names} <= set(kept)
    for name in names:
        assert (ROOT / name).exists()


def test_the_dockerfile_installs_what_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (extras,) = re.findall(r"'\.\[(.+)\]'", DOCKERFILE)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    (version,) = re.findall(r"torch==(\S+)\"", DOCKERFILE)
    (least,) = (item for item in project["dependencies"] if item.startswith("torch>="))
    assert tuple(map(int, version.split("."))) >= tuple(map(int, least[7:].split(".")))
    pythons = {int(minor) for minor in re.findall(r"python3\.(\d+)", DOCKERFILE)}
    assert pythons <= {11, 12, 13}, project["requires-python"]
    assert DOCKERFILE.rstrip().endswith('CMD ["jetrl", "doctor"]')
