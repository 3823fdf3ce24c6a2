"""An installed wheel is enough to train, and the lines of the Dockerfile fit the project."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from jetrl.settings.loading import packaged_recipes

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


# The demo with two steps of a model of one layer.
TINY = """sft.steps=0 sft.until=none loop.steps=2 rollout.prompts_per_step=4 eval.prompts=4
train.updates_per_step=1 model.config.num_hidden_layers=1"""


def built(kind: str, source: Path, out: Path) -> Path:
    """Build an sdist or a wheel without a network; return its file."""
    build = f"import setuptools.build_meta as b, sys; print(b.build_{kind}(sys.argv[1]))"
    words = [sys.executable, "-c", build, str(out)]
    done = subprocess.run(words, cwd=source, check=True, capture_output=True, text=True)
    return out / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with the wheel of the sdist, and this one's dependencies."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("out")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("recipes", "data", "src"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    with tarfile.open(built("sdist", source, out)) as archive:
        archive.extractall(out, filter="data")
    (unpacked,) = out.glob("jetrl-*/")
    wheel = built("wheel", unpacked, out)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert not any(name.startswith(("tests/", "tools/", "benchmarks/")) for name in names)
    environment = out / "venv"
    venv.create(environment, with_pip=True)
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    pip = [environment / "bin" / "python", "-m", "pip", "install", *options, wheel]
    subprocess.run(pip, check=True, capture_output=True)
    (packages,) = environment.glob("lib/*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return environment


def test_an_installed_wheel_needs_no_checkout(installed: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def ran(*words: str, code: int = 0) -> str:
        command = [installed / "bin" / words[0], *words[1:]]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    listed = json.loads(ran("jetrl", "recipes", "--json"))
    assert [recipe["name"] for recipe in listed] == packaged_recipes()
    assert "needs a checkout" in ran("jetrl", "bench", "step", code=2)
    program = (
        "import jetrl; from jetrl.tasks import get_task; task = get_task('gsm8k'); "
        "print(jetrl.__file__, len(task.prompts('train')), len(task.prompts('test')))"
    )
    file, *sizes = ran("python", "-c", program).split()
    assert Path(file).is_relative_to(installed)
    assert sizes == ["7473", "1319"]
    assert "step 2/2" in ran("jetrl", "train", "demo", *TINY.split())
    assert (tmp_path / "runs" / "demo" / "report.html").is_file()
    assert "12+07=" in ran("jetrl", "sample", "runs/demo", "12+07=", "--max-tokens", "4")


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
