#!/usr/bin/env python3
"""Walk through the opening of a model: `build_policy` with the demo's settings.

    python tools/walk.py            print the number of stops and climbs
    python tools/walk.py --list     also print each stop with its functions

The walk visits each function of the package once, at its first call. A stop is a run of functions
of one file. A climb is a move to a stop in a higher layer; tests/structure/test_layers.py has the
layers.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from graphlib import TopologicalSorter
from itertools import groupby, pairwise
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "jetrl"


def heights() -> dict[str, int]:
    """Return the height of each part of the package; it may import only lower parts."""
    allowed = importlib.import_module("tests.structure.test_layers").ALLOWED
    below = {part: set(parts) - {part} for part, parts in allowed.items()}
    height: dict[str, int] = {}
    for part in TopologicalSorter(below).static_order():
        height[part] = 1 + max((height[lower] for lower in below[part]), default=-1)
    return height


def visited(call: Callable[[], object]) -> list[CodeType]:
    """Return the named functions of jetrl that a call runs, in order of their first calls."""
    functions: dict[CodeType, None] = {}

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        ours = Path(code.co_filename).is_relative_to(SOURCE)
        if event == "call" and ours and not code.co_name.startswith("<"):
            functions.setdefault(code)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(functions)


def file_of(code: CodeType) -> str:
    return str(Path(code.co_filename).relative_to(SOURCE))


def opening() -> Callable[[], object]:
    """Return the call that builds the policy of the demo, with one layer, on a CPU."""
    loading = importlib.import_module("jetrl.settings.loading")
    settings = loading.load_config(
        ROOT / "recipes" / "demo.toml", ["model.config.num_hidden_layers=1", "run.device=cpu"]
    )
    plan = importlib.import_module("jetrl.precision").PrecisionPlan
    building = importlib.import_module("jetrl.session.building")
    chosen = plan.from_settings(settings.precision)
    return lambda: building.build_policy(settings, chosen, None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print each stop")
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    functions = visited(opening())
    stops = [(file, list(codes)) for file, codes in groupby(functions, key=file_of)]
    height = heights()
    levels = [height[file.split("/")[0].removesuffix(".py")] for file, _ in stops]
    climbs = sum(before < after for before, after in pairwise(levels))
    if args.list:
        for file, codes in stops:
            print(f"  {file}: {', '.join(code.co_qualname for code in codes)}")
    files = len({file for file, _ in stops})
    print(f"opening a model: {len(stops)} stops, {climbs} climbs", end=" ")
    print(f"({len(functions)} functions in {files} files)")


if __name__ == "__main__":
    main()
