r"""Speculation on one GPU: speed as a function of how many drafts are right, and the bits.

    jetrl bench speculation --shape qwen3-8b --case 1x8x128x1024 --case 8x8x8192x512 \
        --right 0.5 --right 0.6 --right 0.7 --out speculation.json

A case is PROMPTS x SAMPLES x PROMPT TOKENS x RESPONSE TOKENS, and may have a fifth number, the mean
length of responses with a tail (`jetrl.bench._load`). Weights are random, so no text would be a
good draft. The completions are drawn once with speculation off; then drafts are these completions,
every token of which is wrong with the chosen chance. A chance of 0.5, 0.6 and 0.7 to be right
brings 2.0, 2.5 and 3.3 tokens a forward where drafts may be long. Look-ups in text, which a run
pays for, run as well. The mode is `auto`, which chooses the width of each step.

Seconds are of whole calls without the capture of graphs; prompts count. All tokens and log-probs
are compared with those of the call without speculation, as bits.
"""

from __future__ import annotations

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
from jetrl.models.policy import Policy
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.options import GenerateOptions
from jetrl.rollout.sequence import RunningSequence
from jetrl.rollout.speculation import Speculation
from jetrl.types import Completion, SamplingParams


class KnownDrafts(Speculation):
    """Drafts that are known completions, with wrong tokens among them.

    Args:
        slots: The most running sequences.
        max_model_len: The most tokens of a sequence.
        device: The device.
    """

    def __init__(self, slots: int, max_model_len: int, device: torch.device) -> None:
        super().__init__("auto", slots, max_model_len, device)
        # The draft of each position, of each slot's sequence; room for a draft behind the last.
        width = max_model_len + MAX_DRAFT + 1
        shape = (slots + 1, width)
        self._script = torch.full(shape, UNKNOWN, dtype=torch.int32, device=device)
        self._known: Sequence[Sequence[int]] = ()

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
            known.append(np.where(wrong, (tokens + 1) % vocabulary, tokens).tolist())
        self._known = known

    def arrive(self, arrivals: Sequence[tuple[int, RunningSequence]]) -> None:
        """Take in the text, and the known completion, of sequences that get a slot."""
        super().arrive(arrivals)
        for slot, sequence in arrivals:
            start, known = len(sequence.prompt), self._known[sequence.index]
            self._script[slot] = UNKNOWN
            script = torch.tensor(known, dtype=torch.int32)
            self._script[slot, start : start + len(known)] = script.to(self._script.device)

    def propose(self, state: DecodeState, rows: Tensor) -> Drafts:
        """Return the known tokens behind each row's last one, after a look-up in the text."""
        drafts = super().propose(state, rows)
        behind = torch.arange(1, MAX_DRAFT + 1, device=rows.device)
        at = state.position[rows].long()[:, None] + behind
        tokens = self._script[rows].gather(1, at)
        counts = (tokens >= 0).sum(1).int()
        return Drafts(tokens, counts, drafts.sources * 0)


def run_case(policy: Policy, load: Load, shares: Sequence[float]) -> list[Row]:
    """Return a row of the call without speculation, and one for each share of right tokens.

    Args:
        policy: The policy that samples.
        load: The prompts and lengths.
        shares: The chances of a drafted token to be right.
    """
    prompts, count = load.random_prompts(policy.config.vocab_size, 0), load.sequences
    params = SamplingParams(load.samples, load.response_length, ignore_eos=True, seed=1)
    options = GenerateOptions(max_tokens=load.response_lengths())
    pages = count * -(-load.length // 64) + 1
    off = RolloutEngine(policy, count, pages, max_model_len=load.length)
    short = GenerateOptions(max_tokens=[min(n, 20) for n in load.response_lengths()])
    off.generate(prompts, params, options=short)  # what is compiled or captured first
    expected = off.generate(prompts, params, options=options)
    plain = off.stats.seconds - off.stats.capture_s
    rows: list[Row] = [_row(load, "off", None, plain, plain, off, expected, expected)]
    off.free_cache()
    del off
    engine = RolloutEngine(policy, count, pages, max_model_len=load.length)
    drafts = KnownDrafts(count, engine.max_model_len, policy.device)
    engine.use_drafts(drafts)
    for share in shares:
        drafts.know(expected, share, policy.config.vocab_size)
        completions = engine.generate(prompts, params, options=options)
        seconds = engine.stats.seconds - engine.stats.capture_s
        rows.append(_row(load, "auto", share, seconds, plain, engine, completions, expected))
    engine.free_cache()
    return rows


def _row(
    load: Load,
    mode: str,
    right: float | None,
    seconds: float,
    plain: float,
    engine: RolloutEngine,
    completions: Sequence[Completion],
    expected: Sequence[Completion],
) -> Row:
    """Return the row of one call."""
    stats = engine.stats
    drafts = stats.speculation
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
        "speculation": mode,
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
    args = parser.parse_args(argv)
    cases, shares = args.case or ["1x8x128x1024"], args.right or [0.5, 0.6, 0.7]
    policy = make_policy(args.shape, args.plan, args.device, args.layers)
    rows: list[Row] = []
    for case in cases:
        rows += run_case(policy, load_text(case), shares)
        print_table(rows)
    if args.device == "cpu":
        return
    model = {"shape": args.shape, "layers": policy.config.num_layers, "plan": args.plan}
    words = [f"jetrl bench speculation --shape {args.shape} --plan {args.plan}"]
    words += [] if args.layers is None else [f"--layers {args.layers}"]
    words += [f"--case {case}" for case in cases] + [f"--right {share}" for share in shares]
    write_results(args.out, "speculation", " ".join(words), [{**model, **row} for row in rows])


if __name__ == "__main__":
    main()
