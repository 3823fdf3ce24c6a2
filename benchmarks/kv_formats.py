"""What a format of keys and values costs in accuracy, for docs/benchmarks.md.

    python -m benchmarks.kv_formats --out build/kv_formats      all models, on one core
    python -m benchmarks.kv_formats --out build/kv_formats --only sums-64 --seeds 0

Small models are trained by supervised training in FP32, with heads of 64 and of 128 channels, on
the demo's sums without their mistakes (answers of four tokens). A model that is in the folder is
neither trained nor measured again. Each then gives the log-probs of its own held-out
completions, drawn with BF16 keys and values, under every format of keys and values, with the
linears of `unified` and of `bf16`.

A row for each model, linears and format is printed and written to kv_formats.json in the folder
(benchmarks/results/cpu/kv_formats.json is such a file): the mean, the 99th percentile and the
largest difference of log-probs to those of BF16 keys and values, and the mean probability of the
right answers.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import write_results
from torch import Tensor

import jetrl
from jetrl.precision import PrecisionPlan
from jetrl.session.sampling import encode_prompts
from jetrl.tasks import Task, get_task
from jetrl.types import SamplingParams

FORMATS = ["fp8", "int8", "int8+fp8", "fp8+int8"]
LINEARS = ["unified", "bf16"]
PROMPTS, SAMPLES = 180, 4  # all of the demo's held-out sums


SUMS = ["task.options.mistakes=0.0", "precision.preset=fp32", "sft.until=0.8", "loop.steps=0"]
MODELS: dict[str, list[str]] = {"sums-64": SUMS, "sums-128": [*SUMS, "model.config.head_dim=128"]}


def trained(name: str, seed: int, folder: Path) -> Path:
    """Return the directory of a trained model, which is trained if it is not there."""
    run = f"{name}-{seed}"
    words = [f"run.name={run}", f"run.dir={folder}", f"run.seed={seed}", "report.enabled=false"]
    model = folder / run / "model"
    if not (model / "config.json").is_file():
        begun = (folder / run / "config.toml").is_file()
        jetrl.train(jetrl.load_config("demo", [*words, *MODELS[name]]), resume=begun)
    return model


@torch.no_grad()
def completions(policy: jetrl.Policy, task: Task) -> list[tuple[int, list[int]]]:
    """Return the prompt's length and the tokens of held-out completions and of right answers.

    The right answer of each prompt is the first of its sequences.
    """
    prompts = encode_prompts(policy, task, "test", PROMPTS)
    engine = jetrl.RolloutEngine(policy)
    params = SamplingParams(n=SAMPLES, max_tokens=64, stop=list(task.stop), seed=1)
    drawn = engine.generate([list(prompt.token_ids) for prompt in prompts], params)
    sequences = []
    for i, prompt in enumerate(prompts):
        answer = policy.tokenizer.encode(prompt.prompt.answer or "", add_special_tokens=False)
        ends = [list(c.token_ids) for c in drawn[i * SAMPLES : (i + 1) * SAMPLES]]
        sequences += [(len(prompt.token_ids), [*prompt.token_ids, *e]) for e in [answer, *ends]]
    return sequences


@torch.no_grad()
def logprobs(policy: jetrl.Policy, sequences: list[tuple[int, list[int]]]) -> list[Tensor]:
    """Return the log-probs of the tokens after each prompt, float64."""
    found = policy.logprobs([tokens for _, tokens in sequences])
    return [x[start - 1 :].double() for x, (start, _) in zip(found, sequences, strict=True)]


def rows_of(name: str, seed: int, folder: Path) -> list[dict[str, Any]]:
    """Return the rows of one model, which are kept beside it."""
    kept = folder / f"{name}-{seed}" / "rows.json"
    if kept.is_file():
        return list(json.loads(kept.read_text(encoding="utf-8")))
    model = trained(name, seed, folder)
    task = demo_task()
    rows = []
    for linears in LINEARS:
        plan = PrecisionPlan.preset(linears).replace(kv="bf16")
        policy = jetrl.Policy.from_pretrained(model, plan=plan)
        sequences = completions(policy, task)
        right = slice(0, None, 1 + SAMPLES)
        true = logprobs(policy, sequences)
        for kv in ["bf16", *FORMATS]:
            policy = jetrl.Policy.from_pretrained(model, plan=plan.replace(kv=kv))
            ours = logprobs(policy, sequences)
            drawn = [i for i in range(len(sequences)) if i % (1 + SAMPLES)]
            off = torch.cat([(ours[i] - true[i]).abs() for i in drawn])
            answered = torch.stack([x.sum().exp() for x in ours[right]])
            row = {
                "model": name,
                "seed": seed,
                "linears": linears,
                "kv": kv,
                "tokens": len(off),
                "mean_abs_logprob_diff": float(off.mean()),
                "p99_abs_logprob_diff": float(off.quantile(0.99)),
                "max_abs_logprob_diff": float(off.max()),
                "right_answer": float(answered.mean()),
            }
            rows.append({k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()})
            print(json.dumps(rows[-1]), flush=True)
    kept.write_text(json.dumps(rows), encoding="utf-8")
    return rows


def demo_task() -> Task:
    """Return the demo's task."""
    settings = jetrl.load_config("demo")
    return get_task(settings.task.name, **settings.task.options)


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return means over seeds, a row for each model, linears and format."""
    means = []
    keys = {(r["model"], r["linears"], r["kv"]): None for r in rows}
    for model, linears, kv in keys:
        same = [r for r in rows if (r["model"], r["linears"], r["kv"]) == (model, linears, kv)]
        row: dict[str, Any] = {"model": model, "linears": linears, "kv": kv, "seeds": len(same)}
        for key in ("mean_abs_logprob_diff", "right_answer"):
            row[key] = round(sum(r[key] for r in same) / len(same), 5)
        means.append(row)
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/kv_formats"))
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name, seed in itertools.product(args.only, args.seeds):
        rows += rows_of(name, seed, args.out)
        path, command = args.out / "kv_formats.json", "python -m benchmarks.kv_formats"
        write_results(path, "kv_formats", command, rows, means=summary(rows))
    for row in summary(rows):
        print(row)


if __name__ == "__main__":
    main()
