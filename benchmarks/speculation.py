r"""Speculative decoding on one GPU: speed at a given acceptance rate, and a check of the bits.

    jetrl bench speculation --shape qwen3-8b --load 8 --load 256 --out speculation.json
    jetrl bench speculation --load 64-part --right 0.5 --fixed 2x2 --fixed 4x4

A case is PROMPTS x SAMPLES x PROMPT TOKENS x RESPONSE TOKENS, with the mean response length as a
fifth number for a long tail (`benchmarks.loads`). A load is a name for one case or several. Weights
are random, so text gives no good drafts. The completions are drawn once with speculation off, and
then serve as drafts, in which each token is right with the chosen probability. Probabilities of
0.5, 0.6 and 0.7 yield 2.0, 2.5 and 3.3 tokens per forward with long drafts. Look-ups in text run as
in a run. The mode `auto` chooses the draft length per step; `--fixed` adds calls with a fixed one.

Seconds are those of whole calls without graph capture; `decode_s` also excludes prefill. A
short call precedes the first timed call of a mode, to compile kernels. A short call without
speculation is repeated at the end, and speed-ups refer to the mean of both. All tokens and
log-probs are compared bitwise with those of the call without speculation.

The JSON is written after each call. On one H200 with the shape qwen3-8b and S values of --right,
the loads take about: 8: 8 + 2 S seconds, 256: 40 + 18 S, tail: 25 + 10 S, 64-part: 28 + 10 S,
64: 70 + 50 S, grpo: 60 + 45 S.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from benchmarks.harness import (
    Row,
    add_shape_arguments,
    bench_parser,
    command_typed,
    print_table,
    write_results,
)
from benchmarks.loads import LOADS, Load, load_text
from benchmarks.policies import make_policy
from torch import Tensor

from jetrl.kernels.decode_state import MAX_DRAFT, UNKNOWN, DecodeState, Drafts
from jetrl.models.policy import Policy
from jetrl.rollout.draft_widths import DraftWidths, Width
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.launched_step import to_device
from jetrl.rollout.options import GenerateOptions, RolloutStats
from jetrl.rollout.sequence import RunningSequence
from jetrl.rollout.sizes import padded_batch
from jetrl.rollout.speculation import Speculation
from jetrl.settings.presets import DEFAULT_PRESET
from jetrl.types import Completion, SamplingParams

_SHORT_S = 20  # Calls without speculation that are shorter run twice.
_WARM_TOKENS = 64  # Of each completion in the call before those that are timed.


@dataclass(frozen=True)
class Drafting:
    """The drafts of a benchmark's calls.

    Attributes:
        shares: Probabilities that a draft token is right.
        mode: "auto", or "text" to verify drafts in every forward.
        fixed: (maximum tokens, share of rows) of additional calls with a fixed draft length.
    """

    shares: Sequence[float]
    mode: str = "auto"
    fixed: Sequence[tuple[int, float]] = ()


def run_case(policy: Policy, load: Load, drafting: Drafting) -> Iterator[list[Row]]:
    """Yield the rows so far after each call: one without speculation, then one per share."""
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
    rows = [_row(load, "off", None, stats, expected, expected)]
    yield _compared(rows, calls)
    for most, share in [(0, 0.0), *drafting.fixed]:
        engine = RolloutEngine(policy, count, pages, max_model_len=load.length)
        slots = (count, engine.max_model_len, policy.device)
        drafts = KnownDrafts(*slots, drafting.mode)
        if most:
            drafts.widths = FixedWidth(most, share)
        engine.use_drafts(drafts)
        for index, right in enumerate(drafting.shares):
            drafts.know(expected, right, policy.config.vocab_size)
            if index == 0:
                engine.generate(prompts, params, options=short)
            stats, completions = called(engine)
            mode = f"{most}x{share:g}" if most else drafting.mode
            rows.append(_row(load, mode, right, stats, completions, expected))
            yield _compared(rows, calls)
    if calls[0].seconds < _SHORT_S and policy.device.type == "cuda":
        # A GPU that is warm, or at its power limit, is slower.
        calls.append(called(off)[0])
        yield _compared(rows, calls)


def _compared(rows: Sequence[Row], calls: Sequence[RolloutStats]) -> list[Row]:
    """Return rows with their speed-ups over calls without speculation."""
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
    """Return the seconds of a call without graph capture."""
    return stats.seconds - stats.capture_s


def _decode_seconds(stats: RolloutStats) -> float:
    """Return the seconds of a call without graph capture and prefill."""
    return _seconds(stats) - stats.prefill_s


def _row(
    load: Load,
    mode: str,
    right: float | None,
    stats: RolloutStats,
    completions: Sequence[Completion],
    expected: Sequence[Completion],
) -> Row:
    """Return the row of one call, without its speed-ups."""
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
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run `jetrl bench speculation`."""
    parser = bench_parser("speculation", __doc__)
    add_shape_arguments(parser)
    parser.add_argument("--plan", default=DEFAULT_PRESET, help=f"default: {DEFAULT_PRESET}")
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
    parser.add_argument(
        "--out", default="build/bench/speculation.json", type=Path, help="JSON file"
    )
    args = parser.parse_args(argv)
    shares = args.right or [0.5, 0.6, 0.7]
    cases = [*(args.case or []), *(case for name in args.load or [] for case in LOADS[name])]
    policy = make_policy(args.shape, args.plan, args.device, args.layers, speculation="auto")
    fixed = [(int(m), float(s)) for m, s in (one.split("x") for one in args.fixed or [])]
    drafting = Drafting(shares, fixed=fixed)
    model = {"shape": args.shape, "layers": policy.config.num_layers, "plan": args.plan}
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
        print_table(of_case)
        print(f"{case}: {time.perf_counter() - began:.0f} s", flush=True)
    different = [sum(row[f"different_{what}"] for row in rows) for what in ("tokens", "logprobs")]
    tokens = sum(row["tokens"] for row in rows if row["right"] is not None)
    print(f"{different[0]} tokens and {different[1]} log-probs of {tokens} differ", flush=True)


