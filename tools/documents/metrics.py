"""The document docs/metrics.md, made whole from the registry of metric names."""

from __future__ import annotations

from jetrl.runs.metrics import KNOWN_AS, METRICS


def render_metrics_document() -> str:
    """Return docs/metrics.md: what is measured, in which unit, and what other systems call it."""
    lines = [
        "# Metrics",
        "",
        "What a run writes to `metrics.jsonl`, an object a line: `step`, `time` (Unix seconds),",
        "`phase` (`sft` in steps of the supervised warm-up, left out in RL steps), and the names",
        "below. A step has what was measured in it: an evaluation, for one, only now and then.",
        "Floats are written so that they read back bit-equal; not-a-number is written `NaN`,",
        "infinity `Infinity`. This page is made from the registry by",
        "`make docs`.",
        "",
        "| name | unit | meaning |",
        "| --- | --- | --- |",
        *(f"| `{m.name}` | {m.unit} | {_cell(m.meaning)} |" for m in METRICS),
        "",
        "`<task>` is the task's name without folders, `<name>` a part of the task's score. Times,",
        "speeds and memory depend on the machine. Everything else is the same, bit for bit, when a",
        "run is repeated, or cut and resumed, on the CPU.",
        "",
        "## Names in other systems",
        "",
        "The nearest name elsewhere; where it measures something slightly different, that is said.",
        "`token_mult_prob_error` above 1.05 is NeMo RL's alarm; here, under an exact plan, any",
        "value but 1, that is any `mismatch/num_different` but 0, stops the run.",
        "",
        "| jetrl | " + " | ".join(KNOWN_AS) + " |",
        "| --- |" + " --- |" * len(KNOWN_AS),
    ]
    for metric in METRICS:
        names = [_cell(known.get(metric.name, "")) for known in KNOWN_AS.values()]
        if any(names):
            lines.append(f"| `{metric.name}` | " + " | ".join(names) + " |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;").replace("*", "\\*")
