"""Several GPUs: the kernels of ordered gradients, and updates with the bits of one GPU."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.runs import results

from jetrl.distributed.shards import shard_of
from jetrl.kernels.norm import block_squares
from jetrl.precision.gradients import matmul_product, rows_added
from jetrl.runs.directory import RunDirectory

pytestmark = pytest.mark.gpu

WORKER = Path(__file__).parent / "ranks_worker.py"
RUNS = WORKER.with_name("runs_worker.py")
FAULTS = WORKER.parents[1] / "reliability" / "fail_ranks.py"
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_products_are_added_one_after_the_other(count: int, dtype: torch.dtype) -> None:
    from jetrl.precision.triton.add import add_products

    g = torch.Generator("cuda").manual_seed(0)
    products = torch.randn(count, 300, 640, generator=g, device="cuda").to(dtype)
    total = torch.randn(300, 640, generator=g, device="cuda")
    first, expected = products[0].float(), total.clone()
    for product in products:
        expected += product
    for product in products[1:]:
        first = first + product
    assert torch.equal(add_products(products, None), first)
    assert torch.equal(add_products(products, total.clone(), begun=False), first)
    assert add_products(products, total) is total
    assert torch.equal(total, expected)


@pytest.mark.parametrize("shape", [(1024, 4096), (1100, 512), (151936, 128), (72, 333)], ids=str)
def test_squares_of_blocks_do_not_depend_on_the_division(shape: tuple[int, int]) -> None:
    x = torch.randn(*shape, device="cuda")
    whole = block_squares(x)
    assert len(whole) == -(-shape[0] // 128)
    torch.testing.assert_close(whole.double().sum(), x.double().square().sum())
    for size in (2, 3, 4):
        shards = [shard for r in range(size) if (shard := shard_of(shape[0], r, size))]
        if shards:
            parts = [block_squares(x[shard.own_rows].clone()) for shard in shards]
            assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("size", [2, 4])
def test_rows_of_the_embedding_are_added_by_their_owners(size: int) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    rows = torch.randint(0, 900, (5000,), generator=g, device="cuda")
    rows[::3] = 17  # a token that comes often
    values = torch.randn(5000, 512, generator=g, device="cuda").bfloat16()
    total = torch.randn(1100, 512, generator=g, device="cuda")
    expected = rows_added(total.clone(), rows, values, range(1100))
    parts = []
    for rank in range(size):
        shard = shard_of(1100, rank, size)
        assert shard is not None
        own = range(shard.own_rows.start, shard.own_rows.stop)
        parts.append(rows_added(total[shard.own_rows].clone(), rows, values, own))
    assert torch.equal(torch.cat(parts), expected)
    plain = total.clone().index_put_((rows,), values.float(), accumulate=True)
    assert torch.equal(plain, expected)


@pytest.mark.parametrize(
    "tokens, n, k", list(itertools.product([100, 4096], [512, 4096], [512, 12288]))
)
def test_a_product_added_in_the_gemm_is_the_sum(tokens: int, n: int, k: int) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    dy = torch.randn(tokens, n, generator=g, device="cuda").bfloat16()
    x = torch.randn(tokens, k, generator=g, device="cuda").bfloat16()
    total = torch.randn(n, k, generator=g, device="cuda")
    expected = total + matmul_product(dy, x, None)
    assert torch.equal(matmul_product(dy, x, total), expected)


def _started(size: int, *words: str, restarts: int = 0) -> str:
    """Return what a program prints on so many GPUs; one process is not started by torchrun."""
    command = [sys.executable]
    if size > 1:
        command += ["-m", "torch.distributed.run", f"--nproc-per-node={size}"]
        command += ["--standalone", f"--max-restarts={restarts}"]
    done = subprocess.run(
        [*command, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs on one GPU and on two, of which one was cut on two GPUs."""
    folder = tmp_path_factory.mktemp("runs")
    _started(2, str(RUNS), "cuda", str(folder), "two", "cut:2")
    shutil.copytree(folder / "cut", folder / "cut-2")
    _started(2, str(RUNS), "cuda", str(folder), "cut-2:resume")
    _started(1, str(RUNS), "cuda", str(folder), "alone", "cut:resume")
    return folder


@two_gpus
@pytest.mark.parametrize("name", ["two", "cut", "cut-2"])
def test_runs_and_their_checkpoints_have_the_bits_of_one_gpu(folder: Path, name: str) -> None:
    """A checkpoint that two GPUs wrote in the background is resumed by one and by two."""
    alone = results(folder / "alone")
    assert [line.get("mismatch/num_different") for line in alone["metrics"][-4:]] == [0.0] * 4
    assert results(folder / name) == alone


@two_gpus
def test_torchrun_starts_a_lost_run_again_with_the_same_bits(folder: Path) -> None:
    _started(2, str(RUNS), "cuda", str(folder), "again:killed", restarts=1)
    assert len(RunDirectory.open(folder / "again").attempts()) == 2
    assert results(folder / "again") == results(folder / "alone")


@two_gpus
def test_a_rank_that_fails_ends_both_within_seconds(tmp_path: Path) -> None:
    file = tmp_path / "faults.json"
    command = [sys.executable, str(FAULTS), "--device", "cuda", "--out", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert json.loads(file.read_text())["same_bits"]


@two_gpus
def test_updates_have_the_bits_of_one_gpu() -> None:
    def digests(size: int) -> dict[str, Any]:
        return json.loads(_started(size, str(WORKER), "unified", "bf16").splitlines()[-1])

    alone = digests(1)
    for size in (n for n in (2, 4) if n <= torch.cuda.device_count()):
        for name, result in digests(size).items():
            assert result.pop("size") == size
            assert result == {k: v for k, v in alone[name].items() if k != "size"}, name
            assert result["different"] == 0 or "unified" not in name
