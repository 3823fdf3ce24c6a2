"""The CPU memory of the machine, within the limits of a process's groups, and malloc's share."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from jetrl.memory import cpu as cpu_memory

STAT = "anon 200000\nfile 300000\nshmem 100000\n"


class Machine:
    """Files as Linux shows them: 800 kB are available, and in a group without a limit."""

    def __init__(self, root: Path, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups = root / "cgroup"
        self.meminfo = root / "meminfo"
        self.meminfo.write_text("MemTotal: 900 kB\nMemAvailable:   800 kB\n")
        (root / "self").write_text(f"9:cpuset:/elsewhere\n{group}\n")
        monkeypatch.setattr(cpu_memory, "_MACHINE", self.meminfo)
        monkeypatch.setattr(cpu_memory, "_GROUPS", root / "self")
        monkeypatch.setattr(cpu_memory, "_HIERARCHY", self.groups)

    def limit(self, group: str, **files: str) -> None:
        folder = self.groups / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / f"memory.{name}").write_text(text)


def test_a_containers_limit_counts_but_not_what_it_caches_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, "0::/", monkeypatch)
    assert cpu_memory.available_bytes() == 800 * 1024
    machine.limit("", max="600000\n", current="500000\n", stat=STAT)
    assert cpu_memory.available_bytes() == 600000 - 500000 + 200000
    machine.limit("", max="max\n")
    assert cpu_memory.available_bytes() == 800 * 1024
    machine.limit("", max="90000000\n")
    assert cpu_memory.available_bytes() == 800 * 1024, "the machine's own is the smaller one"
    machine.meminfo.unlink()
    (tmp_path / "self").unlink()
    assert cpu_memory.available_bytes() is None, "a system that does not say"


def test_a_limit_further_up_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, "0::/user.slice/job", monkeypatch)
    machine.limit("user.slice/job", max="max\n", current="400000\n", stat=STAT)
    machine.limit("user.slice", max="700000\n", current="600000\n", stat=STAT)
    assert cpu_memory.available_bytes() == 300000
    machine.limit("user.slice/job", max="450000\n")
    assert cpu_memory.available_bytes() == 250000


GROWING = """
import resource, sys
from jetrl.cli.main import main
main(["--version"])
import torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for step in range(0, 300, 3):  # as contexts do
    x = torch.ones(2**20 + 2**12 * step)
    y = 2 * x
    z = x + y
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_the_command_line_keeps_freed_memory_for_the_next_tensors() -> None:
    def page_faults(**environment: str) -> int:
        ran = subprocess.run(
            [sys.executable, "-c", GROWING],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return int(ran.stdout.split()[-1])

    # A user's choice stays: with malloc's own limit it gives memory back.
    assert page_faults() < page_faults(MALLOC_TRIM_THRESHOLD_="131072") / 10
