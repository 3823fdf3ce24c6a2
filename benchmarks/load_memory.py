"""The host memory that loading a frozen base takes, beside the size of its directory.

    python -m benchmarks.load_memory --out benchmarks/results/cpu/load_memory.json

A directory of Qwen3-32B's layers, a few of them, with random BF16 weights in several files, is
loaded as a base with adapters on the CPU, in FP8 and in NVFP4, each in a process of its own. A
thread reads the process's resident memory every few milliseconds:

    held          the policy, when it is loaded; on a GPU this lies in the GPU's memory
    peak          the most memory of the process's own while it loads, without the mapped files
    beside        peak without held: what loading takes on the way
    mapped        the most pages of the mapped files that were resident; the system takes them back
                  whenever it needs memory
    largest       the largest parameter, in BF16; it is rounded from FP32, twice as much

All are GiB beyond what the process had before. A directory with more layers has the same `beside`,
as parameters are read one after the other.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import print_table, write_results
from benchmarks.shapes import SHAPES

from jetrl.models.adapter import Adapter, LoRA
from jetrl.models.families import ModelConfig, parameter_shapes
from jetrl.models.hf import model_config
from jetrl.models.hf_save import save_model
from jetrl.models.policy import Policy
from jetrl.models.tiny import RandomWeights
from jetrl.precision import PrecisionPlan

SHAPE, LAYERS, VOCABULARY, RANK = "qwen3-32b", 4, 8192, 32
_EVERY_S = 0.004
_FIELDS = ("RssAnon", "RssFile")


def resident() -> dict[str, int]:
    """Return the bytes of this process's resident memory: its own, and of mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = dict(line.split(":") for line in lines)
    return {field: 1024 * int(values[field].split()[0]) for field in _FIELDS}


class Watch:
    """A thread that keeps the most resident memory while its block runs."""

    def __enter__(self) -> Watch:
        self.before = self.most = resident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            now = resident()
            self.most = {field: max(self.most[field], now[field]) for field in _FIELDS}

    def gib(self, field: str, now: dict[str, int]) -> float:
        """Return the GiB by which a field of `now` is above that before the block."""
        return (now[field] - self.before[field]) / 2**30


def load(path: Path, base: str) -> dict[str, Any]:
    """Return the row of a directory that is loaded as a frozen base with an adapter.

    Args:
        base: The format of the base, "fp8" or "nvfp4".
    """
    config, plan = model_config(path), PrecisionPlan.preset("unified").replace(base=base)
    adapter = Adapter.new(config, LoRA(RANK, 32.0), seed=0)
    torch.zeros(2**10).sum()  # starts the library's threads
    began = time.perf_counter()
    with Watch() as watch:
        policy = Policy.from_pretrained(path, plan, adapter=adapter)
    seconds = time.perf_counter() - began
    held = watch.gib("RssAnon", resident())
    peak = watch.gib("RssAnon", watch.most)
    quantized = sum(t.nbytes for t in policy.weights.quantized_tensors().values())
    return {
        "base": base,
        "quantized_gib": round(quantized / 2**30, 2),
        "held_gib": round(held, 2),
        "peak_gib": round(peak, 2),
        "beside_gib": round(peak - held, 2),
        "mapped_gib": round(watch.gib("RssFile", watch.most), 2),
        "seconds": round(seconds, 1),
    }


def write_directory(path: Path) -> dict[str, Any]:
    """Write a model directory with random BF16 weights; return its sizes."""
    raw = {**SHAPES[SHAPE], "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    config = ModelConfig.from_hf(raw)
    save_model(path, config, RandomWeights(config, 0), max_shard_bytes=2**30)
    files = sorted(path.glob("*.safetensors"))
    largest = max(math.prod(shape) for shape in parameter_shapes(config).values())
    return {
        "directory_gib": round(sum(file.stat().st_size for file in files) / 2**30, 2),
        "files": len(files),
        "largest_gib": round(2 * largest / 2**30, 2),
    }


def main() -> None:
    """Write the directory, load it in each format in a process of its own, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="build/bench/load_memory.json", type=Path)
    parser.add_argument("--load", nargs=2, metavar=("DIR", "BASE"), help="measure one, print JSON")
    args = parser.parse_args()
    if args.load:
        print(json.dumps(load(Path(args.load[0]), args.load[1])))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "base"
        facts = write_directory(path)
        rows = []
        for base in ("fp8", "nvfp4"):
            command = [sys.executable, __file__, "--load", str(path), base]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            rows.append(json.loads(out))
    print_table(rows)
    sizes = {"shape": SHAPE, "layers": LAYERS, "vocabulary": VOCABULARY}
    facts = {**sizes, "adapter_rank": RANK, **facts}
    command = "python -m benchmarks.load_memory"
    write_results(args.out, "load_memory", command, rows, **facts)


if __name__ == "__main__":
    main()
