"""Runs that are finished or running: what they reached, and their plots.

For example:

    jetrl runs list
    jetrl runs show demo
    jetrl runs plot demo --out plots/
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetrl.cli.arguments import table
from jetrl.errors import UserError

if TYPE_CHECKING:
    from jetrl.runs import RunDirectory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "jetrl runs {list | show RUN | plot RUN} [--dir DIR] [--out DIR] [--json]"
    parser.add_argument("action", choices=("list", "show", "plot"), help="what to do")
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run's name, or its directory")
    parser.add_argument("--dir", default="runs", help="folder that holds run directories")
    parser.add_argument("--out", metavar="DIR", help="plot: where PNGs go (default: RUN/plots)")
    parser.add_argument("--json", action="store_true", help="list, show: JSON")


def run(args: argparse.Namespace) -> int:
    if args.action == "list":
        if args.run is not None:
            raise UserError(
                f"jetrl runs list takes no run; did you mean: jetrl runs show {args.run}?"
            )
        return list_runs(Path(args.dir), args.json)
    if args.run is None:
        raise UserError(f"jetrl runs {args.action} needs a run: its name, or its directory")
    found = find_run(args.run, Path(args.dir))
    return show(found, args.json) if args.action == "show" else plot(found, args.out)


def find_run(name: str, folder: Path) -> RunDirectory:
    """A run by its directory or by its name in `folder`.

    Raises:
        UserError: neither.
    """
    from jetrl.runs import RunDirectory

    path = Path(name)
    return RunDirectory.open(path if (path / "config.toml").is_file() else folder / name)


def summary(found: RunDirectory) -> dict[str, Any]:
    """What a run reached, for people and for JSON."""
    history = found.history()
    facts: dict[str, Any] = {
        "name": found.name,
        "path": str(found.path),
        "state": found.state(),
        "steps": history.num_steps,
        "sft_steps": history.num_sft_steps,
        "seconds": history.elapsed_s,
        "tokens": history.num_tokens,
        "different": history.num_different,
    }
    for change in (history.reward, *history.evals):
        if change is not None:
            facts[change.name] = {"first": change.first, "last": change.last}
    return facts


def list_runs(folder: Path, as_json: bool) -> int:
    from jetrl.runs import RunDirectory

    paths = sorted(path.parent for path in folder.glob("*/config.toml"))
    facts = [summary(RunDirectory.open(path)) for path in paths]
    if as_json:
        print(json.dumps(facts, indent=2))
    elif not facts:
        print(f"no runs in {folder}")
    else:
        header = ("name", "state", "steps", "time", "reward first", "last", "tokens different")
        print(table([header, *(row(run_facts) for run_facts in facts)]))
    return 0


def row(facts: dict[str, Any]) -> tuple[str, ...]:
    from jetrl.runs.format import duration, number

    reward = facts.get("reward/mean")
    return (
        facts["name"],
        facts["state"],
        str(facts["steps"]),
        duration(facts["seconds"]),
        number(reward["first"]) if reward else "-",
        number(reward["last"]) if reward else "-",
        "-" if facts["different"] is None else f"{facts['different']} of {facts['tokens']}",
    )


def show(found: RunDirectory, as_json: bool) -> int:
    facts = summary(found)
    last = found.metrics()[-1:]
    if as_json:
        print(json.dumps({**facts, "last_step": last[0] if last else None}, indent=2))
        return 0
    rows = []
    for name, value in facts.items():
        if isinstance(value, dict):
            value = f"{value['first']:.4g} -> {value['last']:.4g}"
        rows.append((name, "-" if value is None else str(value)))
    print(table(rows))
    if last:
        print("\nlast line of metrics.jsonl:")
        print(table([(name, str(value)) for name, value in last[0].items()], indent="  "))
    return 0


def plot(found: RunDirectory, out: str | None) -> int:
    from jetrl.runs.plot_style import to_png
    from jetrl.runs.plots import charts_of

    charts = charts_of(found.metrics())
    if not charts:
        raise UserError(f"{found.path}: nothing to plot yet (metrics.jsonl is empty)")
    folder = Path(out) if out else found.path / "plots"
    folder.mkdir(parents=True, exist_ok=True)
    for chart in charts:
        to_png(chart, folder / f"{chart.key}.png")
        print(folder / f"{chart.key}.png")
    return 0
