"""The clock and the power of a GPU while it decodes: what does its power limit hold back?

    python -m benchmarks.clocks --out FILE.json

For each number of sequences, prompts of 128 tokens and 1,024 drawn under `unified`, after the same
rollout once before, in which graphs are captured. `nvidia-smi` looks at the card twenty times a
second; the first third of its looks is left out, while the card warms. A row has the mean time of a
decode step, the mean clock and its share of the highest, the mean power and the limit, and the
share of looks at which the power limit held the clock down.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Sequence
from statistics import fmean

from benchmarks.harness import Row, command_typed, print_table, write_results
from benchmarks.parity import make_policy

from jetrl.models.families import SHAPES
from jetrl.models.policy import Policy
from jetrl.rollout.engine import RolloutEngine
from jetrl.types import SamplingParams

_FIELDS = "clocks.sm,clocks.max.sm,power.draw.instant,power.limit,clocks_event_reasons.sw_power_cap"
_PROMPT, _RESPONSE = 128, 1024


class Looks:
    """Looks of nvidia-smi at the card, taken while a `with` block runs."""

    def __enter__(self) -> Looks:
        command = ["nvidia-smi", "-i", "0", f"--query-gpu={_FIELDS}", "-lms", "50"]
        self._process = subprocess.Popen(
            [*command, "--format=csv,noheader,nounits"], stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        text, _ = self._process.communicate()
        self.lines = [line for line in text.splitlines() if line.count(",") == 4]

    def row(self) -> Row:
        """Return the means of the last two thirds of the looks."""
        return means(self.lines[len(self.lines) // 3 :])


def means(lines: Sequence[str]) -> Row:
    """Return the means of lines of nvidia-smi."""
    words = [[word.strip() for word in line.split(",")] for line in lines]
    clock, highest, power, limit = (fmean(float(w[i]) for w in words) for i in range(4))
    return {
        "clock_mhz": round(clock),
        "share_of_highest_clock": round(clock / highest, 3),
        "watts": round(power),
        "limit_watts": round(limit),
        "held_by_power": round(fmean(w[4] == "Active" for w in words), 3),
        "looks": len(words),
    }


def decode_row(policy: Policy, sequences: int) -> Row:
    """Return the row of a number of sequences that a policy draws."""
    params = SamplingParams(max_tokens=_RESPONSE, ignore_eos=True, seed=1)
    prompts = [[1 + index] * _PROMPT for index in range(sequences)]
    engine = RolloutEngine(policy, max_batch_size=sequences)
    engine.generate(prompts, params)
    with Looks() as looks:
        engine.generate(prompts, params)
    step_s = (engine.stats.seconds - engine.stats.prefill_s) / (_RESPONSE - 1)
    engine.free_cache()
    return {"sequences": sequences, "decode_ms": round(1e3 * step_s, 3), **looks.row()}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure each number of sequences, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--sequences", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--out", default="build/bench/clocks.json", help="JSON file")
    args = parser.parse_args(argv)
    policy = make_policy(args.shape, "unified", "cuda", None)
    rows: list[Row] = []
    for sequences in args.sequences:
        rows.append({"shape": args.shape, **decode_row(policy, sequences)})
        print_table(rows[-1:])
        write_results(args.out, "clocks", command_typed("python -m benchmarks.clocks", argv), rows)


if __name__ == "__main__":
    main()
