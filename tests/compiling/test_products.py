"""DeepGEMM's kernels are compiled ahead by processes that compute products, here made-up ones."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="it is there on Linux alone")

from jetrl.compiling import ahead, products, products_worker
from jetrl.compiling.launches import Work
from jetrl.models.families import ModelConfig
from jetrl.models.shapes import SHAPES
from jetrl.precision import PrecisionPlan
from jetrl.precision.hopper import gemm

WORK = Work(ModelConfig.from_hf(SHAPES["tiny"]), PrecisionPlan.preset("unified"), None, 8, 132)
ROWS = (256, 1000, 128, 472)
SIZES = [(rows, outputs, inputs) for outputs, inputs in ((512, 128), (128, 384)) for rows in ROWS]
# A worker whose products are a line in a file; it fails, ends or is killed at some of them.
WORKER = """
import os, runpy, signal, sys
compute = runpy.run_path(os.environ["TRUE_WORKER"])["compute"]

def product(device, *size):
    with open(os.environ["COMPUTED"], "a") as file:
        print(os.getpid(), device, *size, file=file)
    if size[0] == 1000:
        raise RuntimeError("no such tile")
    if size[0] == 128:
        os.kill(os.getpid(), signal.SIGKILL)
    folder = os.path.join(os.environ["DG_JIT_CACHE_DIR"], "cache", f"kernel.gemm.{size[0]}")
    os.makedirs(folder, exist_ok=True)

sys.exit(compute(sys.argv[1], sys.argv[2:], product))
"""


@pytest.fixture
def computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with a line for each product; the worker that writes it is in place."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setenv("TRUE_WORKER", str(products._WORKER))
    monkeypatch.setattr(products, "_WORKER", worker)
    monkeypatch.setenv("COMPUTED", str(tmp_path / "computed"))
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "deep_gemm"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path / "computed"


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Let DeepGEMM be installed, and a GPU have so many free bytes."""
    monkeypatch.setattr(gemm, "deep_gemm_installed", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 80 * 2**30))


def list_sizes(monkeypatch: pytest.MonkeyPatch, sizes: list[products.Size]) -> None:
    """Replace the launches of a run by products of some sizes, each of which comes up twice."""

    def list_launches(work: Work, _: object, multiplied: Any) -> list[str]:
        for size in sizes + sizes:
            multiplied(*size)
        return []

    monkeypatch.setattr(products, "list_launches", list_launches)


@pytest.mark.parametrize("most", [1, 3, 100])
def test_each_size_is_in_one_share_with_all_of_its_rows(most: int) -> None:
    shares = products.shared_out(SIZES, most)
    assert sorted(size for share in shares for size in share) == sorted(SIZES)
    assert len(shares) == min(most, len(ROWS))
    rows = [{size[0] for size in share} for share in shares]
    assert sum(map(len, rows)) == len(ROWS)


