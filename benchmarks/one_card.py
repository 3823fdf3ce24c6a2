"""One GPU with torchrun and without it, in turn on the same card: steps of the same model.

    python benchmarks/one_card.py --out benchmarks/results/h200/one_card.json

Four processes come one after the other: alone, torchrun, torchrun, alone. Each makes a policy of
Qwen3-8B's shape with fewer layers, warms up, and measures many steps: a rollout and an update, with
the seconds of each. A card that is warm, or another one, is slower by more than what is looked for
here, so both ways run on the same card, in an order that takes out a drift. The figure is the ratio
of the mean of medians, torchrun's to the other, beside how far two processes of one way are apart.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ORDER = ("alone", "torchrun", "torchrun", "alone")
PARTS = ("rollout", "update", "step")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of each step of this process, by part."""
    import torch

    from jetrl.bench._flow import Choices, Flow, policy_of
    from jetrl.bench._load import Load
    from jetrl.bench._timing import versions
    from jetrl.distributed.world import world
    from jetrl.session.ranks import joined_on

    small = args.device == "cpu"
    load = Load(2, 2, 8, 16) if small else Load(8, 8, 256, 512)
    train = {"optimizer_states": "compact"}
    shape = "tiny" if small else "qwen3-8b"
    choices = Choices(shape, args.device, args.layers, 1e-4, load.length * 16, None, train)
    seconds: dict[str, list[float]] = {part: [] for part in PARTS}
    with joined_on(args.device):
        flow = Flow(policy_of("unified", choices), load, choices)
        flow.warm_up()
        for step in range(args.steps + 1):
            sampling, drawn = flow.timed("rollout", lambda seed=step: flow.sample(seed))
            samples = flow.gathered(drawn, step)
            training, trained = flow.timed("update", lambda given=samples: flow.update(given))
            assert not trained.metrics["mismatch/num_different"]
            if step:  # the first one may still compile
                for part, taken in zip(
                    PARTS, (sampling, training, sampling + training), strict=True
                ):
                    seconds[part].append(taken)
        size = world().size
        device = "cpu" if small else torch.cuda.get_device_name()
    assert size == 1
    return {"seconds": seconds, "device": device, "versions": versions(), "load": str(load)}


def started(way: str, args: argparse.Namespace, file: Path) -> dict[str, Any]:
    """Return what a process measures that is started in one of the two ways."""
    command = [sys.executable]
    if way == "torchrun":
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    words = ["--device", args.device, "--layers", args.layers, "--steps", args.steps]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": args.card}
    command += [__file__, "--measure", str(file), *map(str, words)]
    subprocess.run(command, env=environment, check=True)
    results: dict[str, Any] = json.loads(file.read_text())
    return results


def main() -> None:
    """Measure both ways in turn, print the ratio, and write the JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("build/bench/one_card.json"))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--card", default="0", help="the number of the GPU")
    parser.add_argument("--device", default="cuda", help="cpu: to try it out")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        args.measure.write_text(json.dumps(measure(args)))
        return
    medians: dict[str, dict[str, list[float]]] = {way: {p: [] for p in PARTS} for way in ORDER}
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in ORDER:
            results = started(way, args, Path(folder) / "seconds.json")
            for part, taken in results["seconds"].items():
                medians[way][part].append(round(statistics.median(taken), 5))
            print(way, {part: medians[way][part][-1] for part in PARTS}, flush=True)
    ratios = {
        part: round(statistics.mean(medians["torchrun"][part]) / statistics.mean(alone), 5)
        for part, alone in medians["alone"].items()
    }
    apart = {
        way: round(max(parts["step"]) / min(parts["step"]) - 1, 5) for way, parts in medians.items()
    }
    content = {
        "benchmark": "one_card",
        "command": f"python benchmarks/one_card.py --layers {args.layers} --steps {args.steps}",
        "date": datetime.date.today().isoformat(),
        **{name: results[name] for name in ("device", "versions", "load")},
        "order": ORDER,
        "median_s": medians,
        "torchrun_to_alone": ratios,
        "two_processes_of_one_way_apart": apart,
    }
    print({"torchrun_to_alone": ratios, "two_processes_of_one_way_apart": apart})
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
