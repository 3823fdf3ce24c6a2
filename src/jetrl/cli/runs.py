"""Runs that are finished or running: what they reached, their plots, and a live view.

For example:

    jetrl runs list
    jetrl runs show demo
    jetrl runs plot demo demo-2 --out compare.png
    jetrl runs watch demo                 while it runs: steps, times, completions
    jetrl runs watch demo --browser       its report, refreshed, at an address of this machine
    jetrl runs plot demo --metric reward/mean --metric policy/entropy
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from jetrl.cli.arguments import print_json
from jetrl.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "jetrl runs {list | show RUN | plot RUN ... | watch RUN} [--dir DIR] [--json] "
        "[--metric NAME ...] [--out FILE] [--every SECONDS] [--browser] [--port PORT]"
    )
    parser.add_argument("action", choices=("list", "show", "plot", "watch"), help="what to do")
    parser.add_argument("run", nargs="*", metavar="RUN", help="a run's name, or its directory")
    parser.add_argument("--dir", default="runs", help="folder that holds run directories")
    parser.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="NAME",
        help="plot: a metric, or eval (repeatable; default: the usual ones)",
    )
    parser.add_argument("--out", metavar="FILE", default="runs.png", help="plot: the PNG to write")
    parser.add_argument("--json", action="store_true", help="list, show: JSON")
    parser.add_argument("--every", type=float, default=2.0, help="watch: seconds between looks")
    parser.add_argument(
        "--browser",
        action="store_true",
        help="watch: serve the report to a browser on this machine",
    )
    parser.add_argument(
        "--port", type=int, default=8000, help="watch: port of --browser; 0: a free one"
    )


def run(args: argparse.Namespace) -> int:
    folder = Path(args.dir)
    if args.action == "list":
        if args.run:
            raise UserError(f"runs list takes no run; did you mean: jetrl runs show {args.run[0]}?")
        return list_command(folder, args.json)
    if not args.run:
        raise UserError(f"runs {args.action} needs a run: its name, or its directory")
    paths = [find_run(name, folder) for name in args.run]
    if args.action == "plot":
        from jetrl.runs import plot_runs

        print(plot_runs(paths, args.metric, args.out))
        return 0
    if args.action == "watch":
        return watch_command(args, paths)
    problems = []
    for path in paths:
        try:
            show_command(path, args.json)
        except UserError as error:  # one damaged run does not hide the others
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return 0


def watch_command(args: argparse.Namespace, paths: list[Path]) -> int:
    """Show a run until it ends, or serve its report until Ctrl-C."""
    from jetrl.runs.live import page_server, watch

    if len(paths) > 1 or not args.every > 0:
        raise UserError("runs watch takes one run, and --every a number of seconds above 0")
    if not args.browser:
        watch(paths[0], args.every)
        return 0
    with page_server(paths[0], args.port, args.every) as server:
        print(f"http://127.0.0.1:{server.server_address[1]}/  (Ctrl-C ends it)", flush=True)
        server.serve_forever()
    return 0


def find_run(name: str, folder: Path) -> Path:
    """Return the directory of a run, given by its path or by its name in a folder; unchecked."""
    by_path = "/" in name.rstrip("/") or (Path(name) / "config.toml").is_file()
    return Path(name) if by_path else folder / name


def list_command(folder: Path, as_json: bool) -> int:
    """Print a line for each run in a folder."""
    from rich.console import Console

    from jetrl.runs import list_runs, runs_table

    rows = list_runs(folder)
    if as_json:
        print_json([dataclasses.asdict(row) for row in rows])
    elif not rows:
        print(f"no runs in {folder}")
    else:
        console, runs = Console(), runs_table(rows)
        # As wide as it takes, in a file, a pipe, and a terminal that is narrower: no name is lost.
        needed = console.measure(runs, options=console.options.update(max_width=1000)).maximum
        console.width = max(console.width, needed) if console.is_terminal else 1000
        console.print(runs)
    return 0


def show_command(path: Path, as_json: bool) -> None:
    """Print what one run reached."""
    from jetrl.runs import RunDirectory, show_run

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
