"""Whole small runs on GPUs, for tests/gpu/test_ranks.py: a script of a user's, on all its ranks.

    python tests/gpu/runs_worker.py cuda FOLDER NAME[:STEPS][:resume] ...
    torchrun --nproc-per-node 2 --max-restarts 1 tests/gpu/runs_worker.py cuda FOLDER NAME:killed

Each name is a run, one after the other. Of a run that is called NAME:killed rank 1 is killed in the
first attempt of torchrun (--max-restarts).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "reliability"))

import faults
from tests.distributed.runs import run_small

ON_GPUS = [
    "train.schedule=constant",
    "algorithm.dynamic_sampling=false",
    "eval.every=0",
    "checkpoint.every=1",
    "checkpoint.background=true",
]


def main(device: str, folder: str, words: list[str]) -> None:
    """Make the runs that the words name, in the folder."""
    for word in words:
        name, *options = word.split(":")
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if "killed" in options and first and os.environ.get("RANK") == "1":
            faults.arm("before the backward", 6)
        steps = next(filter(str.isdigit, options), "4")
        settings = [*ON_GPUS, f"run.device={device}", f"loop.steps={steps}"]
        run_small(folder, name, *settings, resume="resume" in options)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
