"""One GPU with torchrun and without it: steps of the same model, in turn on the same card.

    python -m benchmarks.one_card --out benchmarks/results/h200/one_card.json

Three processes are on the card at the same time, two started alone and one by torchrun. Each makes
a policy of Qwen3-8B's shape with fewer layers and warms up; then they take turns, a step each (a
rollout and an update), and every second round in the opposite order. A card's speed drifts by more
than what is looked for here, and so do processes that come one after the other: steps that are
seconds apart share the drift. The figure is the median over rounds of the ratio of the seconds of
one process to the mean of both that were started alone, with a 95% interval of the mean ratio; the
two processes that were started alone, compared with each other, show what the method can tell.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

WAYS = ("alone", "torchrun", "alone again")
PARTS = ("rollout", "update", "step")


def measure(args: argparse.Namespace) -> None:
    """Make a step whenever the other end of the connection asks for one, and report its seconds."""
    import torch
    from benchmarks.flow import Choices, Flow, policy_of
    from benchmarks.harness import Load, versions

    from jetrl.distributed.world import world
    from jetrl.session.ranks import joined_on

    small = args.device == "cpu"
    load = Load(2, 2, 8, 16) if small else Load(8, 8, 256, 512)
    train = {"optimizer_states": "compact"}
    shape = "tiny" if small else "qwen3-8b"
    layers = 1 if small else args.layers
    choices = Choices(shape, args.device, layers, 1e-4, load.length * 16, None, train)
    with joined_on(args.device), socket.create_connection(("127.0.0.1", args.port)) as connection:
        asked, answers = connection.makefile("r"), connection.makefile("w")

        def answer(content: dict[str, Any]) -> None:
            answers.write(json.dumps(content) + "\n")
            answers.flush()

        flow = Flow(policy_of("unified", choices), load, choices)
        flow.warm_up()
        assert world().size == 1
        device = "cpu" if small else torch.cuda.get_device_name()
        answer({"device": device, "versions": versions(), "load": str(load)})
        for step, _ in enumerate(asked):
            sampling, drawn = flow.timed("rollout", lambda seed=step: flow.sample(seed))
            samples = flow.gathered(drawn, step)
            training, trained = flow.timed("update", lambda given=samples: flow.update(given))
            assert not trained.metrics["mismatch/num_different"]
            answer({"rollout": sampling, "update": training, "step": sampling + training})


class Process:
    """A process that makes steps when it is asked to."""

    def __init__(self, way: str, args: argparse.Namespace, listener: socket.socket) -> None:
        command = [sys.executable]
        if way == "torchrun":
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        command += [__file__, "--port", str(listener.getsockname()[1])]
        command += ["--device", args.device, "--layers", str(args.layers)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": args.card}
        self._process = subprocess.Popen(command, env=environment)
        listener.settimeout(600)
        connection, _ = listener.accept()
        connection.settimeout(600)
        self._answers, self._asked = connection.makefile("r"), connection.makefile("w")
        connection.close()  # the two files keep it open
        self.about = json.loads(self._answers.readline())

    def step(self) -> dict[str, float]:
        """Return the seconds of a step that the process makes now, by part."""
        self._asked.write("step\n")
        self._asked.flush()
        seconds: dict[str, float] = json.loads(self._answers.readline())
        return seconds

    def end(self) -> None:
        """Let the process end, and wait for it."""
        self._asked.close()
        self._answers.close()
        self._process.wait(60)


def compared(taken: list[float], others: list[list[float]]) -> dict[str, float | list[float]]:
    """Return the median ratio of steps to those of other processes, and the mean's interval."""
    means = [statistics.mean(of_round) for of_round in zip(*others, strict=True)]
    ratios = [one / other for one, other in zip(taken, means, strict=True)]
    mean, half = statistics.mean(ratios), math.inf
    if len(ratios) > 1:
        half = 1.96 * statistics.stdev(ratios) / math.sqrt(len(ratios))
    interval = [round(mean - half, 5), round(mean + half, 5)]
    return {"median": round(statistics.median(ratios), 5), "interval_95": interval}


def main() -> None:
    """Let the processes take turns, print the ratios, and write the JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("build/bench/one_card.json"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--card", default="0", help="the number of the GPU")
    parser.add_argument("--device", default="cuda", help="cpu: to try it out")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.port is not None:
        measure(args)
        return
    listener = socket.create_server(("127.0.0.1", 0))
    # One after the other: two that warm up at once would take longer, not shorter.
    processes = {way: Process(way, args, listener) for way in WAYS}
    seconds: dict[str, dict[str, list[float]]] = {way: {p: [] for p in PARTS} for way in WAYS}
    for turn in range(args.rounds + 1):
        for way in WAYS if turn % 2 else reversed(WAYS):
            taken = processes[way].step()
            for part in PARTS if turn else ():  # the first step may still compile
                seconds[way][part].append(round(taken[part], 5))
    about = processes["alone"].about
    for process in processes.values():
        process.end()
    alone = [seconds[way] for way in WAYS if way != "torchrun"]
    torchrun = {
        part: compared(seconds["torchrun"][part], [one[part] for one in alone]) for part in PARTS
    }
    again = {part: compared(alone[1][part], [alone[0][part]]) for part in PARTS}
    content = {
        "benchmark": "one_card",
        "command": f"python -m benchmarks.one_card --layers {args.layers} --rounds {args.rounds}",
        "date": datetime.date.today().isoformat(),
        **about,
        "torchrun_to_alone": torchrun,
        "alone_again_to_alone": again,
        "seconds": seconds,
    }
    print(json.dumps({"torchrun_to_alone": torchrun, "alone_again_to_alone": again}, indent=1))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(content) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
