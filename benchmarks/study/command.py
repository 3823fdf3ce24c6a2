"""Run a grid of variants and seeds across GPUs, and report on them.

For example:

    jetrl study benchmarks/study/flows.toml                 all runs, then the report
    jetrl study flows.toml --dry-run                        its runs, and what is done of them
    jetrl study flows.toml --only bf16 --only unified       some variants
    jetrl study flows.toml --only length=64 --jobs 8        one value of an axis, 8 runs per GPU
    jetrl study flows.toml --only seed=0 --only seed=1      some seeds
    jetrl study flows.toml --minutes 10                     stop at checkpoints after ten minutes
    jetrl study flows.toml --minutes 10 --no-report         the same, and no report at the end
    jetrl study flows.toml --report-only                    the report of what is there
    jetrl study queue.toml --jobs 15 --minutes 9            parts of a study, in that order
    jetrl study benchmarks/results/study/flows.json         the report from the committed results
    jetrl study flows.json --reference unified              the same, compared with another arm

The same command continues: finished runs are skipped, interrupted ones resume bit for bit.
docs/studies.md says how to write a study and a queue file. Exit codes: 0 done, 1 a run failed or
twins differ, 2 bad input, 75 runs are left after --minutes, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "jetrl study STUDY [--only ARM | AXIS=VALUE | seed=N ...] [--jobs N] "
        "[--minutes M] [--reference ARM] [--no-report | --report-only | --dry-run]"
    )
    parser.add_argument(
        "study",
        nargs="?",
        metavar="STUDY",
        help="a study file, a results file (.json), or a queue file with parts of one study",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="ARM | AXIS=VALUE | seed=N",
        help="run only these variants, grid values and seeds (repeatable)",
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="runs at once per GPU (default: study.jobs)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="begin no run after these minutes, and stop those that run at a checkpoint",
    )
    parser.add_argument(
        "--report-only", action="store_true", help="run nothing: write the report of what is there"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list the runs and their state, and stop"
    )
    parser.add_argument(
        "--no-report", action="store_true", help="run, and leave the report to --report-only"
    )
    parser.add_argument(
        "--reference",
        metavar="ARM",
        help="compare the others with this arm in the report (default: study.reference)",
    )
    parser.add_argument("--evaluate", metavar="REQUEST", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    from benchmarks.study import running  # torch comes with it, which --help does not need

    return running.run(args)
