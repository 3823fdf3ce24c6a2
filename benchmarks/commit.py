"""The commit that a results file names (benchmarks/results/README.md)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def commit() -> str:
    """Return the commit that runs here, with "-dirty" if a file differs from it.

    A copy without .git has it in JETRL_COMMIT; an empty text: unknown.
    """
    words = ("git", "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*")
    if not (ROOT / ".git").exists():
        return os.environ.get("JETRL_COMMIT", "")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()
