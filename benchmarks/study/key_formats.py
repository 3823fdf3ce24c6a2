"""What a format of keys and values does to models that runs have trained.

    python -m benchmarks.study.key_formats --out keys.json studies/demo_keys/runs/*
    python -m benchmarks.study.key_formats --out keys.json --prompts 64 studies/keys/runs/*512*

Each model draws completions of held-out prompts of its task with keys and values in BF16, and gives
their log-probs under every format, with the linears of its own plan; and the log-prob of each right
answer, whole. A row for each run and format has the mean and the 99th percentile of the
difference of log-probs to BF16 keys and values, and the mean probability of the right answers,
which no draw makes noisy.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import jetrl
from jetrl.precision import PrecisionPlan
from jetrl.session.sampling import encode_prompts
from jetrl.tasks import build_task
from jetrl.types import SamplingParams

FORMATS = ("bf16", "fp8", "int8+fp8", "fp8+int8", "int8")
Sequences = list[tuple[int, list[int]]]


@torch.no_grad()
def sequences_of(
    policy: jetrl.Policy, settings: jetrl.Settings, prompts: int, samples: int
) -> tuple[Sequences, Sequences]:
    """Return right answers and drawn completions: each prompt's length and the tokens of both."""
    options = {key: v for key, v in settings.task.options.items() if key != "mistakes"}
    task = build_task(settings.task.model_copy(update={"options": options}))
    encoded = encode_prompts(policy, task, settings.task.eval_split, prompts)
    params = SamplingParams(n=samples, max_tokens=settings.rollout.max_tokens, seed=1)
    engine = jetrl.RolloutEngine(policy, max_batch_size=1024)
    drawn = engine.generate([list(one.token_ids) for one in encoded], params)
    right, own = [], []
    for number, one in enumerate(encoded):
        start, begin = len(one.token_ids), list(one.token_ids)
        text = task.demonstration(one.prompt)
        if text is not None:
            answer = policy.tokenizer.encode(text, add_special_tokens=False)
            right.append((start, [*begin, *answer]))
        for completion in drawn[number * samples : (number + 1) * samples]:
            own.append((start, [*begin, *completion.token_ids]))
    return right, own


@torch.no_grad()
def logprobs(policy: jetrl.Policy, sequences: Sequences) -> list[Tensor]:
    """Return the log-probs of the tokens after each prompt, in float64 on the CPU."""
    found: list[Tensor] = []
    for first in range(0, len(sequences), 32):
        found += policy.logprobs([tokens for _, tokens in sequences[first : first + 32]])
    return [x[start - 1 :].double().cpu() for x, (start, _) in zip(found, sequences, strict=True)]


def rows_of(run: Path, prompts: int, samples: int, device: str) -> list[dict[str, Any]]:
    """Return the rows of a run's exported model."""
    settings = jetrl.load_config(run / "config.toml")
    plan = PrecisionPlan.from_settings(settings.precision, settings.sampler_deviation)
    true: list[Tensor] = []
    rows = []
    for kv in FORMATS:
        own_plan = plan.replace(kv=kv)
        policy = jetrl.Policy.from_pretrained(run / "model", plan=own_plan, device=device)
        if kv == FORMATS[0]:
            right, drawn = sequences_of(policy, settings, prompts, samples)
        ours = logprobs(policy, drawn)
        true = true or ours
        off = torch.cat([(a - b).abs() for a, b in zip(ours, true, strict=True)])
        answered = torch.stack([x.sum().exp() for x in logprobs(policy, right)])
        rows.append(
            {
                "run": run.name,
                "trained": plan.kv,
                "seed": settings.run.seed,
                "head_dim": policy.config.head_dim,
                "kv": kv,
                "prompts": len(right),
                "tokens": len(off),
                "mean_abs_logprob_diff": round(float(off.mean()), 7),
                "p99_abs_logprob_diff": round(
                    float(off.kthvalue(max(1, int(0.99 * len(off))))[0]), 7
                ),
                "right_answer": round(float(answered.mean()), 6),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def means_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return means over seeds: a row for each format in training and format in use."""
    keys = dict.fromkeys((row["trained"], row["kv"]) for row in rows)
    means = []
    for trained, kv in keys:
        same = [row for row in rows if (row["trained"], row["kv"]) == (trained, kv)]
        mean: dict[str, Any] = {"trained": trained, "kv": kv, "seeds": len(same)}
        for key in ("mean_abs_logprob_diff", "right_answer"):
            mean[key] = round(sum(row[key] for row in same) / len(same), 6)
        means.append(mean)
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run directories with a model")
    parser.add_argument("--out", type=Path, required=True, help="file of the results")
    parser.add_argument("--prompts", type=int, default=0, help="held-out prompts; 0: all")
    parser.add_argument("--samples", type=int, default=2, help="completions of each")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    runs = [run for run in args.runs if (run / "model" / "config.json").is_file()]
    if not runs:
        sys.exit("none of these folders is a run with a model")
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[dict[str, Any]] = []
    for run in runs:
        rows += rows_of(run, args.prompts, args.samples, device)
    results = {
        "benchmark": "key formats of trained models",
        "command": " ".join(["python", "benchmarks/study/key_formats.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "means": means_of(rows),
        "rows": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for mean in results["means"]:
        print(mean)


if __name__ == "__main__":
    main()
