r"""A whole RL step at the shape of a real model, under several plans.

    jetrl bench step --shape qwen3-8b --prompts 32 --samples 8 --prompt-length 256 \
        --response-length 2048 --out step.json

Each plan gets a policy with random weights, a warm-up that compiles every kernel and changes the
weights (short sampling, then training), and one measured step:

    rollout        the engine draws every completion to its full length, with log-probs, allocation
                   of pages included; decode graphs exist already, as in later steps of a run
    old log-probs  if the plan is not exact: the trainer's log-probs of all completions, by a
                   forward without gradients. The update does not need them (with one update per
                   step it uses its own), but a flow with two engines does. Ratios are given with
                   and without this pass.
    update         `Trainer.step`: packing, forward, comparison with the sampler, backward
    optimizer      AdamW
    requantize     the quantized weights

Rewards are random. Each plan uses the largest micro-batch that fits next to the same optimizer
(flow.py) and samples all sequences together; if memory has no room for their pages, the youngest
wait. MFU is the model's FLOPs (loads.py) relative to the rate of a large BF16 product measured in
the same run, also for 8-bit plans.

Under torchrun, each rank samples its share of the prompts, and all train together. The load is that
of the whole step, or with `--batch-per-rank` that of each rank. Times and peaks are maxima over
ranks. There are two more phases:

    gather         every rank gets the completions of all ranks
    requantize     each rank rounds its rows, and all gather the quantized weights

`--digest` adds digests of codes, master weights and moments after the warm-up and after the step.
They are equal for any number of ranks with the same load, --tokens-per-micro-batch and
--warm-micro-batches. `--exchange` adds two updates, with and without the exchange of gradients.

    torchrun --nproc-per-node 4 -m jetrl bench step --shape qwen3-8b --plan unified \
        --batch-per-rank --digest --exchange

Memory peaks per phase are compared with the memory plan. `--leave-free 78.75` occupies memory of
each GPU until 78.75 GiB are free, as on a GPU of 80 GB.

The JSON is written after the warm-up, the rollout and the update, so that a run that is interrupted
in its update leaves its rollout; `missing` names the phases that a row lacks.

Several plans take minutes. `--plan bf16 --out a.json`, then `--plan int8 --beside a.json --out
b.json` measures them in two commands.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.flow import Choices, Flow, policy_of
from benchmarks.harness import (
    Row,
    add_adapter_argument,
    add_load_arguments,
    add_shape_arguments,
    begins,
    bench_parser,
    command_typed,
    load_of,
    print_table,
    write_results,
)
from benchmarks.loads import Load, load_text
from benchmarks.policies import add_plan_argument, plans_of
from benchmarks.step_parts import (
    PARTS,
    Known,
    bytes_sent,
    digests,
    draw,
    rollout_row,
    slowest,
    step_row,
    train,
    warm_row,
    warmed,
    without_exchange,
)
from benchmarks.timing import copy_bandwidth, matrix_limit

from jetrl.distributed.world import world
from jetrl.errors import UserError
from jetrl.memory.out_of_memory import release
from jetrl.models.policy import Policy
from jetrl.training.packing import pack, shares_prompts
from jetrl.types import Sample

# Keys of a row that are printed below the table.
PRINTED = ("weights_changed", "planned_gib", "peak_of_plan", "exchange", "digests")


def measure(
    policy: Policy,
    load: Load,
    choices: Choices,
    limit: float,
    digest: bool = False,
    exchange: bool = False,
    known: Known = lambda row: None,
) -> Row:
    """Return the row of a plan under a load."""
    flow, changed = warmed(policy, load, choices)
    known({**warm_row(flow, choices), "missing": ["rollout", "update"]})
    found: Row = {"digests": {"warm": digests(policy, flow.trainer)}} if digest else {}
    rollout = draw(flow)
    known({**rollout_row(flow, choices, limit, rollout), "missing": ["update"]})
    update = train(flow, rollout.samples)
    if digest:
        found["digests"]["step"] = digests(policy, flow.trainer)
    if exchange and world().size > 1:
        found["exchange"] = exchange_of(flow, rollout.samples)
    return {**step_row(flow, choices, limit, rollout, update, changed), **found}


def measure_rollout(policy: Policy, load: Load, choices: Choices, limit: float) -> Row:
    """Return the row of a rollout, for a model whose update may not fit."""
    flow = Flow(policy, load, choices)
    flow.warm_up(training=False)
    return rollout_row(flow, choices, limit, draw(flow))


def exchange_of(flow: Flow, samples: Sequence[Sample]) -> Row:
    """Return the cost of the exchange of gradients, from an update with it and one without.

    The second update has the same work on wrong numbers, so the weights are useless afterwards.
    """
    own: dict[str, float] = {}
    again = flow.expected(samples)
    with bytes_sent() as sent:
        own["update"] = flow.timed("exchanged", lambda: flow.update(again))[0]
    again = flow.expected(samples)
    with without_exchange():
        own["update_without"] = flow.timed("alone", lambda: flow.update(again))[0]
    trainer = flow.trainer
    share = shares_prompts(trainer.settings.train.share_prompts, samples)
    num_micro_batches = len(pack(samples, trainer.micro_batch_size.tokens, share_prompts=share))
    rounds = -(-num_micro_batches // world().size)
    for phase in ("exchanged", "alone"):
        flow.peaks.pop(phase, None)
    seconds = slowest("the seconds of the exchange", own)
    return {
        "update_s": round(seconds["update"], 3),
        "update_without_s": round(seconds["update_without"], 3),
        "share": round(1 - seconds["update_without"] / seconds["update"], 4),
        "rounds": rounds,
        "gb_sent_a_round": round(sum(sent) / rounds / 1e9, 3),
    }


def compare(row: Row, base: Row) -> Row:
    """Return the speed-ups of a plan over `base`, and its peak memory relative to it."""
    extra = base["seconds"].get("old_logprobs", 0.0)
    peaks = {n: g / base["peak_gib"][n] for n, g in row["peak_gib"].items()}
    times = {"rollout": round(base["seconds"]["rollout"] / row["seconds"]["rollout"], 3)}
    if "step_s" in row and "step_s" in base:
        times |= {
            "training": round(base["training_s"] / row["training_s"], 3),
            "step": round(base["step_s"] / row["step_s"], 3),
            "step_without_old_logprobs": round((base["step_s"] - extra) / row["step_s"], 3),
        }
    return {**times, "peak_memory": {name: round(share, 3) for name, share in peaks.items()}}


def table(rows: Sequence[Row]) -> list[Row]:
    """Return the main columns of each row."""
    lines = []
    for row in rows:
        line = {"plan": row["plan"], "load": row["load"], "ranks": row.get("ranks", 1)}
        line |= {f"{name} s": row["seconds"].get(name, "") for name in PARTS}
        line |= {"step s": row.get("step_s", "")}
        line |= {f"{name} tok/s": rate for name, rate in row["tokens_per_s"].items()}
        line |= {f"{name} MFU": share for name, share in row["mfu"].items()}
        line |= {f"{name} GiB": size for name, size in row["peak_gib"].items()}
        if "different" in row:
            line |= {"different": f"{row['different']} of {row['compared_tokens']}"}
        lines.append(line)
    return lines


def earlier_rows(path: Path | None) -> list[Row]:
    """Return the rows of an earlier run, each with its command, date and commit."""
    if path is None:
        return []
    if not path.is_file():
        raise UserError(f"--beside {path}: no such file")
    results = json.loads(path.read_text(encoding="utf-8"))
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else results.get("device")
    if results.get("benchmark") != "step" or results["device"] != here:
        raise UserError(f"--beside {path}: give the JSON of jetrl bench step on a {here}")
    origin = {name: results.get(name) for name in ("command", "date", "commit")}
    return [{**origin, **row} for row in results["rows"]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments common to `bench step` and `bench train`, except for the load."""
    add_shape_arguments(parser)
    add_plan_argument(parser, "bf16", "unified")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="default 1e-4")
    parser.add_argument(
        "--tokens-per-micro-batch", type=int, help="default: the largest that fits, up to 16384"
    )
    parser.add_argument(
        "--train",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of [train]; optimizer_states=compact unless given",
    )
    add_adapter_argument(parser)
    parser.add_argument("--device", default="cuda", help="cpu: to try it out, nothing is written")


