"""The commit that a results file names (benchmarks/results/README.md)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def commit() -> str:
    """Return JETRL_COMMIT, or what git names, with "-dirty" if a file differs from it."""
    if said := os.environ.get("JETRL_COMMIT"):
        return said
    words = ("git", "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()
