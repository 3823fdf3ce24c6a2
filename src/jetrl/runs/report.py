"""The report of a run: report.html, one file that needs nothing else, and the plots as PNGs.

It is written from the files of the run, so it can be made of a run that is running, was
interrupted, or never got to its first step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetrl.errors import UserError
from jetrl.runs.anomalies import Anomalies
from jetrl.runs.attempts import Attempt
from jetrl.runs.directory import RunDirectory
from jetrl.runs.format import clip, count, date, duration, number, percent, spread
from jetrl.runs.history import Change, RunHistory, change_of, in_phase
from jetrl.runs.jsonl import Record, write_atomically
from jetrl.runs.learning import Learning
from jetrl.runs.plot_style import Chart, to_png
from jetrl.runs.plots import charts_of
from jetrl.runs.report_page import (
    Html,
    figures,
    folded,
    from_to,
    join,
    page,
    section,
    table,
    text,
    tile,
)
from jetrl.runs.rollout_records import prompt_text
from jetrl.settings.loading import Settings

MAX_PROMPT, MAX_COMPLETION = 1200, 2400
DEFAULT_SAMPLES = 8
PLAN_ROLES = {
    "name": "preset",
    "rollout_linear": "linear layers, rollout",
    "train_linear": "linear layers, training",
    "kv": "keys and values, both sides",
    "rest": "embeddings, norms, residual",
    "lm_head": "lm_head, both sides",
    "grad_output": "output gradients in DGrad and WGrad",
    "scales": "scales",
    "first_layers_bf16": "first layers kept in BF16",
    "last_layers_bf16": "last layers kept in BF16",
    "wgrad_input": "X into WGrad, groups",
    "pinned_sums": "sums in one order",
    "sampler_deviation": "the sampler alone, otherwise",
    "base": "FP8 linears of a frozen base",
}
FORMATS = {
    "e4m3": "FP8 (e4m3)",
    "e5m2": "FP8 (e5m2)",
    "fp8": "FP8 (e4m3)",
    "nvfp4": "NVFP4",
    "int8": "INT8",
    "int8+fp8": "keys INT8, values FP8 (e4m3)",
    "fp8+int8": "keys FP8 (e4m3), values INT8",
    "bf16": "BF16",
    "fp32": "FP32",
}
STATE_TONES = {"finished": "good", "running": "good", "failed": "bad", "stopped": "bad"}


def write_report(run_path: str | Path) -> Path:
    """Write report.html and plots/*.png into a run directory, and return the report's path.

    Raises:
        UserError: The path is no run directory, or its metrics are damaged.
    """
    run = RunDirectory.open(run_path)
    plots = run.path / "plots"
    plots.mkdir(exist_ok=True)
    for old in plots.glob("*.png"):
        old.unlink()
    for chart in charts_of(run.metrics()):
        to_png(chart, plots / f"{chart.key}.png")
    path = run.path / "report.html"
    write_atomically(path, report_page(run_path))
    return path


def report_page(run_path: str | Path, refresh_s: float | None = None) -> str:
    """Return the report of a run at this moment, as HTML.

    Args:
        refresh_s: Seconds after which a browser asks for the page again; None: never.

    Raises:
        UserError: The path is no run directory, or its metrics are damaged.
    """
    run = RunDirectory.open(run_path)
    records, attempts, history = run.metrics(), run.attempts(), run.history()
    config, plan = run.config(), run.plan()
    charts = charts_of(records)
    body = [
        _header(run, config, history, attempts),
        _headline(records, history, attempts),
        _warnings(records),
        _charts(charts),
        _samples(run, config),
        _settings(run, config),
        section("Precision plan", table(_plan_rows(plan), ("operand", "format"))),
        _attempts(attempts),
        Html(
            f"<footer>Written by jetrl on {text(date(time.time()))} from {text(run.name)}"
            "/metrics.jsonl. The plots are in plots/ as PNG files.</footer>"
        ),
    ]
    return page(f"{run.name} - jetrl", body, refresh_s)


def _header(
    run: RunDirectory, config: Mapping[str, Any], history: RunHistory, attempts: list[Attempt]
) -> Html:
    state = run.state()
    model = config.get("model", {})
    source = model.get("path") or "a model with random initial weights"
    about = [
        f"{config.get('task', {}).get('name', 'task')} on {source}",
        f"{config.get('precision', {}).get('preset', '')} precision",
    ]
    if history.started is not None:
        about.append(f"started {date(history.started)}")
    reason = attempts[-1].reason if attempts and state != "running" else ""
    reason_line = f'<p class="soft">{text(state)}: {text(reason)}</p>' if reason else ""
    return Html(
        '<p class="kicker">jetrl run report</p>'
        f'<div class="title"><h1>{text(run.name)}</h1>'
        f'<span class="pill {STATE_TONES.get(state, "")}">{text(state)}</span></div>'
        f'<p class="soft">{text(" · ".join(about))}</p>{reason_line}'
    )


def _headline(records: list[Record], history: RunHistory, attempts: list[Attempt]) -> Html:
    tiles = [_change_tile(f"Held-out {_task_of(e.name)}", e) for e in history.evals]
    if history.reward is not None:
        tiles.append(_change_tile("Training reward", history.reward))
    if history.num_different is not None:
        different = history.num_different
        exact = different == 0
        tokens = history.num_tokens
        compared = f"of {count(tokens)} tokens compared, " if tokens is not None else "tokens, "
        tiles.append(
            tile(
                "Sampler against trainer",
                text(f"{count(different)} different"),
                compared + ("bit for bit" if exact else "0 is the right answer of an exact plan"),
                "good" if exact else "bad",
            )
        )
    steps = f"{count(history.num_steps)} step{'s' if history.num_steps != 1 else ''}"
    if history.num_sft_steps and not history.num_steps:
        steps = f"{count(history.num_sft_steps)} supervised updates"
    elif history.num_sft_steps:
        steps += f" after {count(history.num_sft_steps)} of supervised warm-up"
    if len(attempts) > 1:
        steps += f", in {len(attempts)} attempts"
    drafts = change_of(records, "speculation/tokens_per_forward")
    if drafts is not None:
        tiles.append(_change_tile("Tokens a forward, with drafts", drafts))
    guesses = change_of(records, "speculation/acceptance_head")
    if guesses is not None:
        tiles.append(_change_tile("Right guesses of the draft head", guesses))
    tiles.append(tile("Wall time", text(duration(history.elapsed_s)), steps))
    loss = change_of(records, "sft/loss")
    if loss is not None and history.num_steps == 0:
        tiles.insert(0, _change_tile("Supervised loss", loss))
    return Html(f'<div class="tiles">{join(tiles)}</div>')


def _change_tile(label: str, change: Change) -> Html:
    share = change.name.startswith("eval/") and all(
        0 <= v <= 1 for v in (change.first, change.last)
    )
    form = percent if share else number
    if change.first_step == change.last_step:
        return tile(label, text(form(change.last)), f"step {change.last_step}")
    steps = f"step {change.first_step} to {change.last_step}"
    return tile(label, from_to(form(change.first), form(change.last)), steps)


def _warnings(records: list[Record]) -> Html:
    """Return the warnings of the run, each with its first step; nothing where there are none."""
    learning, anomalies = Learning(), Anomalies()
    rows = []
    for record in in_phase(records, "rl"):
        metrics = {n: v for n, v in record.items() if isinstance(v, int | float)}
        warnings = [*learning.see(metrics), *anomalies.see(metrics)]
        rows += [(f"step {record['step']}", warning) for warning in warnings]
    return section("Warnings", table(rows, ("from", ""))) if rows else Html("")


def _charts(charts: list[Chart]) -> Html:
    if not charts:
        return section("Curves", Html('<p class="card empty">No step was finished.</p>'))
    return section("Curves", figures(charts))


def _samples(run: RunDirectory, config: Mapping[str, Any]) -> Html:
    steps = run.rollout_steps()
    num = int(config.get("report", {}).get("samples", DEFAULT_SAMPLES))
    if not steps or num == 0:
        return Html("")
    chosen = [steps[0], steps[-1]] if len(steps) > 1 else [steps[0]]
    columns = []
    for step in chosen:
        title = f"<h3>Step {step}</h3>"
        try:
            records = sorted(run.rollouts(step), key=lambda r: float(r.get("reward", 0.0)))
        except UserError as error:
            columns.append(Html(f'<div>{title}<p class="soft">{text(error)}</p></div>'))
            continue
        shown = spread(records, max(1, num // len(chosen)))
        columns.append(Html(f"<div>{title}{join(_sample(r) for r in reversed(shown))}</div>"))
    note = "From the highest to the lowest reward of the first and the last step."
    reading = run.reading()
    if reading:
        note = f"{note} In this task {reading}."
    return section(
        "Completions, early and late",
        Html(f'<p class="soft" style="margin:-8px 0 14px">{text(note)}</p>'),
        Html(f'<div class="columns">{join(columns)}</div>'),
    )


def _sample(record: Record) -> Html:
    reward = float(record.get("reward", 0.0))
    tone = "good" if reward > 0 else "bad" if record.get("failure") or reward < 0 else ""
    facts = [f"{len(record.get('token_ids', ()))} tokens"]
    if len(record.get("turns") or ()) > 1:
        facts.append(f"{len(record['turns'])} turns")
    if record.get("finish_reason") == "length":
        facts.append("cut off at the limit")
    if record.get("answer") is not None:
        facts.append(f"answer {clip(str(record['answer']), 60)}")
    score_parts = record.get("parts") or {}
    facts += [f"{name} {number(float(value))}" for name, value in score_parts.items()]
    if record.get("failure"):
        facts.append(f"not scored: {record['failure']}")
    return Html(
        f'<article class="card sample"><header><span class="pill {tone}">reward '
        f"{text(number(reward))}</span>{text(' · '.join(facts))}</header>"
        f"{_readable(record)}"
        f'<pre class="prompt">{text(_shortened(prompt_text(record), MAX_PROMPT))}</pre>'
        f"{_completion(record)}</article>"
    )


def _readable(record: Record) -> Html:
    """Return the prompt and the completion as a person would write them, where the task says so."""
    line = str(record.get("readable") or "")
    return Html(f'<p class="readable">{text(clip(line, 200))}</p>' if line else "")


def _completion(record: Record) -> Html:
    """Return the completion's text, or its turns with the environment's replies."""
    turns = record.get("turns")
    if not isinstance(turns, list) or not turns:
        content = _shortened(str(record.get("completion", "")), MAX_COMPLETION)
        return Html(f"<pre>{text(content)}</pre>")
    pieces = []
    for turn in turns:
        written, reply = str(turn.get("completion", "")), turn.get("reply")
        pieces.append(Html(f"<pre>{text(_shortened(written, MAX_COMPLETION))}</pre>"))
        if reply is not None:
            role = reply.get("role", "reply") if isinstance(reply, dict) else "reply"
            content = reply.get("content", "") if isinstance(reply, dict) else reply
            shown = f"{role}: {_shortened(str(content), MAX_COMPLETION)}"
            pieces.append(Html(f'<pre class="reply">{text(shown)}</pre>'))
    return join(pieces)


def _shortened(content: str, width: int) -> str:
    left_out = len(content) - width
    return content if left_out <= 0 else f"{content[:width]}\n[{count(left_out)} characters more]"


def _settings(run: RunDirectory, config: Mapping[str, Any]) -> Html:
    defaults = Settings().model_dump(mode="json")
    rows = [
        (f"{name}.{key}", clip(str(value), 300), _default(defaults, name, key))
        for name, keys in config.items()
        for key, value in keys.items()
        if defaults.get(name, {}).get(key) != value
    ]
    whole = (run.path / "config.toml").read_text(encoding="utf-8")
    return section(
        "Settings",
        table(rows, ("differs from the default", "this run", "default")) if rows else Html(""),
        folded("All settings (config.toml)", whole),
    )


def _default(defaults: Mapping[str, Any], name: str, key: str) -> str:
    value = defaults.get(name, {}).get(key)
    return "not set" if value is None else clip(str(value), 120)


def _plan_rows(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (PLAN_ROLES.get(key, key), FORMATS.get(str(value), _plan_value(value)))
        for key, value in plan.items()
        if not (key.endswith("_layers_bf16") and value == 0)
    ]


def _plan_value(value: Any) -> str:
    """Return a field of a plan as text, the fields of a table one after the other."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {field}" for key, field in value.items())
    return str(value)


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


def _task_of(name: str) -> str:
    return name.removeprefix("eval/").removesuffix("/mean")
