r"""Speculation on one GPU: speed as a function of how many drafts are right, and the bits.

    jetrl bench speculation --shape qwen3-8b --load 8 --load 256 --out speculation.json
    jetrl bench speculation --load 64-part --right 0.5 --fixed 2x2 --fixed 4x4
    jetrl bench speculation --load exact --mode text --right 0.7

A case is PROMPTS x SAMPLES x PROMPT TOKENS x RESPONSE TOKENS, and may have a fifth number, the mean
length of responses with a tail (`benchmarks._load`); a load is one case by name, or several.
Weights are random, so no text would be a good draft. The completions are drawn once with
speculation off; then drafts are these completions, every token of which is wrong with the chosen
chance. A chance of 0.5, 0.6 and 0.7 to be right brings 2.0, 2.5 and 3.3 tokens a forward where
drafts may be long. Look-ups in text, which a run pays for, run as well, and with `--head` the
guesses of a draft head. The mode is `auto`, which chooses the width of each step, or `text`, which
always verifies; `--fixed` adds calls in which every forward verifies the same.

Seconds are of whole calls without the capture of graphs; `decode_s` also leaves the prompts out.
`widths` of the JSON says for each size of forward, SEQUENCES/MOST/ROWS, how many ran, their
milliseconds and the tokens a sequence that they brought. Before the first call of a mode is timed,
one runs with short completions, so that what is compiled is not part of it. A call with
speculation off that is short runs again at the end, and the mean is what a speed-up refers to. All
tokens and log-probs are compared with those of the call without speculation, as bits.

The JSON is written after each call, so that a benchmark that is cut keeps its rows. On one H200, at
the shape of qwen3-8b, a load is expected to take, with S shares: 8 about 8 + 2 S seconds, 256 about
40 + 18 S, tail 25 + 10 S, 64-part 28 + 10 S, 64 about 70 + 50 S, grpo 60 + 45 S, exact 40 + 40 S.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks._command import command_typed
from benchmarks._known_drafts import FixedWidth, KnownDrafts, differences, width_rows
from benchmarks._load import LOADS, Load, load_text
from benchmarks._timing import (
    Row,
    add_shape_arguments,
    bench_parser,
    print_table,
    write_results,
)
from benchmarks.parity import make_policy

from jetrl.models.draft_head import DraftHead
from jetrl.models.policy import Policy
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.options import GenerateOptions, RolloutStats
from jetrl.rollout.speculation import Spent
from jetrl.types import Completion, SamplingParams

_SHORT_S = 20  # Calls without speculation that are shorter run twice.
_WARM_TOKENS = 64  # Of each completion in the call before those that are timed.


@dataclass(frozen=True)
class Drafting:
    """The drafts of the calls of a benchmark, and what verifies them.

    Attributes:
        shares: The chances of a drafted token to be right.
        head: A draft head that is asked as well; None: without.
        mode: "auto", or "text" to verify drafts in every forward.
        fixed: (most tokens, share of rows) of further calls, whose forwards all verify the same.
    """

    shares: Sequence[float]
    head: DraftHead | None = None
    mode: str = "auto"
    fixed: Sequence[tuple[int, float]] = ()


def run_case(policy: Policy, load: Load, drafting: Drafting) -> Iterator[list[Row]]:
    """Yield the rows so far after each call: that without speculation, and one for each share.

    Args:
        policy: The policy that samples.
        load: The prompts and lengths.
        drafting: The drafts.
    """
    prompts, count = load.random_prompts(policy.config.vocab_size, 0), load.sequences
    params = SamplingParams(load.samples, load.response_length, ignore_eos=True, seed=1)
    whole = GenerateOptions(max_tokens=load.response_lengths())
    lengths = [min(n, _WARM_TOKENS) for n in load.response_lengths()]
    short = GenerateOptions(max_tokens=lengths)

    # With enough pages from the start a longer call keeps the graphs of the short one. The pages
    # of a long tail at its longest are more than there is memory for, and than are used.
    pages = None if load.mean_length else count * -(-load.length // 64) + 1

    def called(engine: RolloutEngine) -> tuple[RolloutStats, list[Completion]]:
        completions = engine.generate(prompts, params, options=whole)
        stats = engine.stats
        engine.free_cache()  # two engines may have more pages than memory has room for
        return stats, completions

    off = RolloutEngine(policy, count, pages, max_model_len=load.length)
    off.generate(prompts, params, options=short)  # what is compiled or captured first
    stats, expected = called(off)
    calls = [stats]
    rows = [_row(load, "off", None, stats, expected, expected, {})]
    yield _compared(rows, calls)
    for most, share in [(0, 0.0), *drafting.fixed]:
        engine = RolloutEngine(policy, count, pages, max_model_len=load.length)
        slots = (count, engine.max_model_len, policy.device)
        drafts = KnownDrafts(*slots, drafting.head, drafting.mode)
        if most:
            drafts.widths = FixedWidth(most, share)
        engine.use_drafts(drafts)
        for index, right in enumerate(drafting.shares):
            drafts.know(expected, right, policy.config.vocab_size)
            if index == 0:
                engine.generate(prompts, params, options=short)
            drafts.spent.clear()
            stats, completions = called(engine)
            mode = f"{most}x{share:g}" if most else drafting.mode
            rows.append(_row(load, mode, right, stats, completions, expected, drafts.spent))
            yield _compared(rows, calls)
    if calls[0].seconds < _SHORT_S and policy.device.type == "cuda":
        # A card that is warm, or at its power limit, is slower.
        calls.append(called(off)[0])
        yield _compared(rows, calls)


def _compared(rows: Sequence[Row], calls: Sequence[RolloutStats]) -> list[Row]:
    """Return rows with their speed-ups over calls without speculation.

    Args:
        rows: The rows of the calls.
        calls: The counts of the calls without speculation.
    """
    plain = statistics.mean(_seconds(stats) for stats in calls)
    plain_decode = statistics.mean(_decode_seconds(stats) for stats in calls)
    found = []
    for row in rows:
        speeds = {
            "speed_up": round(plain / row["seconds"], 3),
            "decode_speed_up": round(plain_decode / row["decode_s"], 3),
        }
        found.append({key: speeds.get(key, value) for key, value in row.items()})
    return found


def _seconds(stats: RolloutStats) -> float:
    """Return the seconds of a call without the capture of graphs."""
    return stats.seconds - stats.capture_s


def _decode_seconds(stats: RolloutStats) -> float:
    """Return the seconds of a call without the capture of graphs and without its prompts."""
    return _seconds(stats) - stats.prefill_s


def _row(
    load: Load,
    mode: str,
    right: float | None,
    stats: RolloutStats,
    completions: Sequence[Completion],
    expected: Sequence[Completion],
    spent: Mapping[tuple[int, int, int], Spent],
) -> Row:
    """Return the row of one call, without its speed-ups.

    Args:
        load: The load.
        mode: "off", what chose the widths, or the fixed one.
        right: The chance of a drafted token to be right; None with speculation off.
        stats: The counts of the call.
        completions: Its completions.
        expected: The completions of the call with speculation off.
        spent: What its forwards took, by their size.
    """
    drafts, seconds, decode = stats.speculation, _seconds(stats), _decode_seconds(stats)
    tokens, logprobs = differences(completions, expected)
    return {
        "load": str(load),
        "speculation": mode,
        "right": right,
        "seconds": round(seconds, 3),
        "speed_up": 1.0,
        "decode_s": round(decode, 3),
        "decode_speed_up": 1.0,
        "tokens_per_forward": 1.0 if drafts is None else round(drafts.tokens_per_forward, 3),
        "forwards": stats.forwards,
        "verify_share": 0.0 if drafts is None else round(drafts.verify_s / drafts.decode_s, 3),
        "tokens": stats.tokens_drawn,
        "different_tokens": tokens,
        "different_logprobs": logprobs,
        "graphs": stats.graphs,
        "capture_s": round(stats.capture_s, 2),
        "idle_s": round(stats.device_idle_s, 3),
        "widths": width_rows(spent),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run `jetrl bench speculation`."""
    parser = bench_parser("speculation", __doc__)
    add_shape_arguments(parser)
    parser.add_argument("--plan", default="unified", help="default: unified")
    parser.add_argument("--device", default="cuda", help="cpu: to try it out, nothing is written")
    parser.add_argument(
        "--case", action="append", help="PxSxLxR or PxSxLxRxM, repeatable; default: 1x8x128x1024"
    )
    parser.add_argument("--load", action="append", choices=LOADS, help="repeatable")
    parser.add_argument(
        "--right", type=float, action="append", help="repeatable; default: 0.5, 0.6 and 0.7"
    )
    parser.add_argument(
        "--fixed", action="append", help="MOSTxSHARE, repeatable: calls of this width as well"
    )
    parser.add_argument("--mode", choices=("auto", "text"), default="auto")
    parser.add_argument(
        "--out", default="build/bench/speculation.json", type=Path, help="JSON file"
    )
    parser.add_argument("--head", action="store_true", help="ask a draft head of 3 tokens as well")
    args = parser.parse_args(argv)
    shares = args.right or [0.5, 0.6, 0.7]
    cases = [*(args.case or []), *(case for name in args.load or [] for case in LOADS[name])]
    policy = make_policy(args.shape, args.plan, args.device, args.layers, speculation=True)
    head = DraftHead(policy, 3, 0) if args.head else None
    if head is not None:
        head.trained = True
    fixed = [(int(m), float(s)) for m, s in (one.split("x") for one in args.fixed or [])]
    drafting = Drafting(shares, head, args.mode, fixed)
    model = {"shape": args.shape, "layers": policy.config.num_layers, "plan": args.plan}
    model |= {"draft_head": True} if args.head else {}
    command = command_typed("jetrl bench speculation", argv)
    rows: list[Row] = []
    for case in cases or ["1x8x128x1024"]:
        began = time.perf_counter()
        of_case: list[Row] = []
        for of_case in run_case(policy, load_text(case), drafting):
            last = of_case[-1]
            print(f"{case} {last['speculation']} {last['right']}: {last['seconds']} s", flush=True)
            if args.device != "cpu":
                found = [{**model, **row} for row in (*rows, *of_case)]
                write_results(args.out, "speculation", command, found)
        rows += of_case
        print_table([{k: v for k, v in row.items() if k != "widths"} for row in of_case])
        print(f"{case}: {time.perf_counter() - began:.0f} s", flush=True)
    different = [sum(row[f"different_{what}"] for row in rows) for what in ("tokens", "logprobs")]
    tokens = sum(row["tokens"] for row in rows if row["right"] is not None)
    print(f"{different[0]} tokens and {different[1]} log-probs of {tokens} differ", flush=True)


if __name__ == "__main__":
    main()
