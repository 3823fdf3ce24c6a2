r"""The draft head on one GPU: what its guesses cost in decode, and its training in an update.

    jetrl bench draft_head --shape qwen3-8b --out draft_head.json

Guesses are timed as decode makes them, in a CUDA graph: one to three tokens, for so many sequences,
with the hidden states that are kept for the next forward. Beside them stands the output head's own
product of as many rows, a part of every forward. One update of training is timed as a run makes it,
on 1,024 tokens and three guesses deep. None of it needs the layers of the policy, so the model has
one layer; weights are random.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from benchmarks.harness import (
    Row,
    add_shape_arguments,
    bench_parser,
    command_typed,
    print_table,
    seconds_per_call,
    write_results,
)
from benchmarks.parity import make_policy

from jetrl.kernels.decode_state import DecodeState
from jetrl.models.draft_head import DraftHead
from jetrl.models.policy import Policy
from jetrl.rollout.speculation import HeadDrafts
from jetrl.settings.loading import Settings
from jetrl.settings.presets import DEFAULT_PRESET
from jetrl.training.extras.draft_head import DraftHeadTraining
from jetrl.training.micro_batches import MicroBatch
from jetrl.types import Batch

_TOKENS = 3


def _seconds(call: Callable[[], object]) -> float:
    """Return the seconds of a call: in a CUDA graph, or of one plain call on a CPU."""
    if torch.cuda.is_available():
        return seconds_per_call([call] * 4)
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def decode_rows(policy: Policy, head: DraftHead, counts: Sequence[int]) -> list[Row]:
    """Return a row for each number of sequences."""
    rows: list[Row] = []
    for count in counts:
        drafts = HeadDrafts(head, count)
        drafts.begin()
        state = DecodeState.empty(count, 4, policy.device)
        slots = torch.arange(count, device=policy.device)
        size = (count, policy.config.hidden_size)
        hidden = torch.randn(size, device=policy.device).to(policy.weights.dtype)
        row: Row = {"part": "decode", "sequences": count}
        for tokens in range(1, _TOKENS + 1):
            propose = partial(drafts.propose, state, slots, tokens, None)
            row[f"microseconds_{tokens}"] = round(_seconds(propose) * 1e6, 1)
        row["output_head_microseconds"] = round(
            _seconds(partial(policy.rollout_logits, hidden)) * 1e6, 1
        )
        rows.append(row)
    return rows


def training_row(policy: Policy, head: DraftHead, tokens: int, updates: int) -> Row:
    """Return the row of the training of a step."""
    settings = Settings.model_validate(
        {"draft_head": {"share": 1.0, "tokens_per_update": -(-tokens // updates)}}
    )
    training = DraftHeadTraining(head, settings)
    length = tokens + 2
    ids = np.random.default_rng(0).integers(0, policy.config.vocab_size, length)
    zeros = np.zeros(length, dtype=np.float32)
    mask = np.arange(length) > 0
    batch = Batch(ids, np.array([0, length]), mask, zeros, zeros, np.array([0]))
    size = (length - 1, policy.config.hidden_size)
    hidden = torch.randn(size, device=policy.device).to(policy.weights.dtype)
    times = []
    for step in range(3):  # the first one makes the moments
        training.choose(step, [MicroBatch(batch)])
        copy = training.observer(batch)
        assert copy is not None, "there is something to learn from"
        copy(hidden)
        times.append(training.after_forward()["timing/draft_head_s"])
    return {
        "part": "training",
        "tokens": tokens,
        "updates": updates,
        "milliseconds": round(min(times) * 1e3, 2),
        "microseconds_a_token": round(min(times) * 1e6 / tokens, 2),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run `jetrl bench draft_head`."""
    parser = bench_parser("draft_head", __doc__)
    add_shape_arguments(parser)
    parser.add_argument("--plan", default=DEFAULT_PRESET, help=f"default: {DEFAULT_PRESET}")
    parser.add_argument("--device", default="cuda", help="cpu: to try it out, nothing is written")
    parser.add_argument("--sequences", type=int, action="append", help="repeatable; 8 16 32 64")
    parser.add_argument("--updates", type=int, default=16, help="updates of a step, of 1,024 each")
    parser.add_argument("--out", default="build/bench/draft_head.json", type=Path, help="JSON file")
    args = parser.parse_args(argv)
    policy = make_policy(args.shape, args.plan, args.device, args.layers or 1)
    head = DraftHead(policy, _TOKENS, 0)
    head.trained = True
    rows = decode_rows(policy, head, args.sequences or [8, 16, 32, 64])
    rows.append(training_row(policy, head, 1024 * args.updates, args.updates))
    print_table(rows)
    if args.device == "cpu":
        return
    command = command_typed("jetrl bench draft_head", argv)
    facts = {"shape": args.shape, "plan": args.plan, "known_tokens": len(head.known)}
    write_results(args.out, "draft_head", command, [{**facts, **row} for row in rows])


if __name__ == "__main__":
    main()
