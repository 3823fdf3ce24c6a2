"""List, show and plot finished and running runs.

For example:

    jetrl runs list                       also: jetrl runs
    jetrl runs show demo
    jetrl runs plot demo demo-2 --out compare.png
    jetrl runs plot demo --metric reward/mean --metric policy/entropy
    jetrl runs watch demo                 write the report of a running run and print a summary
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from jetrl.cli.arguments import print_json, tell
from jetrl.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.usage = "jetrl runs [list | show RUN ... | plot RUN ... | watch RUN ...] [--dir DIR]"
    parser.usage += " [--json] [--metric NAME ...] [--out FILE]"
    actions = ("list", "show", "plot", "watch")
    add("action", nargs="?", default="list", choices=actions, help="what to do (default: list)")
    add("run", nargs="*", metavar="RUN", help="a run's name or directory")
    add("--dir", default="runs", help="parent folder of run directories")
    add(
        "--metric",
        action="append",
        default=[],
        metavar="NAME",
        help="plot: metric name, or eval for all evaluations (repeatable; default: main metrics)",
    )
    add("--out", metavar="FILE", default="runs.png", help="plot: the PNG to write")
    add("--json", action="store_true", help="list, show: print JSON")


def run(args: argparse.Namespace) -> int:
    folder = Path(args.dir)
    if args.action == "list":
        if args.run:
            raise UserError(f"runs list takes no run; did you mean: jetrl runs show {args.run[0]}?")
        return _list_command(folder, args.json)
    if not args.run:
        raise UserError(f"runs {args.action} needs a run: its name or directory")
    paths = [find_run(name, folder) for name in args.run]
    if args.action == "plot":
        from jetrl.runs.plots import plot_runs

        print(plot_runs(paths, args.metric, args.out))
        return 0
    problems = []
    for path in paths:
        try:
            if args.action == "watch":
                from jetrl.runs.report import write_report

                report, follow = write_report(path), f"watch -n 10 jetrl runs show {path}"
                tell(f"wrote {report} as of now; to follow the run: {follow}")
            _show_command(path, args.json)
        except UserError as error:  # show other runs even if one is damaged
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return 0


def find_run(name: str, folder: Path) -> Path:
    """Return the directory of a run, given its path or its name under a folder; may not exist."""
    by_path = "/" in name.rstrip("/") or (Path(name) / "config.toml").is_file()
    return Path(name) if by_path else folder / name


def _list_command(folder: Path, as_json: bool) -> int:
    from rich.console import Console

    from jetrl.runs.overview import list_runs, runs_table

    rows = list_runs(folder)
    if as_json:
        print_json([dataclasses.asdict(row) for row in rows])
    elif not rows:
        print(f"no runs in {folder}")
    else:
        console, runs = Console(), runs_table(rows)
        # Full table width, even on a narrower terminal, so that names are not truncated.
        needed = console.measure(runs, options=console.options.update(max_width=1000)).maximum
        console.width = max(console.width, needed) if console.is_terminal else 1000
        console.print(runs)
    return 0


def _show_command(path: Path, as_json: bool) -> None:
    from jetrl.runs.directory import RunDirectory
    from jetrl.runs.overview import show_run

    if not as_json:
        print(show_run(path))
        return
    directory = RunDirectory.open(path)
    last = directory.metrics()[-1:]
    facts = {
        "name": directory.name,
        "path": str(path),
        "state": directory.state(),
        **dataclasses.asdict(directory.history()),
        "last_line": last[0] if last else None,
    }
    print_json(facts)
