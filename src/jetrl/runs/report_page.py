"""The report's page: its style sheet, and the small pieces of HTML that make it up.

Everything that comes from a model, a data set or a file goes through `text`, which escapes it;
markup is only ever written by hand, as `Html`.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import NewType

from jetrl.runs.format import visible
from jetrl.runs.plot_style import COLORS, Chart, to_svg

Html = NewType("Html", str)

DARK = {
    "text": "#a7b0c0",
    "axis": "#667085",
    "grid": "#262c38",
    "blue": "#7aa2ff",
    "green": "#3fcf9e",
    "amber": "#f0b349",
    "violet": "#ab8ff5",
    "pink": "#ee7fb4",
    "slate": "#94a3b8",
    "red": "#ff7b72",
    "teal": "#4cc9dc",
    "brown": "#c79a73",
}

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Nothing is loaded and no script runs, even if an escape were forgotten."""


def _variables(colors: dict[str, str]) -> str:
    return " ".join(f"--plot-{name}: {color};" for name, color in colors.items())


STYLE_SHEET = (
    f"""
:root {{
  color-scheme: light dark;
  --page: #f5f6f9; --card: #ffffff; --line: #e3e6ed; --ink: #161b26; --soft: #5d6779;
  --good: #0d7a5c; --good-soft: #e2f5ee; --bad: #b92f2f; --bad-soft: #fdeaea; --code: #f3f5f9;
  {_variables(COLORS)}
}}
@media (prefers-color-scheme: dark) {{ :root {{
  --page: #0e1117; --card: #161b24; --line: #262d3a; --ink: #e8ebf1; --soft: #98a2b3;
  --good: #4fd6a8; --good-soft: #12332a; --bad: #ff8e86; --bad-soft: #3b1d1d; --code: #0f141c;
  {_variables(DARK)}
}} }}
"""
    + """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial,
  sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -0.02em; margin: 0;
  overflow-wrap: anywhere; }
h2 { font-size: 19px; letter-spacing: -0.01em; margin: 44px 0 14px; }
h3 { font-size: 15px; margin: 0; }
p { margin: 0; }
.soft { color: var(--soft); }
.kicker { font-size: 12px; letter-spacing: 0.09em; text-transform: uppercase; color: var(--soft);
  margin-bottom: 6px; }
.title { display: flex; gap: 14px; align-items: center; flex-wrap: wrap; }
.pill { font-size: 12.5px; font-weight: 600; padding: 2px 11px; border-radius: 99px;
  background: var(--line); white-space: nowrap; }
.pill.good { background: var(--good-soft); color: var(--good); }
.pill.bad { background: var(--bad-soft); color: var(--bad); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(215px, 1fr)); gap: 14px;
  margin-top: 26px; }
.tile { padding: 16px 18px 15px; }
.tile .value { font-size: 27px; font-weight: 650; letter-spacing: -0.02em; margin: 3px 0 2px;
  font-variant-numeric: tabular-nums; line-height: 1.25; }
.tile .value .from { color: var(--soft); font-weight: 450; }
.tile .note { font-size: 13px; color: var(--soft); }
.good .value { color: var(--good); }
.bad .value { color: var(--bad); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(440px, 100%), 1fr));
  gap: 14px; }
.chart { padding: 15px 16px 8px; margin: 0; min-width: 0; }
.chart figcaption p { font-size: 13px; color: var(--soft); margin-bottom: 6px;
  overflow-wrap: anywhere; }
.chart svg { display: block; width: 100%; height: auto; }
.chart svg text { font-family: inherit !important; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr));
  gap: 14px 22px; align-items: start; }
.columns > * { min-width: 0; }
.columns h3 { margin: 0 0 10px; }
.sample { padding: 12px 14px; margin-bottom: 12px; }
.sample header { display: flex; gap: 8px 10px; flex-wrap: wrap; align-items: center;
  font-size: 13px; color: var(--soft); margin-bottom: 8px; }
pre { margin: 0; font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.sample pre { padding: 8px 10px; border-radius: 8px; background: var(--code); margin-top: 6px;
  max-height: 320px; overflow: auto; }
.sample p.readable { font-weight: 600; margin: 8px 2px 0; }
.sample pre.prompt { background: none; padding: 0 2px; color: var(--soft); }
.sample pre.reply { background: none; border-left: 3px solid var(--line); border-radius: 0;
  margin-left: 14px; padding: 2px 10px; color: var(--soft); }
.scroll { overflow-x: auto; padding: 6px 16px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
td, th { text-align: left; vertical-align: top; padding: 6px 18px 6px 0; overflow-wrap: anywhere; }
td:last-child { min-width: 6em; }
tr + tr > td { border-top: 1px solid var(--line); }
th { font-size: 12.5px; color: var(--soft); font-weight: 600; }
td:first-child { white-space: nowrap; }
td code { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
details { margin-top: 12px; padding: 12px 16px; }
summary { cursor: pointer; font-weight: 600; }
details pre { margin-top: 10px; }
.empty { padding: 34px; text-align: center; color: var(--soft); }
footer { margin-top: 44px; font-size: 13px; color: var(--soft); }
@media (max-width: 560px) { main { padding: 26px 14px 44px; } h1 { font-size: 24px; } }
@media print { body { background: white; } .card { break-inside: avoid; } }
"""
)


