"""Report of a run: report.html, a single self-contained file, and plots as PNGs.

Everything from a model, data set or file goes through `text`, which escapes it; only hand-written
markup is `Html`.
"""

from __future__ import annotations

import base64
import contextlib
import html
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NewType

from jetrl.errors import UserError
from jetrl.files import read_bytes
from jetrl.runs.anomalies import Anomalies, Learning
from jetrl.runs.attempts import Attempt
from jetrl.runs.directory import RunDirectory
from jetrl.runs.format import clip, count, date, duration, number, spread, visible
from jetrl.runs.history import Change, RunHistory, change_of, in_phase
from jetrl.runs.plots import PALETTE, Chart, charts_of, to_png, to_svg
from jetrl.runs.schemas import prompt_text
from jetrl.runs.storage import Record, write_atomically
from jetrl.settings.loading import Settings

Html = NewType("Html", str)

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Load no resources and run no scripts, even if some text is not escaped."""


def _style_sheet() -> str:
    sheet = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    for which, word in enumerate(("LIGHT_COLORS", "DARK_COLORS")):
        colors = (f"--plot-{name}: {both[which]};" for name, both in PALETTE.items())
        sheet = sheet.replace(word, " ".join(colors))
    return sheet


def text(value: object) -> Html:
    return Html(html.escape(visible(str(value), newlines=True)))


def join(pieces: Iterable[Html]) -> Html:
    return Html("\n".join(pieces))


def page(title: str, body: Sequence[Html]) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>\n{_style_sheet()}</style>\n</head>\n"
        f"<body>\n<main>\n{join(body)}\n</main>\n</body>\n</html>\n"
    )


def tile(label: str, value: Html, note: str, tone: str = "") -> Html:
    """Return a headline number; the tone is good, bad or ""."""
    return Html(
        f'<div class="card tile {tone}"><p class="kicker">{text(label)}</p>'
        f'<p class="value">{value}</p><p class="note">{text(note)}</p></div>'
    )


def table(rows: Iterable[Sequence[object]], head: Sequence[str] = ()) -> Html:
    lines = []
    if head:
        lines.append("<tr>" + "".join(f"<th>{text(cell)}</th>" for cell in head) + "</tr>")
    for first, *others in rows:
        cells = "".join(f"<td>{text(cell)}</td>" for cell in others)
        lines.append(f"<tr><td><code>{text(first)}</code></td>{cells}</tr>")
    return Html('<div class="card scroll"><table>' + "\n".join(lines) + "</table></div>")


def figures(charts: Iterable[Chart]) -> Html:
    drawn = [
        Html(
            f'<figure class="card chart" role="img" aria-label="{text(chart.title)}"><figcaption>'
            f"<h3>{text(chart.title)}</h3><p>{text(chart.caption)}</p></figcaption>"
            f"{to_svg(chart)}</figure>"
        )
        for chart in charts
    ]
    return Html(f'<div class="charts">{join(drawn)}</div>')


def section(title: str, *pieces: Html) -> Html:
    return Html(f"<section>\n<h2>{text(title)}</h2>\n{join(pieces)}\n</section>")


def folded(title: str, content: object) -> Html:
    return Html(
        f'<details class="card"><summary>{text(title)}</summary>'
        f"<pre>{text(content)}</pre></details>"
    )


MOST_PREVIEW = 2**20  # bytes; those that runs write have at most 256 x 256 pixels
MAX_PROMPT, MAX_COMPLETION = 1200, 2400
DEFAULT_SAMPLES = 8
STATE_TONES = {"finished": "good", "running": "good", "failed": "bad", "stopped": "bad"}


def write_report(run_path: str | Path) -> Path:
    """Write report.html and plots/*.png into a run directory; return the report's path."""
    run = RunDirectory.open(run_path)
    plots = run.path / "plots"
    plots.mkdir(exist_ok=True)
    for old in plots.glob("*.png"):
        old.unlink(missing_ok=True)
    records, attempts, history = run.metrics(), run.attempts(), run.history()
    config, formats = run.config(), run.plan()
    for key, value in formats.items():
        if isinstance(value, Mapping):
            formats[key] = ", ".join(f"{name} = {field}" for name, field in value.items())
    charts = charts_of(records)
    for chart in charts:
        to_png(chart, plots / f"{chart.key}.png")
    no_step = Html('<p class="card empty">No step was finished.</p>')
    body = [
        _header(run, config, history, attempts),
        _headline(records, history, attempts),
        _warnings(records),
        section("Curves", figures(charts) if charts else no_step),
        _samples(run, config),
        _settings(run, config),
        section("Precision plan", table(formats.items(), ("of plan.json", "format"))),
        _attempts(attempts),
        Html(
            f"<footer>Written by jetrl on {text(date(time.time()))} from {text(run.name)}"
            "/metrics.jsonl. The plots are in plots/ as PNG files.</footer>"
        ),
    ]
    path = run.path / "report.html"
    write_atomically(path, page(f"{run.name} - jetrl", body))
    return path


def _header(
    run: RunDirectory, config: Record, history: RunHistory, attempts: list[Attempt]
) -> Html:
    state = run.state()
    source = config.get("model", {}).get("path") or "a model with random initial weights"
    about = [
        f"{config.get('task', {}).get('name', 'task')} on {source}",
        f"{config.get('precision', {}).get('preset', '')} precision",
    ]
    if history.started is not None:
        about.append(f"started {date(history.started)}")
    reason = attempts[-1].reason if attempts and state != "running" else ""
    reason_line = f'<p class="soft">{text(state)}: {text(reason)}</p>' if reason else ""
    digest = f"digest after the last step: {history.digest}" if history.digest else ""
    return Html(
        '<p class="kicker">jetrl run report</p>'
        f'<div class="title"><h1>{text(run.name)}</h1>'
        f'<span class="pill {STATE_TONES.get(state, "")}">{text(state)}</span></div>'
        f'<p class="soft">{text(" · ".join(about))}</p>{reason_line}'
        f'<p class="soft" style="overflow-wrap:anywhere">{text(digest)}</p>'
    )


def _headline(records: list[Record], history: RunHistory, attempts: list[Attempt]) -> Html:
    tiles = [_change_tile(f"Held-out {e.name[5:-5]}", e) for e in history.evals]
    if history.reward is not None:
        tiles.append(_change_tile("Training reward", history.reward))
    if history.num_different is not None:
        exact, tokens = history.num_different == 0, history.num_tokens
        note = f"of {count(tokens)} tokens compared, " if tokens is not None else "tokens, "
        note += "bit for bit" if exact else "0 is expected from an exact plan"
        different = text(f"{count(history.num_different)} different")
        tiles.append(tile("Sampler against trainer", different, note, "good" if exact else "bad"))
    extra = {
        "Tokens per decode forward, with drafts": "speculation/tokens_per_forward",
        "Acceptance rate of the draft head": "speculation/acceptance_head",
    }
    if history.num_steps == 0:
        extra = {"Supervised loss": "sft/loss"}
    changes = [(label, change_of(records, name)) for label, name in extra.items()]
    tiles += [_change_tile(label, change) for label, change in changes if change is not None]
    steps = f"{count(history.num_steps)} step{'s' if history.num_steps != 1 else ''}"
    if history.num_sft_steps and not history.num_steps:
        steps = f"{count(history.num_sft_steps)} supervised updates"
    elif history.num_sft_steps:
        steps += f" after {count(history.num_sft_steps)} of supervised warm-up"
    if len(attempts) > 1:
        steps += f", in {len(attempts)} attempts"
    tiles.append(tile("Wall time", text(duration(history.elapsed_s)), steps))
    return Html(f'<div class="tiles">{join(tiles)}</div>')


def _change_tile(label: str, change: Change) -> Html:
    first, last = change.ends
    if change.first_step == change.last_step:
        return tile(label, text(last), f"step {change.last_step}")
    return tile(
        label,
        Html(f'<span class="from">{text(first)} &rarr;</span> {text(last)}'),
        f"step {change.first_step} to {change.last_step}",
    )


def _warnings(records: list[Record]) -> Html:
    learning, anomalies = Learning(), Anomalies()
    rows = []
    for record in in_phase(records, "rl"):
        metrics = {n: v for n, v in record.items() if isinstance(v, int | float)}
        warnings = [*learning.see(metrics), *anomalies.see(metrics)]
        rows += [(f"step {record['step']}", warning) for warning in warnings]
    return section("Warnings", table(rows, ("from", ""))) if rows else Html("")


def _samples(run: RunDirectory, config: Record) -> Html:
    steps = run.rollout_steps()
    num = int(config.get("report", {}).get("samples", DEFAULT_SAMPLES))
    if not steps or num == 0:
        return Html("")
    chosen = dict.fromkeys((steps[0], steps[-1]))
    columns = []
    for step in chosen:
        title = f"<h3>Step {step}</h3>"
        try:
            records = sorted(run.rollouts(step), key=lambda r: r.get("reward") or 0.0)
        except UserError as error:
            columns.append(Html(f'<div>{title}<p class="soft">{text(error)}</p></div>'))
            continue
        shown = spread(records, max(1, num // len(chosen)))
        columns.append(
            Html(
                f"<div>{title}{join(_sample(r, _pictures(run, r)) for r in reversed(shown))}</div>"
            )
        )
    note = "From the highest to the lowest reward of the first and the last step."
    if reading := run.reading():
        note += f" In this task {reading}."
    return section(
        "Completions, early and late",
        Html(f'<p class="soft" style="margin:-8px 0 14px">{text(note)}</p>'),
        Html(f'<div class="columns">{join(columns)}</div>'),
    )


def _sample(record: Record, pictures: Html = Html("")) -> Html:
    # A completion that no reward function or harness scored has none.
    reward = record.get("reward", 0.0)
    value = reward or 0.0
    tone = "good" if value > 0 else "bad" if record.get("failure") or value < 0 else ""
    facts = [f"{len(record.get('token_ids', ()))} tokens"]
    if len(record.get("turns") or ()) > 1:
        facts.append(f"{len(record['turns'])} turns")
    if record.get("finish_reason") == "length":
        facts.append("truncated")
    if record.get("answer") is not None:
        facts.append(f"answer {clip(str(record['answer']), 60)}")
    score_parts = record.get("parts") or {}
    facts += [f"{name} {number(float(value))}" for name, value in score_parts.items()]
    if record.get("failure"):
        facts.append(f"not scored: {record['failure']}")
    readable = str(record.get("readable") or "")
    if readable:
        readable = f'<p class="readable">{text(clip(readable, 200))}</p>'
    return Html(
        f'<article class="card sample"><header><span class="pill {tone}">reward '
        f"{text(number(reward))}</span>{text(' · '.join(facts))}</header>"
        f"{readable}{pictures}"
        f'<pre class="prompt">{text(_shortened(prompt_text(record), MAX_PROMPT))}</pre>'
        f"{_completion(record)}</article>"
    )


def _pictures(run: RunDirectory, record: Record) -> Html:
    """Return the previews of a prompt's images, of those that the run has and that can be read."""
    found = []
    for digest in record.get("images", ()):
        with contextlib.suppress(FileNotFoundError, UserError):
            data = base64.b64encode(read_bytes(run.preview_file(digest), MOST_PREVIEW)).decode()
            source = f"data:image/jpeg;base64,{data}"
            found.append(Html(f'<img alt="image of the prompt" src="{source}">'))
    return join(found)


def _completion(record: Record) -> Html:
    """Return the completion's text, or its turns and the environment's replies."""
    turns = record.get("turns") or [record]
    pieces = []
    for turn in turns:
        written, reply = str(turn.get("completion", "")), turn.get("reply")
        pieces.append(Html(f"<pre>{text(_shortened(written, MAX_COMPLETION))}</pre>"))
        if reply is not None:
            reply = reply if isinstance(reply, dict) else {"content": reply}
            content = _shortened(str(reply.get("content", "")), MAX_COMPLETION)
            shown = f"{reply.get('role', 'reply')}: {content}"
            pieces.append(Html(f'<pre class="reply">{text(shown)}</pre>'))
    return join(pieces)


def _shortened(content: str, width: int) -> str:
    left_out = len(content) - width
    return content if left_out <= 0 else f"{content[:width]}\n[{count(left_out)} characters more]"


def _settings(run: RunDirectory, config: Record) -> Html:
    defaults = Settings().model_dump(mode="json")

    def default(name: str, key: str) -> str:
        value = defaults.get(name, {}).get(key)
        return "not set" if value is None else clip(str(value), 120)

    rows = [
        (f"{name}.{key}", clip(str(value), 300), default(name, key))
        for name, keys in config.items()
        for key, value in keys.items()
        if defaults.get(name, {}).get(key) != value
    ]
    return section(
        "Settings",
        table(rows, ("differs from the default", "this run", "default")) if rows else Html(""),
        folded("All settings (config.toml)", (run.path / "config.toml").read_text("utf-8")),
    )


def _attempts(attempts: list[Attempt]) -> Html:
    if not attempts:
        return Html("")
    rows = [
        (
            date(a.started),
            duration(a.ended - a.started) if a.ended is not None else "",
            f"{a.state or 'no end recorded'}{': ' + clip(a.reason, 200) if a.reason else ''}",
            a.command,
        )
        for a in attempts
    ]
    last = attempts[-1]
    return section(
        "Attempts and environment",
        table(rows, ("started", "took", "end", "command")),
        Html('<div style="height:12px"></div>'),
        table([*last.notes.items(), *last.versions.items()], ("of the last attempt", "")),
    )