def test_a_failing_process_is_reported_and_the_others_compute_all(
    computed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_sizes(monkeypatch, SIZES)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    report = products.compile_products(WORK, "cuda:3")
    lines = [line.split() for line in computed.read_text().splitlines()]
    # The process that was killed at its first product did not come to its second.
    expected = [size for size in SIZES if size != (128, 128, 384)]
    assert sorted(tuple(map(int, line[2:])) for line in lines) == sorted(expected)
    assert {line[1] for line in lines} == {"cuda:3"}
    process_of = {(line[0], line[2]) for line in lines}
    assert len(process_of) == len(ROWS)  # one for all products of a number of rows
    processes = {process for process, _ in process_of}
    assert len(processes) == 3
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(int(process), 0)
    assert (report["kernels"], report["products"], report["processes"]) == (2, 8, 3)
    raised, killed = report["failed"]
    assert "1000x512x128: no such tile\n1000x128x384: no such tile" in raised
    assert "ended with -9" in killed


def test_without_products_no_process_is_started(
    computed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_sizes(monkeypatch, [])
    monkeypatch.setattr(products, "_started", None)
    assert products.compile_products(WORK, "cuda:0")["processes"] == 0


def test_a_run_has_them_computed_once(computed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way from a run's process; a second run starts nothing."""
    sizes = [size for size in SIZES if size[0] != 128]
    list_sizes(monkeypatch, sizes)
    on_a_gpu(monkeypatch, free=80 * 2**30)
    triton, deep_gemm = ahead._compilers(WORK, torch.device("cuda:0"))
    with ahead._compiled(WORK, deep_gemm):
        pass
    lines = computed.read_text().splitlines()
    assert sorted(tuple(map(int, line.split()[2:])) for line in lines) == sorted(sizes)
    (record,) = computed.with_name("deep_gemm").glob("jetrl-*.json")
    assert '"products": 6' in record.read_text()
    assert not computed.with_name("triton").exists()
    monkeypatch.setattr(ahead, "_Worker", None)
    with ahead._compiled(WORK, deep_gemm):
        pass
    with pytest.raises(TypeError), ahead._compiled(WORK, triton):
        pass  # Triton's kernels have a record of their own, which is not there.
    assert computed.read_text().splitlines() == lines


def test_processes_end_with_a_run_that_fails(
    computed: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Any
) -> None:
    on_a_gpu(monkeypatch, free=80 * 2**30)
    list_sizes(monkeypatch, SIZES[:1])
    begun = computed.with_name("begun")
    products._WORKER.write_text(
        f"import os, time\nopen({str(begun)!r}, 'w').write(str(os.getpid()))\ntime.sleep(1000)"
    )
    _, deep_gemm = ahead._compilers(WORK, torch.device("cuda:0"))

    def fail_once_the_process_runs() -> None:
        with ahead._compiled(WORK, deep_gemm):
            wait_until(lambda: begun.exists() and begun.read_text() != "")
            raise KeyError

    with pytest.raises(KeyError):
        fail_once_the_process_runs()
    status = Path("/proc", begun.read_text(), "status")
    # A process whose parent ended is the init process's to reap, which not every container has.
    assert not status.exists() or "State:\tZ" in status.read_text()


@pytest.mark.parametrize("room, most", [(-1, 0), (2, 2), (2.9, 2), (8, 8), (40, 8)])
def test_there_are_as_many_processes_as_the_weights_leave_room_for(
    monkeypatch: pytest.MonkeyPatch, room: float, most: int
) -> None:
    """Qwen3-8B: FP32 master weights, FP8 linear layers, and BF16 embedding and head."""
    work = replace(WORK, config=ModelConfig.from_hf(SHAPES["qwen3-8b"]))
    linears = 36 * 4096 * (6144 + 4096 + 3 * 12288)
    vocabulary = 151936 * 4096
    weights = 4 * (linears + 2 * vocabulary) + linears + 4 * vocabulary
    small = 64 * 2**20  # scales, norms, and the table of rotary positions
    free = weights + small + 6 * vocabulary + int(room * 1.5 * 2**30)
    assert products.affordable_processes(work, free, cards=1) == most
    assert products.affordable_processes(work, free, cards=2) == 8  # half of the master weights
    on_a_gpu(monkeypatch, free)
    libraries = [compiler.name for compiler in ahead._compilers(work, torch.device("cuda:0"))]
    assert libraries == ["Triton", "DeepGEMM"][: 1 + (most > 0)]


def test_without_deep_gemm_only_triton_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "deep_gemm_installed", lambda: False)
    assert ahead._compilers(WORK, torch.device("cuda:0")) == [ahead.TRITON]


def test_the_product_is_deep_gemms_own_call_at_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[tuple[int, ...]]] = []

    def fp8_gemm_nt(left: Any, weight: Any, out: torch.Tensor, recipe: Any) -> None:
        calls.append([tuple(x.shape) for x in (*left, *weight, out)])

    library = SimpleNamespace(fp8_gemm_nt=fp8_gemm_nt)
    monkeypatch.setattr(gemm, "_load_deep_gemm", lambda: library)
    monkeypatch.setattr(gemm, "_check", lambda *_: None)  # It wants a GPU.
    assert products_worker.compute("cpu", ["256x384x128", "1000x128x512"]) == 0
    assert calls == [
        [(256, 128), (256, 1), (384, 128), (3, 1), (256, 384)],
        [(1000, 512), (1000, 4), (128, 512), (1, 4), (1000, 128)],
    ]


def test_the_command_line_needs_a_gpu_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("it is for machines without one")
    process = products._started([(256, 384, 128)], "cuda:0")
    printed, _ = process.communicate()
    assert process.returncode == 1
    assert "cuda" in printed.lower()