def text(value: object) -> Html:
    """Return a value as text of the page: escaped, with control characters made visible."""
    return Html(html.escape(visible(str(value), newlines=True)))


def join(pieces: Iterable[Html]) -> Html:
    """Return pieces of HTML one after another, each on a line."""
    return Html("\n".join(pieces))


def page(title: str, body: Sequence[Html], refresh_s: float | None = None) -> str:
    """Return the whole document.

    Args:
        refresh_s: Seconds after which a browser asks for the page again; None: never.
    """
    refresh = f'<meta http-equiv="refresh" content="{refresh_s:g}">\n' if refresh_s else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(POLICY)}">\n'
        f'{refresh}<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{STYLE_SHEET}</style>\n</head>\n"
        f"<body>\n<main>\n{join(body)}\n</main>\n</body>\n</html>\n"
    )


def tile(label: str, value: Html, note: str, tone: str = "") -> Html:
    """Return a number of the headline.

    Args:
        tone: The colour: good, bad, or "" for none.
    """
    return Html(
        f'<div class="card tile {tone}"><p class="kicker">{text(label)}</p>'
        f'<p class="value">{value}</p><p class="note">{text(note)}</p></div>'
    )


def from_to(first: str, last: str) -> Html:
    """Return two values with an arrow from the first to the last."""
    return Html(f'<span class="from">{text(first)} &rarr;</span> {text(last)}')


def table(rows: Iterable[Sequence[object]], head: Sequence[str] = ()) -> Html:
    """Return a table of text, with its first column set as code."""
    lines = []
    if head:
        lines.append("<tr>" + "".join(f"<th>{text(cell)}</th>" for cell in head) + "</tr>")
    for first, *others in rows:
        cells = "".join(f"<td>{text(cell)}</td>" for cell in others)
        lines.append(f"<tr><td><code>{text(first)}</code></td>{cells}</tr>")
    return Html('<div class="card scroll"><table>' + "\n".join(lines) + "</table></div>")


def figures(charts: Iterable[Chart]) -> Html:
    """Return charts, each with its title and caption, in the columns that the page has room for."""
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
    """Return a section of the page under a heading."""
    return Html(f"<section>\n<h2>{text(title)}</h2>\n{join(pieces)}\n</section>")


def folded(title: str, content: object) -> Html:
    """Return a long text behind a line that opens it."""
    return Html(
        f'<details class="card"><summary>{text(title)}</summary>'
        f"<pre>{text(content)}</pre></details>"
    )
