"""The program of a study's child processes: commands of jetrl, one after the other.

`python -m benchmarks.study.server` starts it; `benchmarks.study.worker` says how to speak to it.
What all commands need is imported before the first one comes. The settings of torch's allocators
come with the environment, from the study's own process.
"""

from __future__ import annotations

import gc
import sys

import benchmarks.study.final_evaluation  # noqa: F401
import torch
import torch._dynamo  # optimizers import it when the first one is made
from benchmarks.study.worker import serve

from jetrl.cli.main import main


def give_back() -> None:
    """Give back the memory that the last command held."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(serve(main, give_back))
