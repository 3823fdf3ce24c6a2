r"""Accuracy on drawn shapes with the right images, and with those of other prompts.

    python -m benchmarks.shapes_start tiny build/shapes-tiny
    jetrl train benchmarks/shapes_tiny.toml
    python -m benchmarks.swapped_images build/shapes-tiny runs/shapes-tiny/model \
        --run runs/shapes-tiny

A model that reads its images falls to chance when each prompt gets the image of the next one of its
kind. `blind` is the accuracy of the best constant answer to each question. Test prompts of the task
`shapes`, with the options of the start, which is named first, are answered at temperature 1.
`--run` adds what the run's metrics say.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, command_typed, print_table, write_results
from benchmarks.policies import plan_of

from jetrl.models.policy import Policy
from jetrl.rollout.engine import RolloutEngine
from jetrl.tasks.shapes import Shapes
from jetrl.types import Prompt, SamplingParams


def swapped(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts, each with the image of the next one of its kind."""
    kinds: dict[Any, list[int]] = {}
    for number, prompt in enumerate(prompts):
        kinds.setdefault(prompt.metadata["ask"], []).append(number)
    made = [*prompts]
    for numbers in kinds.values():
        for number, other in zip(numbers, [*numbers[1:], numbers[0]], strict=True):
            made[number] = replace(prompts[number], images=prompts[other].images)
    return made


def blind_accuracy(prompts: Sequence[Prompt]) -> float:
    """Return the accuracy of the best constant answer to each question."""
    answers: dict[Any, Counter[Any]] = {}
    for prompt in prompts:
        answers.setdefault(prompt.text, Counter())[prompt.answer] += 1
    return sum(max(each.values()) for each in answers.values()) / len(prompts)


def accuracies(policy: Policy, task: Shapes, samples: int) -> dict[str, float]:
    """Return the accuracy of samples on test prompts, with right and with swapped images."""
    prompts = task.prompts("test")
    engine = RolloutEngine(policy)
    params = SamplingParams(n=samples, max_tokens=8, stop=task.stop)
    found = {}
    for name, given in {"right": prompts, "swapped": swapped(prompts)}.items():
        done = engine.generate(given, params)
        scores = (task.score(prompts[i // samples], each.text) for i, each in enumerate(done))
        found[name] = round(statistics.mean(scores), 4)
    return {**found, "blind": round(blind_accuracy(prompts), 4)}


def of_run(folder: Path) -> Mapping[str, Any]:
    """Return what the metrics of a run say: rewards and evaluations, and tokens that differ."""
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    rewards = [round(line["reward/mean"], 4) for line in lines if "reward/mean" in line]
    evaluated = [line["eval/shapes/mean"] for line in lines if "eval/shapes/mean" in line]
    return {
        "reward_of_the_first_five_steps": round(statistics.mean(rewards[:5]), 4),
        "reward_of_the_last_five_steps": round(statistics.mean(rewards[-5:]), 4),
        "evaluations": [round(accuracy, 4) for accuracy in evaluated],
        "tokens": sum(int(line.get("mismatch/num_tokens", 0)) for line in lines),
        "different": sum(int(line.get("mismatch/num_different", 0)) for line in lines),
        "rewards": rewards,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path, help="the start, and models made of it")
    parser.add_argument("--plan", default="int8")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--out", default="build/bench/swapped_images.json")
    args = parser.parse_args()
    start = json.loads((args.models[0] / "start.json").read_text(encoding="utf-8"))
    del start["curve"]
    task, rows = Shapes(**start["task_options"]), list[Row]()
    for path in args.models:
        policy = Policy.from_pretrained(path, plan_of(args.plan))
        rows.append({"model": str(path), **accuracies(policy, task, args.samples)})
    facts = {} if args.run is None else {"run": of_run(args.run)}
    command = command_typed("python -m benchmarks.swapped_images", None)
    write_results(args.out, "swapped_images", command, rows, plan=args.plan, start=start, **facts)
    print_table(rows)


if __name__ == "__main__":
    main()
