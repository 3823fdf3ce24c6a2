r"""Updates of small models as captured graphs, against eager updates: bits, time and idle share.

    jetrl bench graphs --shape smollm2-135m --shape qwen2.5-0.5b --out graphs.json
    jetrl bench graphs --shape smollm2-135m --plan int8 --processes 4

Each plan trains the same weights on the same 64 ragged sequences of random tokens, first with
train.graphs=off, then with "on". `different_weights` counts the master weights whose bits differ
afterwards. `update_ms` is the median `Trainer.step`, between two waits for the GPU; `idle_share`
and `launches` are of one more update under torch.profiler.

With --processes, that many processes train at once on the same GPU, each on its own policy; the
times are medians over all of them.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.harness import Row, begins, bench_parser, command_typed, print_table, write_results
from benchmarks.loads import make_samples, random_rewards
from benchmarks.policies import add_plan_argument, make_policy, plans_of
from benchmarks.shapes import SHAPES
from benchmarks.train import profile

from jetrl.memory.device import peak_bytes, reset_peak
from jetrl.memory.out_of_memory import release
from jetrl.models.policy import Policy
from jetrl.settings.loading import load_config
from jetrl.training.micro_batches import batch_logprobs
from jetrl.training.packing import by_sample, pack
from jetrl.training.trainer import TrainedStep, Trainer
from jetrl.types import Completion, Sample

_WARM = 3  # updates until all sizes are captured


@dataclass(frozen=True)
class Choices:
    """The arguments; `sequences` have `shortest` to `longest` tokens."""

    device: str
    layers: int | None
    sequences: int
    shortest: int
    longest: int
    tokens_per_micro_batch: int
    updates: int
    states: str


class Updates:
    """Updates of a policy on samples of the same lengths and other tokens."""

    def __init__(self, policy: Policy, choices: Choices, graphs: str) -> None:
        self._policy, self._choices, self._made = policy, choices, 0
        words = {
            "lr": 1e-5,
            "tokens_per_micro_batch": choices.tokens_per_micro_batch,
            "optimizer_states": choices.states,
            "share_prompts": "false",
            "graphs": graphs,
        }
        settings = load_config(None, [f"train.{key}={value}" for key, value in words.items()])
        self._trainer = Trainer(policy, settings)

    def samples(self) -> list[Sample]:
        """Return the next samples, with the current log-probs of the policy."""
        choices, vocabulary = self._choices, self._policy.config.vocab_size
        lengths = np.random.default_rng(0).integers(
            choices.shortest, choices.longest, choices.sequences, endpoint=True
        )
        rng = np.random.default_rng(1 + self._made)
        self._made += 1
        texts = [rng.integers(0, vocabulary, length).tolist() for length in lengths]
        prompts = [text[: len(text) // 4] for text in texts]
        answers = [text[len(text) // 4 :] for text in texts]

        def given(logprobs: Sequence[Sequence[float]]) -> list[Sample]:
            done = [
                Completion(tuple(answer), tuple(row), "length")
                for answer, row in zip(answers, logprobs, strict=True)
            ]
            rewards = random_rewards(len(done), self._made)
            return [
                # One group, so that advantages are not zero.
                Sample(s.prompt, 0, s.inputs, s.completion, s.score)
                for s in make_samples(prompts, done, rewards)
            ]

        samples = given([[0.0] * len(answer) for answer in answers])
        batches = pack(samples, choices.tokens_per_micro_batch)
        with torch.no_grad():
            rows = [batch_logprobs(self._policy, batch)[0].cpu().numpy() for batch in batches]
        return given([row.tolist() for row in by_sample(batches, rows, len(samples))])

    def update(self, samples: Sequence[Sample]) -> TrainedStep:
        return self._trainer.step(samples)

    def timed(self) -> tuple[float, TrainedStep]:
        """Return the milliseconds and the result of an update."""
        samples = self.samples()
        _wait(self._choices.device)
        start = time.perf_counter()
        done = self.update(samples)
        _wait(self._choices.device)
        return 1e3 * (time.perf_counter() - start), done


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(
    policy: Policy, choices: Choices, graphs: str, ready: Any = None, profiled: bool = True
) -> Row:
    """Return the row of a policy's updates; with `ready`, a barrier, processes start together."""
    if choices.device == "cuda":
        reset_peak()
    updates = Updates(policy, choices, graphs)
    began = time.perf_counter()
    for _ in range(_WARM):
        updates.update(updates.samples())
    _wait(choices.device)
    row: Row = {"graphs": graphs, "warm_up_s": round(time.perf_counter() - began, 1)}
    if ready is not None:
        ready.wait()
    made = [updates.timed() for _ in range(choices.updates)]
    row["update_ms"] = round(statistics.median(ms for ms, _ in made), 1)
    row["updates_ms"] = [round(ms, 1) for ms, _ in made]
    of_step = made[-1][1].timings
    row |= {f"{key}_ms": round(1e3 * of_step[key], 1) for key in ("optimizer", "requantize")}
    row["different_tokens"] = int(made[-1][1].metrics["mismatch/num_different"])
    if choices.device == "cuda":
        row["peak_gib"] = round(peak_bytes() / 2**30, 1)
        if profiled:
            found = profile(updates.update, updates.samples())
            row |= {key: found[key] for key in ("idle_share", "launches", "kernels")}
    return row


