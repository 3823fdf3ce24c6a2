"""The records of a run and its displays: directory, metrics, console, report, trackers."""

from jetrl.runs.anomalies import Learning, problems
from jetrl.runs.attempts import Attempt
from jetrl.runs.console import Console
from jetrl.runs.directory import RunDirectory
from jetrl.runs.history import summary_of
from jetrl.runs.metrics import eval_metric, reproducible
from jetrl.runs.overview import (
    bits_in_words,
    compare_runs,
    comparison_rows,
    list_runs,
    runs_table,
    show_run,
)
from jetrl.runs.plots import plot_runs
from jetrl.runs.report import write_report
from jetrl.runs.trackers import check_trackers, open_trackers

__all__ = [
    "Attempt",
    "Console",
    "Learning",
    "RunDirectory",
    "bits_in_words",
    "check_trackers",
    "compare_runs",
    "comparison_rows",
    "eval_metric",
    "list_runs",
    "open_trackers",
    "plot_runs",
    "problems",
    "reproducible",
    "runs_table",
    "show_run",
    "summary_of",
    "write_report",
]
