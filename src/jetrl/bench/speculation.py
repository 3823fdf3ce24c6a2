r"""Speculation on one GPU: speed as a function of how many drafts are right, and the bits.

    jetrl bench speculation --shape qwen3-8b --case 1x8x128x1024 --case 8x8x8192x512 \
        --right 0.5 --right 0.6 --right 0.7 --out speculation.json

A case is PROMPTS x SAMPLES x PROMPT TOKENS x RESPONSE TOKENS, and may have a fifth number, the mean
length of responses with a tail (`jetrl.bench._load`). Weights are random, so no text would be a
good draft. The completions are drawn once with speculation off; then drafts are these completions,
every token of which is wrong with the chosen chance. A chance of 0.5, 0.6 and 0.7 to be right
brings 2.0, 2.5 and 3.3 tokens a forward where drafts may be long. Look-ups in text, which a run
pays for, run as well, and with `--head` the guesses of a draft head. The mode is `auto`, which
chooses the width of each step.

Seconds are of whole calls without the capture of graphs; prompts count. Calls with speculation off
take turns with the others, and their median is what a speed-up refers to. All tokens and log-probs
are compared with those of the call without speculation, as bits.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from jetrl.bench._load import Load, load_text
from jetrl.bench._timing import Row, add_shape_arguments, bench_parser, print_table, write_results
from jetrl.bench.parity import make_policy
from jetrl.kernels.decode_state import DecodeState
from jetrl.kernels.draft_state import MAX_DRAFT, UNKNOWN, Drafts
from jetrl.models.draft_head import DraftHead
from jetrl.models.policy import Policy
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.launched_step import to_device
from jetrl.rollout.options import GenerateOptions
from jetrl.rollout.progress import RolloutStats
from jetrl.rollout.sequence import RunningSequence
from jetrl.rollout.speculation import Speculation
from jetrl.types import Completion, SamplingParams


class KnownDrafts(Speculation):
    """Drafts that are known completions, with wrong tokens among them.

    Args:
        slots: The most running sequences.
        max_model_len: The most tokens of a sequence.
        device: The device.
        head: A draft head, whose guesses are made as well and thrown away.
    """

    def __init__(
        self, slots: int, max_model_len: int, device: torch.device, head: DraftHead | None = None
    ) -> None:
        super().__init__("auto", slots, max_model_len, device, head)
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
        """Take the completions of the next call.

        Args:
            completions: The completions, in the order of the call's sequences.
            right: The chance of a token of a draft to be the completion's.
            vocabulary: The number of tokens that a wrong one is drawn from.
        """
        chance = np.random.default_rng(0)
        known = []
        for completion in completions:
            tokens = np.array(completion.token_ids)
            wrong = chance.random(len(tokens)) >= right
            known.append(np.where(wrong, (tokens + 1) % vocabulary, tokens))
        self._known = known

    def arrive(self, arrivals: Sequence[tuple[int, RunningSequence]]) -> None:
        """Take in the text, and the known completion, of sequences that get a slot."""
        super().arrive(arrivals)
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
        """Return the known tokens behind each row's last one, after a look-up in the text."""
        drafts = super().propose(state, rows, width)
        first = (self._base + state.position)[rows]
        tokens = self._script.view(-1)[first[:, None] + self._behind]
        return Drafts(tokens, self._left.view(-1)[first], drafts.sources)


