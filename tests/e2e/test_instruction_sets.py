"""A run does not depend on the instruction set and the number of threads of the processor.

Processes differ in the code that torch, MKL and NumPy choose, as machines do.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.small import SMALL, metrics, task_of

# Other kernels of torch, MKL and NumPy than this processor's best.
_OTHER = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX",
    "OMP_NUM_THREADS": "2",
}
# Rewards that differ, so that RL has gradients.
_BODY = """return float(len(completion) % 2)

    def demonstration(self, prompt):
        return prompt.answer
"""


def trained(run: Path, task: str, **environment: str) -> Path:
    """Train a random model in a process: two updates on demonstrations and two RL steps."""
    settings = [
        "recipes/demo.toml",
        *("precision.preset=integer", *SMALL),
        *("sft.steps=2", "sft.until=1.0", "loop.steps=2", f"run.name={run.name}"),
        *("train.schedule=cosine", "checkpoint.every=1", f"run.dir={run.parent}"),
        *(f"task={task}", "task.workers=0"),
    ]
    command = [sys.executable, "-W", "ignore", "-m", "jetrl", "train", *settings]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return run


def digests(run: Path) -> dict[str, str]:
    """Return the SHA-256 of weights, optimizer states and rollouts, which hold log-probs."""
    files = [*run.glob("checkpoints/*/*.safetensors"), *run.glob("rollouts/*.jsonl")]
    return {
        str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files
    }


def test_a_run_has_the_same_bits_with_any_instruction_set(tmp_path: Path) -> None:
    task = task_of(tmp_path, _BODY)
    one = trained(tmp_path / "best", task, OMP_NUM_THREADS="1")
    other = trained(tmp_path / "other", task, **_OTHER)
    assert len(digests(one)) == 6  # two steps: master weights, moments and rollouts
    assert digests(one) == digests(other)
    steps = one.glob("checkpoints/*/masters.safetensors")
    assert len({file.read_bytes() for file in steps}) == 2, "an RL step moves the weights"
    for phase in ("sft", None):
        assert metrics(one, phase) == metrics(other, phase) != []
