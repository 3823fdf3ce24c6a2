r"""What a plan's formats cost a pretrained model, by jetrl's own forward and backward.

    python -m benchmarks.plan_error MODEL --row bf16 --row "unified @PADDED" --row "int8 kv=bf16"
    python -m benchmarks.plan_error MODEL --length 256 --tokens 1536 --gradients 4 \
        --text data/gsm8k/train.jsonl --text docs/rollout.md \
        --row "int8 grad_output=int8" --row integer

Against transformers in FP32, on text: KL divergence per token, difference of the log-prob of the
text's token, share of tokens whose most likely next token differs; and of the gradients of all
linear weights, for cross-entropy on one sequence at a time, the relative error and the cosine. A
row is a plan with options of it, and @DIR names another directory of the same function, such as one
whose widths FP8 takes; its gradients are not compared then.

Each later row is also compared with the first, sequence by sequence: KL, and squared gradient error
relative to the squared gradient. A rule, set before the second command first ran on
SmolLM2-135M-Instruct and on Qwen2.5-Coder-0.5B-Instruct, decides for each model and measure, over
both texts: with difference d of the means and its standard error s over the sequences (paired), the
row is

    no worse    if d + 2 s is at most 5% of the first row's mean (10% of a squared error)
    worse       if d - 2 s is above 0
    undecided   otherwise

5% is a third or less of the KL of `bf16` itself on these models, 0.0007 nats. The expectation: the
KL of `integer` is 0 to 15% higher than that of `int8`, since queries and the head's weights are in
INT8 too; it gains in attention's P, which has 15 bits. Its gradients are no worse than with
`grad_output=int8`: linear layers are the same, and attention's dO and dS have 15 bits.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import Row, command_typed, print_table, write_results
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from jetrl import Policy
from jetrl.models.families import linear_layers
from jetrl.models.packed import ForwardInputs
from jetrl.precision import PrecisionPlan
from jetrl.precision.backend import select_backend

MARGIN = {"kl": 0.05, "gradient_error": 0.1}  # of the first row's mean
PAIRED = {"kl": "kl_each", "gradient_error": "gradient_error_squared_each"}


def policy_of(row: str, model: str, device: torch.device) -> Policy:
    """Return the policy of a row's plan."""
    preset, *words = row.split()
    options = dict(word.split("=", 1) for word in words if "=" in word)
    known = {"true": True, "false": False}
    values = {k: int(v) if v.isdigit() else known.get(v, v) for k, v in options.items()}
    directory = next((word[1:] for word in words if word.startswith("@")), model)
    plan = PrecisionPlan.preset(preset).replace(**values)
    select_backend(defined=plan.defined)
    return Policy.from_pretrained(directory, plan, str(device))


def sequences(path: str, text: Path, tokens: int, length: int) -> Tensor:
    """Return token ids [sequences, length] of the text's first tokens, as many as it has.

    Args:
        text: JSON lines: a question and an answer in the model's chat template, or a prompt and a
            completion, joined. Another file than .jsonl is one text.
    """
    tokenizer = AutoTokenizer.from_pretrained(path)
    whole = text.read_text(encoding="utf-8")
    lines = whole.splitlines() if text.suffix == ".jsonl" else []
    ids: list[int] = [] if lines else tokenizer(whole)["input_ids"]
    for line in lines:
        row = json.loads(line)
        if "question" in row:
            roles = (("user", row["question"]), ("assistant", row["answer"]))
            turns = [{"role": role, "content": content} for role, content in roles]
            ids += tokenizer(tokenizer.apply_chat_template(turns, tokenize=False))["input_ids"]
        else:
            ids += tokenizer(row["prompt"] + row["completion"])["input_ids"]
            ids.append(tokenizer.eos_token_id)
        if len(ids) >= tokens:
            break
    count = min(tokens, len(ids)) // length
    return torch.tensor(ids[: count * length]).view(count, length)


@torch.no_grad()
def forward_errors(truth: Any, policy: Policy, ids: Tensor) -> Row:
    length = ids.shape[1]
    ends = torch.tensor([0, length])
    sums = torch.zeros(2, dtype=torch.float64, device=ids.device)
    kls: list[float] = []
    for one in ids:
        true = truth(one[None]).logits[0].log_softmax(-1)
        inputs = ForwardInputs.packed(one, ends).to(ids.device)
        hidden = policy.packed_hidden(inputs, ends, torch.arange(length, device=ids.device))
        found = policy.decoder.logits(hidden, "train").log_softmax(-1)
        drawn = (true - found)[:-1].gather(1, one[1:, None])
        greedy = (true.argmax(-1) != found.argmax(-1)).sum()
        kls.append((true.exp() * (true - found)).sum().item() / length)
        sums += torch.stack([drawn.abs().sum(), greedy]).double()
    error, greedy = (sums / ids.numel()).tolist()
    return {
        "kl": round(statistics.mean(kls), 6),
        "logprob_error": round(error, 5),
        "greedy": round(greedy, 5),
        PAIRED["kl"]: [float(f"{kl:.4g}") for kl in kls],
    }