def compared(shape: str, plan: str, choices: Choices) -> list[Row]:
    """Return the rows of eager and of captured updates from the same weights."""
    policy = make_policy(shape, plan, choices.device, choices.layers)
    masters = policy.master_weights()
    first = {name: master.detach().clone() for name, master in masters.items()}
    rows, ended = [], []
    for graphs in ("off", "on" if choices.device == "cuda" else "off"):
        begins(f"{shape}, {plan}, train.graphs={graphs}")
        with torch.no_grad():
            for name, master in masters.items():
                master.copy_(first[name])
        policy.requantize()
        rows.append({"shape": shape, "plan": plan, **measure(policy, choices, graphs)})
        ended.append({name: master.detach().clone() for name, master in masters.items()})
        release()
    before, after = ended
    different = [n for n in before if not torch.equal(_bits(before[n]), _bits(after[n]))]
    rows[1]["different_weights"] = len(different)
    if different:
        rows[1]["different_names"] = different[:8]
    return rows


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def _process(
    shape: str, plan: str, choices: Choices, graphs: str, ready: Any, results: Any
) -> None:
    """Measure in a process of its own."""
    try:
        policy = make_policy(shape, plan, choices.device, choices.layers)
        results.put(measure(policy, choices, graphs, ready, profiled=False))
    except BaseException:
        ready.abort()  # or the others would wait for ever
        raise


def together(shape: str, plan: str, choices: Choices, processes: int) -> list[Row]:
    """Return the rows of eager and of captured updates in several processes at once."""
    context, rows = multiprocessing.get_context("spawn"), []
    for graphs in ("off", "on" if choices.device == "cuda" else "off"):
        begins(f"{processes} processes: {shape}, {plan}, train.graphs={graphs}")
        ready, results = context.Barrier(processes), context.Queue()
        arguments = (shape, plan, choices, graphs, ready, results)
        started = [context.Process(target=_process, args=arguments) for _ in range(processes)]
        for process in started:
            process.start()
        found = [results.get(timeout=300) for _ in started]
        for process in started:
            process.join()
        times = [ms for row in found for ms in row["updates_ms"]]
        peak = sum(row.get("peak_gib", 0.0) for row in found)
        facts = {"update_ms": round(statistics.median(times), 1), "peak_gib": round(peak, 1)}
        rows.append(
            {"shape": shape, "plan": plan, "graphs": graphs, "processes": processes, **facts}
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Run `jetrl bench graphs`."""
    parser = bench_parser("graphs", __doc__)
    parser.add_argument("--shape", action="append", choices=sorted(SHAPES), help="repeatable")
    parser.add_argument("--layers", type=int, help="default: the shape's")
    add_plan_argument(parser, "bf16")
    for name, default, words in (
        ("sequences", 64, "per update"),
        ("shortest", 256, "tokens of a sequence, at least"),
        ("longest", 768, "tokens of a sequence, at most"),
        ("tokens-per-micro-batch", 16384, "tokens"),
        ("updates", 7, "timed"),
        ("processes", 1, "on one GPU at once"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{words}; {default}")
    parser.add_argument("--states", default="fp32", help="train.optimizer_states; default fp32")
    parser.add_argument("--device", default="cuda", help="cpu: to try it out, without graphs")
    parser.add_argument("--out", default="build/bench/graphs.json", type=Path, help="JSON file")
    args = parser.parse_args(argv)
    fields = ("device", "layers", "sequences", "shortest", "longest", "tokens_per_micro_batch")
    choices = Choices(
        **{name: getattr(args, name) for name in fields}, updates=args.updates, states=args.states
    )
    rows: list[Row] = []
    for shape in args.shape or ("smollm2-135m", "qwen2.5-0.5b"):
        for plan in plans_of(args):
            if args.processes > 1:
                rows += together(shape, plan, choices, args.processes)
            else:
                rows += compared(shape, plan, choices)
                release()
            if args.device == "cuda":  # what was measured is kept if the next plan fails
                command = command_typed("jetrl bench graphs", argv)
                write_results(args.out, "graphs", command, rows)
    print_table([{k: v for k, v in row.items() if k != "kernels"} for row in rows])


if __name__ == "__main__":
    main()