def choices_of(args: argparse.Namespace, max_batch_size: int | None = None) -> Choices:
    """Return the choices given by the arguments of `add_arguments`."""
    train: dict[str, Any] = {"optimizer_states": "compact"}
    train |= {key: value for key, _, value in (word.partition("=") for word in args.train)}
    return Choices(
        shape=args.shape,
        device=args.device,
        layers=args.layers,
        learning_rate=args.learning_rate,
        tokens_per_micro_batch=args.tokens_per_micro_batch,
        max_batch_size=max_batch_size,
        train=train,
        adapter_rank=args.adapter_rank,
    )


def limit_of(device: str) -> float:
    """Return the FLOP/s of a large BF16 product; on a CPU a placeholder, 1e12."""
    return matrix_limit() if device == "cuda" else 1e12


def rows_of(
    args: argparse.Namespace,
    policy: Policy,
    loads: Sequence[Load],
    choices: Choices,
    limit: float,
    known: Known,
) -> Iterator[tuple[Load, Row]]:
    """Yield (load, row) pairs of a policy in the order of measurement."""
    for load in loads:
        if args.rollout_only:
            yield load, measure_rollout(policy, load, choices, limit)
        else:
            yield load, measure(policy, load, choices, limit, args.digest, args.exchange, known)


def _parser() -> argparse.ArgumentParser:
    """Return the parser of `jetrl bench step`."""
    parser = bench_parser("step", __doc__)
    add_arguments(parser)
    add_load_arguments(parser, prompts=32, samples=8)
    parser.add_argument(
        "--mean-length",
        type=int,
        default=0,
        help="a long tail: log-normal lengths with this mean, of at most --response-length tokens",
    )
    parser.add_argument(
        "--load",
        action="append",
        type=load_text,
        default=[],
        metavar="PxSxLxR",
        help="another load with the same policy, as 8x8x256x8192: prompts, samples per prompt, "
        "prompt and response tokens (and the mean length, for a long tail); repeatable",
    )
    parser.add_argument(
        "--image-side",
        type=int,
        default=0,
        metavar="PIXELS",
        help="begin each prompt with a square image; its tokens are part of --prompt-length",
    )
    parser.add_argument("--batch-per-rank", action="store_true", help="the load is per rank")
    parser.add_argument(
        "--digest", action="store_true", help="add digests of codes, master weights and moments"
    )
    parser.add_argument(
        "--exchange", action="store_true", help="measure what the exchange of gradients costs"
    )
    parser.add_argument(
        "--rollout-only",
        action="store_true",
        help="no update, for a model whose update does not fit",
    )
    parser.add_argument(
        "--warm-micro-batches",
        type=int,
        help="micro-batches of the warm-up's update; default: two per rank",
    )
    parser.add_argument(
        "--beside",
        type=Path,
        help="JSON of an earlier run on the same kind of GPU, whose rows come first",
    )
    parser.add_argument("--max-batch-size", type=int, help="sequences together; default: all")
    parser.add_argument(
        "--leave-free",
        type=float,
        metavar="GIB",
        help="occupy memory of each GPU until GIB are free: 78.75 as on a GPU of 80 GB",
    )
    parser.add_argument("--out", default="build/bench/step.json", type=Path, help="JSON file")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run `jetrl bench step`."""
    args = _parser().parse_args(argv)
    plans = plans_of(args)
    choices = choices_of(args, args.max_batch_size)
    choices = replace(choices, warm_micro_batches=args.warm_micro_batches)
    loads = [load_of(args), *args.load]
    command = command_typed("jetrl bench step", argv)
    if args.batch_per_rank:
        loads = [replace(load, prompts=load.prompts * world().size) for load in loads]
    leave_free(args.leave_free)
    begins("the rates of a large product and of a copy")
    limit = limit_of(args.device)
    facts: Row = {"bf16_matrix_teraflops": round(limit / 1e12, 1)}
    if args.device == "cuda":
        copy_bandwidth()  # the results name it, and it is measured once, while memory is free
        release()
    rows = earlier_rows(args.beside)

    def write(unfinished: Sequence[Row] = ()) -> None:
        if args.device == "cuda" and world().is_first:
            known = [{"shape": args.shape, **row} for row in unfinished]
            write_results(args.out, "step", command, [*rows, *known], **facts)

    for plan in plans:
        begins(f"weights and kernels of the plan {plan}")
        policy = policy_of(plan, choices)
        for load, row in rows_of(args, policy, loads, choices, limit, lambda row: write([row])):
            row = {"shape": args.shape, **row}
            release()
            key = ("bf16", world().size, str(load))
            base = next((r for r in rows if (r["plan"], r.get("ranks", 1), r["load"]) == key), None)
            if base is not None:
                row["times_bf16"] = compare(row, base)
            rows.append(row)
            print_table(table(rows))
            print(f"{plan}: {row['settings']}")
            for name in PRINTED:
                if name in row:
                    print(f"{plan} {name}: {row[name]}")
            print(f"times bf16: {row.get('times_bf16', '-')}", flush=True)
            write()
        del policy
        release()


_GIB = 2**30


def leave_free(gib: float | None) -> None:
    """Occupy memory of this process's GPU until it ends.

    Args:
        gib: The memory to leave free, in GiB; None: occupy nothing.
    """
    if gib is None:
        return
    if not torch.cuda.is_available():
        raise UserError(f"--leave-free {gib:g}: there is no GPU")
    torch.cuda.synchronize()  # creates the context, which takes memory itself
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    taken = free - int(gib * _GIB)
    if not gib > 0 or taken < 0:
        raise UserError(
            f"--leave-free {gib:g}: {free / _GIB:.1f} GiB are free; give a number above 0 and "
            "below that"
        )
    from cuda.bindings import driver

    status, _ = driver.cuMemAlloc(taken)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise UserError(f"--leave-free {gib:g}: the driver refused {taken} bytes: {status.name}")


if __name__ == "__main__":
    main()