def gradient_errors(truth: Any, policy: Policy, ids: Tensor) -> Row:
    """Return the errors of the gradients of each sequence's cross-entropy."""
    squares, cosines = zip(*(_of_one(truth, policy, one[None]) for one in ids), strict=True)
    return {
        "gradient_error": round(statistics.mean(squares) ** 0.5, 4),
        "gradient_cosine": round(statistics.mean(cosines), 5),
        PAIRED["gradient_error"]: [float(f"{square:.4g}") for square in squares],
    }


def _of_one(truth: Any, policy: Policy, ids: Tensor) -> tuple[float, float]:
    """Return the squared relative error and the cosine of the gradients for one sequence."""
    masters = policy.master_weights()
    for master in masters.values():
        master.grad = None
    (-torch.cat(policy.logprobs(ids.tolist())).mean()).backward()
    logits = truth(ids).logits[:, :-1].flatten(0, 1)
    truth.zero_grad()
    functional.cross_entropy(logits, ids[:, 1:].flatten()).backward()
    named = dict(truth.named_parameters())
    errors = trues = founds = products = 0.0
    for layer, parts in linear_layers(policy.config).items():
        true = torch.cat([named[part.name].grad for part in parts]).double()
        gradient = masters[f"{layer}.weight"].grad
        assert gradient is not None, layer
        found = gradient.double()
        errors += (found - true).square().sum().item()
        trues += true.square().sum().item()
        founds += found.square().sum().item()
        products += (found * true).sum().item()
    return errors / trues, products / (trues * founds) ** 0.5


def compared(rows: Sequence[Row], first: Sequence[Row]) -> Row:
    """Return the comparison of a plan's rows with those of the first plan, text by text."""
    found: Row = {"plan": rows[0]["plan"], "against": first[0]["plan"]}
    for measure, key in PAIRED.items():
        ours, theirs = ([x for row in each for x in row.get(key, ())] for each in (rows, first))
        if len(ours) < 2 or len(ours) != len(theirs):
            continue
        differences = [a - b for a, b in zip(ours, theirs, strict=True)]
        mean, base = statistics.mean(differences), statistics.mean(theirs)
        error = statistics.stdev(differences) / len(differences) ** 0.5
        verdict = "worse" if mean - 2 * error > 0 else "undecided"
        if mean + 2 * error <= MARGIN[measure] * base:
            verdict = "no worse"
        found |= {
            f"{measure}_change_percent": round(100 * mean / base, 2),
            f"{measure}_standard_error_percent": round(100 * error / base, 2),
            f"{measure}_verdict": verdict,
        }
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_error", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", help="a Hugging Face directory")
    parser.add_argument("--row", action="append", required=True, help="PLAN [KEY=VALUE ...] [@DIR]")
    parser.add_argument("--text", type=Path, action="append", help="repeatable; default: GSM8K")
    parser.add_argument("--tokens", type=int, default=20480, help="of each text")
    parser.add_argument("--length", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--gradients", type=int, default=8, help="sequences of each text; 0: none")
    parser.add_argument("--out", default="build/bench/plan_error.json")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    module: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    truth = module.to(device)
    texts = args.text or [Path("data/gsm8k/test.jsonl")]
    ids = {t.name: sequences(args.model, t, args.tokens, args.length).to(device) for t in texts}
    command = command_typed("python -m benchmarks.plan_error", argv)
    facts: Row = {"model": Path(args.model).name, "tokens": {t: x.numel() for t, x in ids.items()}}
    rows: list[list[Row]] = []

    def save() -> None:
        facts["comparisons"] = [compared(each, rows[0]) for each in rows[1:]]
        write_results(args.out, "plan_error", command, [r for each in rows for r in each], **facts)

    for row in args.row:
        policy = policy_of(row, args.model, device)
        rows.append([])
        for text, some in ids.items():
            made = {"plan": row.partition(" @")[0], "text": text}
            rows[-1].append(made | forward_errors(truth, policy, some))
        save()  # gradients take longer
        if "@" not in row and args.gradients:
            for made, some in zip(rows[-1], ids.values(), strict=True):
                made |= gradient_errors(truth, policy, some[: args.gradients])
        del policy
        save()
    print_table([{k: v for k, v in row.items() if k[-4:] != "each"} for x in rows for row in x])
    print_table(facts["comparisons"])


if __name__ == "__main__":
    main()
