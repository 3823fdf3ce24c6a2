r"""Time one forward of decode that verifies drafts on a GPU, by sequences, rows and context.

    jetrl bench verify --shape qwen3-8b --case 64x2048 --case 256x1024 \
        --width 1x1 --width 2x2 --width 4x2 --out verify.json

A case is SEQUENCES x TOKENS of context. A width is MOST x SHARE: the most tokens of a sequence in a
forward, and the rows of the forward for each sequence; without any, those among which `auto`
chooses. Each case also has a forward without speculation (`off`), one of a token a sequence that
looks no draft up (`1`), and one that does (`1, looked up`).

No prompt runs: pages hold random codes, and every sequence has a page table of its own. Each has a
draft of 7 tokens, so that every row is used, and hardly a draft is right. Times are medians of
replays of the captured graph, the forms of a case in turn; `--profile` adds the microseconds of
each kind of kernel in a replay, where a kernel's waiting for the one before it counts as its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from benchmarks.harness import (
    Row,
    add_shape_arguments,
    bench_parser,
    command_typed,
    print_table,
    totals,
    write_results,
)
from benchmarks.parity import make_policy
from benchmarks.rollout import kind_of
from torch import Tensor

from jetrl.kernels.decode_state import FIRST_QUALITY, MAX_DRAFT, DecodeState, Drafts
from jetrl.models.policy import Policy
from jetrl.rollout.decode import DecodeBuffers, ForwardSize, GraphForwards
from jetrl.rollout.draft_widths import Width, choices
from jetrl.rollout.kv_cache import PagedCache
from jetrl.rollout.sizes import padded_batch
from jetrl.rollout.speculation import Speculation

_PAGE = 64
_ROOM = 512  # Tokens behind a context that replays may write.
_REPLAYS = 7
_PROFILED = 2


class RandomDrafts(Speculation):
    """Drafts of as many random tokens as there may be, after a look-up in the text."""

    def propose(self, state: DecodeState, rows: Tensor, width: int) -> Drafts:
        """Return a draft of MAX_DRAFT tokens for each row."""
        drafts = super().propose(state, rows, width)
        self.text.quality.fill_(FIRST_QUALITY)
        tokens = torch.full_like(drafts.tokens, 17)
        return Drafts(tokens, torch.full_like(drafts.counts, MAX_DRAFT), drafts.sources)


class Forwards:
    """Forwards of decode over random pages, with and without drafts."""

    def __init__(self, policy: Policy, sequences: int, pages: int, longest: int) -> None:
        self._cache = PagedCache(policy.config, policy.plan, pages, _PAGE, policy.device)
        for store in (self._cache._keys, self._cache._values):
            if store.scales is None:
                store.codes.normal_()
            else:
                # Codes of any format without the largest ones, which may stand for no number.
                store.codes.view(torch.uint8).random_(0, 112)
                store.scales.fill_(0.02)
        self._pages, self._table = pages, longest // _PAGE + 1
        drafts = RandomDrafts("auto", sequences, longest, policy.device)
        self._made = {}
        for with_drafts in (False, True):
            sizes = (sequences, 16, self._table, policy.device, with_drafts)
            buffers = DecodeBuffers.empty(*sizes)
            graphs = GraphForwards(policy, self._cache, buffers, drafts if with_drafts else None)
            self._made[with_drafts] = buffers, graphs

    def time(
        self, sequences: int, context: int, widths: Sequence[Width | None], profiled: bool
    ) -> list[Row]:
        """Return a row for each form of a forward.

        Args:
            widths: What forwards verify; None for a forward without speculation.
        """
        sizes = [ForwardSize(sequences, context + _ROOM, False, width) for width in widths]
        for size in sizes:
            self._made[size.verify is not None][1].prepare(size)
        times: list[list[float]] = [[] for _ in sizes]
        for _ in range(_REPLAYS):
            for size, taken in zip(sizes, times, strict=True):
                self._place(size, context)
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                self._run(size)
                end.record()
                end.synchronize()
                taken.append(begin.elapsed_time(end))
        rows = []
        for size, taken in zip(sizes, times, strict=True):
            row: Row = {"sequences": sequences, "context": context, **_form(size)}
            row["ms"] = round(statistics.median(taken), 3)
            if profiled:
                self._place(size, context)
                row["us"] = self._profile(size)
            rows.append(row)
        return rows

    def _place(self, size: ForwardSize, context: int) -> None:
        """Let the first slots run at the context, with pages of their own."""
        buffers, _ = self._made[size.verify is not None]
        state, count = buffers.state, size.rows
        state.active.zero_()
        state.active[:count] = 1
        state.position[:count] = context
        state.limit[:count] = context + _ROOM
        state.token[:count] = 1
        state.key[:count] = torch.arange(count, device=state.key.device)
        used = -(-(context + _ROOM) // _PAGE)
        pages = torch.arange(count * used, device=state.tables.device) * 7919 % self._pages
        state.tables[:count, :used] = pages.view(count, used).int()
        buffers.rows.fill_(buffers.idle_slot)
        buffers.rows[:count] = torch.arange(count, device=buffers.rows.device)
        torch.index_select(state.tables, 0, buffers.rows, out=buffers.tables)
        buffers.out.count.zero_()
        torch.cuda.synchronize()

    def _run(self, size: ForwardSize) -> None:
        self._made[size.verify is not None][1].run(size)

    def _profile(self, size: ForwardSize) -> dict[str, float]:
        """Return the microseconds of each kind of kernel in a forward."""
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(_PROFILED):
                self._run(size)
            torch.cuda.synchronize()
        times, _ = totals(list(profiler.events() or []), verify_kind)
        kinds = {name[2:]: us for name, us in times.items() if name.startswith("= ")}
        return {k: round(us / _PROFILED, 1) for k, us in sorted(kinds.items())}


def verify_kind(kernel: str) -> str:
    """Return the kind of a kernel of a forward that may verify drafts."""
    kinds = {
        "_propose_kernel": "look-up of drafts",
        "_verify_inputs_kernel": "inputs of drafts",
        "_take_verified_kernel": "what was drawn, verified",
    }
    return next((kind for name, kind in kinds.items() if name in kernel), kind_of(kernel))


def _form(size: ForwardSize) -> Row:
    """Return the columns that say what a forward verifies."""
    width = size.verify
    if width is None:
        return {"form": "off", "rows": padded_batch(size.rows)}
    form = str(width.most) if width.most > 1 or not width.drafts else "1, looked up"
    return {"form": form, "rows": width.rows}


def forms(sequences: int, widths: Sequence[str] | None) -> list[Width | None]:
    """Return the forms of a case: off, one token with and without a look-up, and widths.

    Args:
        widths: MOST x SHARE of each; None for those among which `auto` chooses.
    """
    size = padded_batch(sequences)
    found = choices(size)
    if widths is not None:
        pairs = [width.split("x") for width in widths]
        found = [(int(most), min(int(size * float(s)), size * int(most))) for most, s in pairs]
    several = [Width(most, rows, True) for most, rows in found if most > 1]
    return [None, Width(1, size, False), Width(1, size, True), *several]


def main(argv: Sequence[str] | None = None) -> None:
    """Run `jetrl bench verify`."""
    parser = bench_parser("verify", __doc__)
    add_shape_arguments(parser)
    parser.add_argument("--plan", default="unified", help="default: unified")
    parser.add_argument(
        "--case", action="append", help="SEQUENCESxTOKENS, repeatable; default: 64x2048"
    )
    parser.add_argument("--width", action="append", help="MOSTxSHARE, repeatable")
    parser.add_argument("--profile", action="store_true", help="time by kind of kernel too")
    parser.add_argument("--out", default="build/bench/verify.json", type=Path, help="JSON file")
    args = parser.parse_args(argv)
    cases = [tuple(map(int, case.split("x"))) for case in args.case or ["64x2048"]]
    policy = make_policy(args.shape, args.plan, "cuda", args.layers)
    pages = max(count * -(-(context + _ROOM) // _PAGE) for count, context in cases)
    longest = max(context for _, context in cases) + _ROOM
    forwards = Forwards(policy, max(count for count, _ in cases), pages, longest)
    rows: list[Row] = []
    for count, context in cases:
        rows += forwards.time(count, context, forms(count, args.width), args.profile)
        print_table([{k: v for k, v in row.items() if k != "us"} for row in rows])
    command = command_typed("jetrl bench verify", argv)
    model = {"shape": args.shape, "layers": policy.config.num_layers, "plan": args.plan}
    write_results(args.out, "verify", command, [{**model, **row} for row in rows])


if __name__ == "__main__":
    main()
