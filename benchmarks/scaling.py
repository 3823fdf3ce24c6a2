"""How a step grows with the number of GPUs, simulated from rates that were measured on few.

    python -m benchmarks.scaling --out benchmarks/results/cpu/scaling.json \
        --plot docs/images/scaling.png

Nothing here runs on a GPU. Times of decode, prefill and training are those of `int8` on one H200,
read from `benchmarks/results/h200`. The exchange of gradients adds what it added to an update of
`unified` on two; to one of `int8` it added nothing measurable. The host's work is read from
`benchmarks/results/cpu/host_work.json`. Of the links between four cards of one host, `MEASURED` has
what was measured; `ASSUMED` has what was not: machines of eight GPUs, 50 GB/s a GPU between these,
latencies. The rollout is simulated sequence by sequence, with lengths drawn from one distribution;
the rest is arithmetic. A simulation of one GPU is compared with the measured rollout of the same
lengths.

The parts of a step:

    rollout     the slowest rank's: all others wait for it
    samples     every rank gets all completions, and packs them, on the host
    update      forward and backward of the micro-batches, in rounds of one a rank
    exchange    what the exchange of products adds to the update
    optimizer   AdamW on own rows
    refresh     quantized weights to all ranks
    decisions   what ranks agree on, over gloo

and the layouts:

    shards over all   as jetrl is: a row of a master weight has one owner, who gets the products of
                      every micro-batch
    shards in a node  a mesh (replicate x shard): products stay in the machine, and FP32 sums go to
                      the owners once an update. Micro-batches are summed in groups, so the bits are
                      those of any number of GPUs that keeps the groups, not those of today
    and own tokens    the mesh, and tokens go only to the rank that trains on them: all ranks get
                      the lengths and rewards of all completions
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.harness import tailed_load, write_results

from jetrl.errors import UserError

RESULTS = Path(__file__).parent / "results" / "h200"
PLAN = "int8"
COUNTS = (1, 8, 64, 1024)
NODE = 8
LAYOUTS = ("shards over all", "shards in a node", "and own tokens")
# Four H200s of one host, NCCL 2.28.9 without multicast, 2026-11-22.
MEASURED = {
    "all_to_all_gb_per_s": {"33 MiB": 170, "201 MiB": 267, "524 MiB": 325, "1024 MiB": 333},
    "all_gather_gb_per_s": {"33 MiB": 226, "201 MiB": 291, "524 MiB": 316, "1024 MiB": 325},
}
ASSUMED = {
    "gb_per_s_between_nodes": 50.0,
    "us_a_message_between_nodes": 5.0,
    "host_us_of_a_length": 3.0,
    "bytes_of_a_sampled_token": 8.0,
    "host_gb_per_s_between_nodes": 2.0,
    "us_a_rank_of_a_decision": 20.0,
    "decisions_of_an_update": 6.0,
    "share_of_backward_in_an_update": 0.69,
}
PROMPT, SAMPLES, MEAN, LONGEST, SIGMA = 256, 8, 1500, 8192, 0.8
MICRO_BATCH = 11520


@dataclass(frozen=True)
class Model:
    """The sizes and rates of a model on one GPU.

    Attributes:
        linears: Elements of the four matrices of a layer, together.
        decode: Seconds of a decode step: a constant, a sequence's, and a token's of context.
        training: Seconds of a trained token: a constant, and a token's of its sequence.
    """

    name: str
    layers: int
    linears: int
    vocabulary: int
    decode: tuple[float, float, float]
    prefill: float
    training: tuple[float, float]
    optimizer: float
    micro_batch: int

    @property
    def parameters(self) -> int:
        """Elements of all matrices."""
        return self.layers * self.linears + 2 * self.vocabulary

    def update_s(self, tokens: float, squares: float) -> float:
        """Return the seconds of forward and backward on one GPU."""
        return self.training[0] * tokens + self.training[1] * squares


def rows(name: str, plan: str = PLAN) -> list[dict[str, Any]]:
    """Return the rows of a plan in a file of measured results; there is at least one."""
    content = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    found = [row for row in content["rows"] if row["plan"] == plan]
    if not found:
        raise UserError(f"{RESULTS / name}.json has no row of the plan {plan}")
    return found


def measured_8b() -> Model:
    """Return Qwen3-8B under `PLAN`, with rates fitted to the measured files."""
    cases = rows("rollout_8b")
    factors, times = [], []
    for case in cases:
        context = case["sequences"] * (case["prompt"] + case["response"] / 2)
        times.append(case["decode_ms"] / 1e3)
        factors.append([1.0, case["sequences"], context])
    relative = np.array(factors) / np.array(times)[:, None]
    decode = np.linalg.lstsq(relative, np.ones(len(times)), rcond=None)[0]
    short, long = rows("step_2048")[0], rows("step_8192")[0]
    per_token = [1 / row["tokens_per_s"]["update"] for row in (short, long)]
    slope = (per_token[1] - per_token[0]) / (8448 - 2304)
    return Model(
        name="Qwen3-8B",
        layers=36,
        linears=4096 * (6144 + 4096 + 3 * 12288),
        vocabulary=151936 * 4096,
        decode=(float(decode[0]), float(decode[1]), float(decode[2])),
        prefill=cases[0]["prefill_tokens_per_s"],
        training=(per_token[0] - slope * 2304, slope),
        optimizer=short["seconds"]["optimizer"],
        micro_batch=MICRO_BATCH,
    )


def scaled_32b(base: Model) -> Model:
    """Return Qwen3-32B: rates of the 8B model, scaled by its sizes, layers recomputed."""
    linears = 5120 * (10240 + 8192 + 3 * 25600)
    times = 64 * linears / (base.layers * base.linears)
    attention = 64 * 64 / (36 * 32)  # layers x query heads
    decode, training = base.decode, base.training
    return Model(
        name="Qwen3-32B",
        layers=64,
        linears=linears,
        vocabulary=151936 * 5120,
        decode=(decode[0] * times, decode[1] * times, decode[2] * 64 / 36),
        prefill=base.prefill / times,
        training=(training[0] * times * 4 / 3, training[1] * attention * 4 / 3),
        optimizer=base.optimizer * times,
        micro_batch=9216,
    )


# Lengths and rollouts


def tail(count: int, seed: int) -> np.ndarray:
    """Return log-normal lengths, those of `jetrl bench rollout --load grpo` by distribution."""
    center = np.log(MEAN) - SIGMA**2 / 2
    drawn = np.exp(np.random.default_rng(seed).normal(center, SIGMA, count))
    return np.clip(drawn.round(), 1, LONGEST).astype(np.int64)


def dealt(lengths: np.ndarray, ranks: int) -> np.ndarray:
    """Return the lengths of each rank [R, S]: prompt after prompt to the next rank."""
    groups = lengths.reshape(-1, SAMPLES)
    each = -(-len(groups) // ranks)
    padded = np.zeros((each * ranks, SAMPLES), dtype=np.int64)
    padded[: len(groups)] = groups
    return padded.reshape(each, ranks, SAMPLES).swapaxes(0, 1).reshape(ranks, -1)


def rollout_s(model: Model, remaining: np.ndarray, context: np.ndarray, quota: int = 0) -> Any:
    """Return the seconds of each rank until its sequences end, and what is left of them.

    All sequences of a rank run together, so its time has a closed form between two ends.

    Args:
        remaining: Tokens that each sequence has yet to draw [R, S]; those of a prompt are adjacent.
        context: Tokens that each sequence has [R, S].
        quota: Complete prompts with which a rank stops; 0: it draws all.
    """
    floor, sequence, token = model.decode
    remaining, context = remaining.copy(), context.copy()
    seconds = np.zeros(len(remaining))
    while True:
        active = remaining > 0
        running = active.any(axis=1)
        if quota:
            complete = (~active).reshape(len(active), -1, SAMPLES).all(axis=2).sum(axis=1)
            running &= complete < quota
        if not running.any():
            return seconds, remaining, context
        steps = np.where(active, remaining, LONGEST + 1).min(axis=1) * running
        count = active.sum(axis=1)
        tokens = (context * active).sum(axis=1)
        seconds += steps * (floor + sequence * count + token * tokens)
        seconds += token * count * steps * (steps - 1) / 2
        move = np.where(active, steps[:, None], 0)
        remaining -= move
        context += move


def whole_rollout_s(model: Model, lengths: np.ndarray, ranks: int) -> float:
    """Return the seconds of the slowest rank, prompts included."""
    own = dealt(lengths, ranks)
    prompts = own.shape[1] / SAMPLES * PROMPT / model.prefill
    return float(rollout_s(model, own, np.full_like(own, PROMPT))[0].max() + prompts)


def partial_rollout_s(model: Model, ranks: int, prompts: int, oversample: float = 0.25) -> float:
    """Return the mean seconds of a step in which each rank stops at its quota of prompts.

    What is cut off goes on in the next step. The first two steps are left out.
    """
    width, times = round(prompts * (1 + oversample)) * SAMPLES, []
    remaining = tail(ranks * width, 1).reshape(ranks, width)
    context = np.full_like(remaining, PROMPT)
    for step in range(5):
        seconds, remaining, context = rollout_s(model, remaining, context, prompts)
        times.append(float(seconds.max() + prompts * PROMPT / model.prefill))
        done = (remaining == 0).reshape(ranks, -1, SAMPLES).all(axis=2).repeat(SAMPLES, axis=1)
        fresh = tail(ranks * width, 2 + step).reshape(ranks, width)
        remaining, context = np.where(done, fresh, remaining), np.where(done, PROMPT, context)
    return float(np.mean(times[2:]))


# The rest of a step


def link(kind: str) -> tuple[float, float]:
    """Return latency in seconds and bytes a second of a collective, fitted to what was measured."""
    sizes = np.array([float(name.split()[0]) * 2**20 for name in MEASURED[kind]])
    seconds = sizes / (np.array(list(MEASURED[kind].values())) * 1e9)
    slope, latency = np.polyfit(sizes, seconds, 1)
    return float(latency), float(1 / slope)


def exchange_s(model: Model, ranks: int, compute_s: float) -> float:
    """Return the seconds that the exchange of one round adds to forward and backward."""
    if ranks == 1:
        return 0.0
    sent = (2 * model.layers * model.linears + 4 * model.vocabulary) * (ranks - 1) / ranks
    beside = exchange_ms_of_a_gb() / 1e3 * sent / 1e9
    nodes = -(-ranks // NODE)
    far = sent * (nodes - 1) / nodes / (ASSUMED["gb_per_s_between_nodes"] * 1e9)
    messages = (4 * model.layers + 5) * (ranks - min(ranks, NODE))
    far += messages * ASSUMED["us_a_message_between_nodes"] / 1e6
    backward = compute_s * ASSUMED["share_of_backward_in_an_update"]
    return beside + max(0.0, far - backward)


def exchange_ms_of_a_gb() -> float:
    """Return what an update grows by for each GB that a rank sends, as two H200s measured it."""
    [row] = rows("step_2_cards", "unified")
    found = row["exchange"]
    longer = (found["update_s"] - found["update_without_s"]) / found["rounds"]
    return float(1e3 * longer / found["gb_sent_a_round"])


def host_work() -> dict[str, float]:
    """Return the microseconds of a CPU core for a token: an own one, and one of any rank."""
    content = json.loads((RESULTS.parent / "cpu" / "host_work.json").read_text(encoding="utf-8"))
    return {name: content[name] for name in ("us_of_own_token", "us_of_each_token")}


def refresh_s(model: Model, ranks: int) -> float:
    """Return the seconds until every rank has the quantized weights of all."""
    if ranks == 1:
        return 0.014
    size = model.layers * model.linears + 4 * model.vocabulary  # FP8; embedding and head in BF16
    latency, rate = link("all_gather_gb_per_s")
    nodes = -(-ranks // NODE)
    far = size * (nodes - 1) / nodes / NODE / (ASSUMED["gb_per_s_between_nodes"] * 1e9)
    return 4 * model.layers * latency / 4 + size / rate + far


def step(
    model: Model, lengths: np.ndarray, ranks: int, layout: str = "", sampled_s: float = 0.0
) -> dict[str, float]:
    """Return the seconds of a step by part."""
    tokens = float(lengths.sum() + PROMPT * len(lengths))
    squares = float(((lengths + PROMPT) ** 2).sum())
    batches = int(np.ceil(tokens / model.micro_batch))
    rounds = -(-batches // ranks)
    one_s = model.update_s(tokens, squares) / batches
    mesh, own_tokens = layout in LAYOUTS[1:], layout == LAYOUTS[2]
    within = min(ranks, NODE) if mesh else ranks
    exchange = rounds * exchange_s(model, within, one_s)
    if mesh and ranks > NODE:  # FP32 sums of the node's rows, to their owners, once
        exchange += 4 * model.parameters / NODE / (ASSUMED["gb_per_s_between_nodes"] * 1e9)
    seen = tokens / ranks if own_tokens else tokens
    work = host_work()
    host = work["us_of_each_token"] * seen + work["us_of_own_token"] * tokens / ranks
    host += ASSUMED["host_us_of_a_length"] * len(lengths) * own_tokens
    sent = ASSUMED["bytes_of_a_sampled_token"] * seen
    decisions = ASSUMED["decisions_of_an_update"] + rounds
    return {
        "rollout": sampled_s or whole_rollout_s(model, lengths, ranks),
        "samples": host / 1e6 * (ranks > 1)
        + sent / (ASSUMED["host_gb_per_s_between_nodes"] * 1e9) * (ranks > NODE),
        "update": rounds * one_s,
        "exchange": exchange,
        "optimizer": model.optimizer / ranks,
        "refresh": refresh_s(model, ranks),
        "decisions": decisions * (ranks - 1) * ASSUMED["us_a_rank_of_a_decision"] / 1e6,
    }


def row_of(
    model: Model, load: str, layout: str, ranks: int, parts: dict[str, float], speed: float
) -> dict[str, Any]:
    """Return a row of the results."""
    shown = {name: float(f"{seconds:.3g}") for name, seconds in parts.items()}
    return {
        "model": model.name,
        "load": load,
        "layout": layout,
        "gpus": ranks,
        "seconds": shown,
        "step_s": float(f"{sum(parts.values()):.4g}"),
        "speed": float(f"{speed:.4g}"),
    }


def simulate(model: Model, counts: Sequence[int]) -> list[dict[str, Any]]:
    """Return rows of loads, layouts and numbers of GPUs, the first number the one compared with."""
    results = []

    def add(load: str, lengths_of: Any, oversample: bool = False) -> None:
        base = 0.0
        for ranks in counts:
            lengths = lengths_of(ranks)
            cut = partial_rollout_s(model, ranks, 64) if oversample else 0.0
            sampled = cut or whole_rollout_s(model, lengths, ranks)
            for layout in LAYOUTS if ranks > NODE else LAYOUTS[:1]:
                parts = step(model, lengths, ranks, layout, sampled)
                rate = lengths.sum() / sum(parts.values())
                base = base or rate / ranks
                results.append(row_of(model, load, layout, ranks, parts, rate / base))

    add("2,048 tokens, 256 completions a GPU", lambda r: np.full(256 * r, 2048))
    add("long tail, 512 completions a GPU", lambda r: tail(512 * r, 0))
    add("the same, partial rollouts (0.25)", lambda r: tail(512 * r, 0), oversample=True)
    add("long tail, 8,192 completions in all", lambda r: tail(8192, 0))
    return results


def check(model: Model) -> dict[str, float]:
    """Return the simulated and the measured seconds of one GPU on the same lengths."""
    load, _, lengths = tailed_load("tail", vocabulary=151936)
    [measured] = rows("rollout_tail")
    assert sum(lengths) == measured["tokens"], "not the lengths of the benchmark"
    assert (load.prompt_length, load.samples) == (PROMPT, SAMPLES)
    simulated = whole_rollout_s(model, np.array(lengths, dtype=np.int64), 1)
    return {
        "rollout_s_simulated": round(simulated, 1),
        "rollout_s_measured": measured["seconds"],
        "ratio": round(simulated / measured["seconds"], 3),
    }


def plot(results: Sequence[dict[str, Any]], out: Path) -> None:
    """Draw the share of linear growth by load, and the parts of a step, as a PNG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from jetrl.runs.plots import COLORS, STYLE

    own = [row for row in results if row["model"] == "Qwen3-8B"]
    loads = list(dict.fromkeys(row["load"] for row in own))
    colors = [COLORS[n] for n in ("blue", "amber", "violet", "red", "green", "slate", "pink")]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.5, 4.4), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
        for load, color in zip(loads, colors, strict=False):
            for layout, style in zip(LAYOUTS, ("-", ":", "--"), strict=True):
                line = [r for r in own if (r["load"], r["layout"]) == (load, layout)]
                shares = [100 * r["speed"] / r["gpus"] for r in line]
                label = load if style == "-" else None
                left.plot([r["gpus"] for r in line], shares, style, color=color, label=label)
        left.set_xscale("log", base=2)
        left.set_xticks(COUNTS, [f"{count:,}" for count in COUNTS])
        left.set_ylim(0, 105)
        left.set_xlabel("GPUs (dotted: shards in a node; dashed: and own tokens)")
        left.set_ylabel("% of linear growth")
        left.legend(fontsize=7.5, loc="lower left")
        bars = [r for r in own if r["load"] == loads[1]]
        for place, row in enumerate(bars):
            start = 0.0
            for (part, seconds), color in zip(row["seconds"].items(), colors, strict=False):
                label = part if not place else None
                right.barh(place, seconds, 0.62, start, color=color, label=label)
                start += seconds
            right.text(start, place, f" {row['step_s']:.0f} s", va="center", fontsize=9)
        right.set_yticks(
            range(len(bars)), [f"{r['gpus']:,}, {r['layout']}" for r in bars], fontsize=9
        )
        right.invert_yaxis()
        right.set_xlabel(f"seconds of a step: {loads[1]}")
        right.margins(x=0.12)
        right.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.16))
        figure.savefig(out, dpi=130, metadata={"Software": None})


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate, print a table, and write JSON and picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--plot", type=Path, help="PNG file")
    args = parser.parse_args(argv)
    small = measured_8b()
    large = scaled_32b(small)
    results = simulate(small, COUNTS) + simulate(large, (4, *COUNTS[1:]))
    for row in results:
        line = " ".join(f"{name} {seconds:g}" for name, seconds in row["seconds"].items())
        print(
            f"{row['model']:9} {row['load']:36} {row['layout']:16} {row['gpus']:5} "
            f"step {row['step_s']:7.1f} s, x{row['speed']:7.2f}: {line}"
        )
    rates = {
        model.name: {
            "decode_ms": [float(f"{1e3 * number:.4g}") for number in model.decode],
            "training_us_a_token": [float(f"{1e6 * number:.4g}") for number in model.training],
        }
        for model in (small, large)
    }
    content = {
        "measured": {
            **MEASURED,
            "exchange_ms_of_a_gb": float(f"{exchange_ms_of_a_gb():.4g}"),
            **{f"host_{name}": value for name, value in host_work().items()},
        },
        "assumed": ASSUMED,
        "rates": rates,
        "check": check(small),
    }
    print(content["check"])
    if args.out is not None:
        write_results(args.out, "scaling", "python -m benchmarks.scaling", results, **content)
    if args.plot is not None:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