class FixedWidth(DraftWidths):
    """A fixed draft length and share of rows, for comparison with `auto`."""

    def __init__(self, most: int, share: float) -> None:
        super().__init__(always=True)
        self._most, self._share = most, share

    def choose(self, sequences: int) -> Width:
        """Return the width, with rows in proportion to the sequences of the step."""
        size = padded_batch(sequences)
        return Width(self._most, min(int(size * self._share), size * self._most), True)


class KnownDrafts(Speculation):
    """Drafts from known completions, in which some tokens are wrong.

    Args:
        mode: "auto", or "text" to verify drafts in every forward.
    """

    def __init__(
        self, slots: int, max_model_len: int, device: torch.device, mode: str = "auto"
    ) -> None:
        super().__init__(mode, slots, max_model_len, device)
        # The token of each position, of each slot's sequence, with room for a draft behind the
        # last; and how many are known from a position on, up to the longest draft.
        self._width = max_model_len + MAX_DRAFT + 1
        shape = (slots + 1, self._width)
        self._script = torch.full(shape, UNKNOWN, dtype=torch.int32, device=device)
        self._left = torch.zeros(shape, dtype=torch.int32, device=device)
        self._base = torch.arange(slots + 1, device=device) * self._width + 1
        self._behind = torch.arange(MAX_DRAFT, device=device)
        self._known: Sequence[np.ndarray] = ()

    def know(self, completions: Sequence[Completion], right: float, vocabulary: int) -> None:
        """Take the completions of the next call."""
        chance = np.random.default_rng(0)
        known = []
        for completion in completions:
            tokens = np.array(completion.token_ids)
            wrong = chance.random(len(tokens)) >= right
            known.append(np.where(wrong, (tokens + 1) % vocabulary, tokens))
        self._known = known

    def admit(self, arrivals: Sequence[tuple[int, RunningSequence]]) -> None:
        """Take in the text, and the known completion, of sequences that get a slot."""
        super().admit(arrivals)
        if not arrivals:
            return
        scripts = np.full((len(arrivals), self._width), UNKNOWN, dtype=np.int32)
        left = np.zeros_like(scripts)
        for row, (_, sequence) in enumerate(arrivals):
            start, known = len(sequence.prompt), self._known[sequence.index]
            end = start + len(known)
            scripts[row, start:end] = known
            left[row, start:end] = np.minimum(np.arange(len(known), 0, -1), MAX_DRAFT)
        device = self._script.device
        slots = to_device([slot for slot, _ in arrivals], device)
        self._script[slots] = to_device(scripts, device)
        self._left[slots] = to_device(left, device)

    def propose(self, state: DecodeState, rows: Tensor, width: int) -> Drafts:
        """Return the known next tokens of each row, after a look-up in the text."""
        drafts = super().propose(state, rows, width)
        first = (self._base + state.position)[rows]
        tokens = self._script.view(-1)[first[:, None] + self._behind]
        return Drafts(tokens, self._left.view(-1)[first], drafts.sources)


def differences(
    completions: Sequence[Completion], expected: Sequence[Completion]
) -> tuple[int, int]:
    """Return the numbers of tokens and of log-probs that differ from the expected ones."""
    tokens = logprobs = 0
    for one, other in zip(completions, expected, strict=True):
        assert len(one.token_ids) == len(other.token_ids), "completions of other lengths"
        pairs = ((one.token_ids, other.token_ids), (one.logprobs, other.logprobs))
        different = [int((np.array(a) != np.array(b)).sum()) for a, b in pairs]
        tokens, logprobs = tokens + different[0], logprobs + different[1]
    return tokens, logprobs


if __name__ == "__main__":
    main()
