"""The live view of a run: in the terminal, or in a browser on this machine.

Both read what the run writes into its directory and nothing else, so that they can be started and
stopped at any time, from another terminal or machine, without the run noticing.
"""

from __future__ import annotations

import http.server
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from jetrl.errors import UserError
from jetrl.runs.console import step_line
from jetrl.runs.directory import RunDirectory
from jetrl.runs.format import clip, duration, number, percent, visible
from jetrl.runs.history import in_phase, values_of
from jetrl.runs.jsonl import Record
from jetrl.runs.report import report_page
from jetrl.runs.rollout_records import prompt_text
from jetrl.runs.status import read_status

STEPS, SAMPLES, CURVE = 8, 3, 60  # lines of steps, completions, and characters of the curve
_BARS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_WIDTH = 100  # characters of a completion


def frame(path: Path, now: float | None = None) -> Group:
    """Return what a run is at and has reached, as it stands in its directory.

    Args:
        now: The present Unix time; None: the clock's.

    Raises:
        UserError: The path is no run directory, or a file of it is damaged.
    """
    run = RunDirectory.open(path)
    records, status = in_phase(run.metrics(), "rl"), read_status(path)
    title = f"{visible(run.name)}: {run.state()}"
    if status is not None and status.phase and run.state() == "running":
        since = duration(max(0.0, (time.time() if now is None else now) - status.time))
        title += f", {visible(status.phase)} of step {status.step} since {since}"
    lines = [Text(title, style="bold")]
    total = int(run.config().get("loop", {}).get("steps", 0))
    for record in records[-STEPS:]:
        values = {key: v for key, v in record.items() if isinstance(v, int | float)}
        lines.append(Text.assemble(*step_line("step", int(record["step"]), total, values)))
    if not records:
        lines.append(Text(f"{len(run.metrics())} supervised updates, no step yet", style="dim"))
    rewards = [float(value) for value in values_of(records, "reward/mean")]
    if len(rewards) > 1:
        lines.append(
            Text(f"reward  {curve(rewards)}  {number(min(rewards))} to {number(max(rewards))}")
        )
    return Group(*lines, *_phases(records), *_samples(run))


def curve(values: list[float], width: int = CURVE) -> str:
    """Return values as a line of bars, each the mean of as many neighbouring values."""
    columns = min(width, len(values))
    parts = [
        values[i * len(values) // columns : (i + 1) * len(values) // columns]
        for i in range(columns)
    ]
    means = [sum(part) / len(part) for part in parts]
    low, span = min(means), max(means) - min(means)
    top = len(_BARS) - 1
    return "".join(
        _BARS[top if span == 0 else 1 + round((m - low) / span * (top - 1))] for m in means
    )


def _phases(records: list[Record]) -> list[Text]:
    """Return the shares of the last step's time that its phases took."""
    if not records or not records[-1].get("timing/step_s"):
        return []
    last = records[-1]
    whole = float(last["timing/step_s"])
    shares = [
        f"{name} {percent(float(last[key]) / whole)}"
        for name in ("rollout", "reward", "update", "requantize", "eval", "checkpoint")
        if (key := f"timing/{name}_s") in last
    ]
    return [Text(f"time    {', '.join(shares)} of {duration(whole)}")]


def _samples(run: RunDirectory) -> list[Text]:
    """Return some completions of the last step whose rollouts are written."""
    steps = run.rollout_steps()
    if not steps:
        return []
    try:
        records = run.rollouts(steps[-1])
    except UserError as error:  # being written now
        return [Text(visible(str(error)), style="dim")]
    lines = [Text(f"completions of step {steps[-1]}", style="bold")]
    for record in records[:: max(1, len(records) // SAMPLES)][:SAMPLES]:
        asked, said = prompt_text(record), str(record.get("completion", ""))
        head = f"  reward {number(float(record.get('reward', 0.0)))}  "
        lines.append(Text(head + clip(visible(asked), _WIDTH), style="dim"))
        readable = clip(visible(str(record.get("readable") or "")), _WIDTH)
        lines.append(
            Text(f"    {clip(visible(said), _WIDTH)}" + f"   ({readable})" * bool(readable))
        )
    reading = run.reading()
    return [*lines, Text(f"in this task {visible(reading)}", style="dim")] if reading else lines


def watch(
    path: Path,
    every_s: float,
    sleep: Callable[[float], None] = time.sleep,
    console: Console | None = None,
) -> None:
    """Show a run in the terminal, again and again until it ends.

    Args:
        console: The console to write to; None: the terminal's.
    """
    with Live(frame(path), console=console, auto_refresh=False) as live:
        while RunDirectory.open(path).state() in ("new", "running"):
            sleep(every_s)
            live.update(frame(path), refresh=True)


def page_server(path: Path, port: int, every_s: float) -> http.server.HTTPServer:
    """Return a server that gives a run's report to this machine alone, new at each request.

    Args:
        port: The port; 0: a free one.
        every_s: Seconds after which the browser asks again.

    Raises:
        UserError: The path is no run directory, or the port is in use.
    """
    RunDirectory.open(path)

    class Handler(http.server.BaseHTTPRequestHandler):
        """Answers every request for `/` with the report."""

        def do_GET(self) -> None:
            """Send the report of the run at this moment."""
            if self.path != "/":
                self.send_error(404)
                return
            try:
                content = report_page(path, refresh_s=every_s)
            except UserError as error:  # a file that is being written: the browser asks again
                self.send_error(503, explain=visible(str(error)))
                return
            body = content.encode("utf-8", "replace")
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Do nothing: a line for each request would fill the terminal."""

    try:
        return http.server.HTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise UserError(
            f"--port {port}: {error.strerror}; name another, or 0 for a free one"
        ) from None