def run_case(
    policy: Policy, load: Load, shares: Sequence[float], head: DraftHead | None = None
) -> list[Row]:
    """Return a row of the call without speculation, and one for each share of right tokens.

    Args:
        policy: The policy that samples.
        load: The prompts and lengths.
        shares: The chances of a drafted token to be right.
        head: A draft head that is asked as well; None: without.
    """
    prompts, count = load.random_prompts(policy.config.vocab_size, 0), load.sequences
    params = SamplingParams(load.samples, load.response_length, ignore_eos=True, seed=1)
    options = GenerateOptions(max_tokens=load.response_lengths())
    pages = count * -(-load.length // 64) + 1
    off = RolloutEngine(policy, count, pages, max_model_len=load.length)
    short = GenerateOptions(max_tokens=[min(n, 20) for n in load.response_lengths()])
    off.generate(prompts, params, options=short)  # what is compiled or captured first
    expected = off.generate(prompts, params, options=options)
    calls = [off.stats]
    engine = RolloutEngine(policy, count, pages, max_model_len=load.length)
    drafts = KnownDrafts(count, engine.max_model_len, policy.device, head)
    engine.use_drafts(drafts)
    compared: list[tuple[float | None, RolloutStats, list[Completion]]] = []
    for share in shares:
        drafts.know(expected, share, policy.config.vocab_size)
        completions = engine.generate(prompts, params, options=options)
        compared.append((share, engine.stats, completions))
        # In turn: a card that is warm, or at its power limit, is slower.
        off.generate(prompts, params, options=options)
        calls.append(off.stats)
    plain = statistics.median(stats.seconds - stats.capture_s for stats in calls)
    middle = min(calls, key=lambda stats: abs(stats.seconds - stats.capture_s - plain))
    compared.insert(0, (None, middle, expected))
    off.free_cache()
    engine.free_cache()
    return [_row(load, *one, plain, expected) for one in compared]


def _row(
    load: Load,
    right: float | None,
    stats: RolloutStats,
    completions: Sequence[Completion],
    plain: float,
    expected: Sequence[Completion],
) -> Row:
    """Return the row of one call.

    Args:
        load: The load.
        right: The chance of a drafted token to be right; None with speculation off.
        stats: The counts of the call.
        completions: Its completions.
        plain: The seconds of a call with speculation off.
        expected: The completions of that.
    """
    drafts, seconds = stats.speculation, stats.seconds - stats.capture_s
    tokens = logprobs = 0
    for one, other in zip(completions, expected, strict=True):
        assert len(one.token_ids) == len(other.token_ids), "completions of other lengths"
        pairs = (
            (np.array(x), np.array(y))
            for x, y in ((one.token_ids, other.token_ids), (one.logprobs, other.logprobs))
        )
        different = [int((a != b).sum()) for a, b in pairs]
        tokens, logprobs = tokens + different[0], logprobs + different[1]
    return {
        "load": str(load),
        "speculation": "off" if right is None else "auto",
        "right": right,
        "seconds": round(seconds, 3),
        "speed_up": round(plain / seconds, 3),
        "tokens_per_forward": 1.0 if drafts is None else round(drafts.tokens_per_forward, 3),
        "forwards": stats.forwards,
        "verify_share": 0.0 if drafts is None else round(drafts.verify_s / drafts.decode_s, 3),
        "tokens": stats.tokens_drawn,
        "different_tokens": tokens,
        "different_logprobs": logprobs,
        "graphs": stats.graphs,
        "capture_s": round(stats.capture_s, 2),
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
    parser.add_argument(
        "--right", type=float, action="append", help="repeatable; default: 0.5, 0.6 and 0.7"
    )
    parser.add_argument(
        "--out", default="build/bench/speculation.json", type=Path, help="JSON file"
    )
    parser.add_argument("--head", action="store_true", help="ask a draft head of 3 tokens as well")
    args = parser.parse_args(argv)
    cases, shares = args.case or ["1x8x128x1024"], args.right or [0.5, 0.6, 0.7]
    policy = make_policy(args.shape, args.plan, args.device, args.layers)
    head = DraftHead(policy, 3, 0) if args.head else None
    if head is not None:
        head.trained = True
    rows: list[Row] = []
    for case in cases:
        rows += run_case(policy, load_text(case), shares, head)
        print_table(rows)
    if args.device == "cpu":
        return
    model = {"shape": args.shape, "layers": policy.config.num_layers, "plan": args.plan}
    model |= {"draft_head": True} if args.head else {}
    words = [f"jetrl bench speculation --shape {args.shape} --plan {args.plan}"]
    words += [] if args.layers is None else [f"--layers {args.layers}"]
    words += ["--head"] if args.head else []
    words += [f"--case {case}" for case in cases] + [f"--right {share}" for share in shares]
    write_results(args.out, "speculation", " ".join(words), [{**model, **row} for row in rows])


if __name__ == "__main__":
    main()
