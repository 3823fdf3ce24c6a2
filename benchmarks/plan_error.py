"""What a plan's formats cost a pretrained model, by jetrl's own forward and backward.

    python -m benchmarks.plan_error MODEL --row bf16 --row "unified @PADDED" --row "int8 kv=bf16"

Against transformers in FP32, on text: KL divergence per token, difference of the log-prob of the
text's token, share of tokens whose most likely next token differs; and of the gradients of all
linear weights, for cross-entropy, the relative error and the cosine. A row is a plan with options
of it, and @DIR names another directory of the same function, such as one whose widths FP8 takes;
its gradients are not compared then.
"""

from __future__ import annotations

import argparse
import json
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

LENGTH = 512  # tokens per sequence
SEQUENCES = 8  # of the gradients


def policy_of(row: str, model: str, device: torch.device) -> Policy:
    """Return the policy of a row's plan."""
    preset, *words = row.split()
    options = dict(word.split("=", 1) for word in words if "=" in word)
    known = {"true": True, "false": False}
    values = {k: int(v) if v.isdigit() else known.get(v, v) for k, v in options.items()}
    directory = next((word[1:] for word in words if word.startswith("@")), model)
    plan = PrecisionPlan.preset(preset).replace(**values)
    return Policy.from_pretrained(directory, plan, str(device))


def sequences(path: str, text: Path, tokens: int, device: torch.device) -> Tensor:
    """Return token ids [sequences, LENGTH] of at least `tokens` tokens of text, if it has as many.

    Args:
        text: JSON lines: a question and an answer in the model's chat template, or a prompt and a
            completion, joined.
    """
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids: list[int] = []
    for line in text.read_text(encoding="utf-8").splitlines():
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
    return torch.tensor(ids[: len(ids) // LENGTH * LENGTH], device=device).view(-1, LENGTH)


@torch.no_grad()
def forward_errors(truth: Any, policy: Policy, ids: Tensor) -> Row:
    ends = torch.tensor([0, LENGTH])
    sums = torch.zeros(3, dtype=torch.float64, device=ids.device)
    for one in ids:
        true = truth(one[None]).logits[0].log_softmax(-1)
        inputs = ForwardInputs.packed(one, ends).to(ids.device)
        hidden = policy.packed_hidden(inputs, ends, torch.arange(LENGTH, device=ids.device))
        found = policy.decoder.logits(hidden, "train").log_softmax(-1)
        drawn = (true - found)[:-1].gather(1, one[1:, None])
        greedy = (true.argmax(-1) != found.argmax(-1)).sum()
        kl = (true.exp() * (true - found)).sum()
        sums += torch.stack([kl, drawn.abs().sum(), greedy]).double()
    kl, error, greedy = (sums / ids.numel()).tolist()
    return {"kl": round(kl, 6), "logprob_error": round(error, 5), "greedy": round(greedy, 5)}


def gradients(truth: Any, policy: Policy, ids: Tensor) -> Row:
    loss = -torch.cat(policy.logprobs(ids.tolist())).mean()
    loss.backward()
    logits = truth(ids).logits[:, :-1].flatten(0, 1)
    truth.zero_grad()
    functional.cross_entropy(logits, ids[:, 1:].flatten()).backward()
    named, masters = dict(truth.named_parameters()), policy.master_weights()
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
    return {
        "gradient_error": round((errors / trues) ** 0.5, 4),
        "gradient_cosine": round(products / (trues * founds) ** 0.5, 5),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_error", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", help="a Hugging Face directory")
    parser.add_argument("--row", action="append", required=True, help="PLAN [KEY=VALUE ...] [@DIR]")
    parser.add_argument("--text", type=Path, default=Path("data/gsm8k/test.jsonl"))
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--out", default="build/bench/plan_error.json")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    module: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    truth = module.to(device)
    ids = sequences(args.model, args.text, args.tokens, device)
    rows: list[Row] = []
    for row in args.row:
        policy = policy_of(row, args.model, device)
        made: Row = {"plan": row.partition(" @")[0], **forward_errors(truth, policy, ids)}
        if "@" not in row:
            made |= gradients(truth, policy, ids[:SEQUENCES])
        rows.append(made)
        del policy
    facts = {"model": Path(args.model).name, "tokens": ids.numel()}
    write_results(
        args.out,
        "plan_error",
        command_typed("python -m benchmarks.plan_error", argv),
        rows,
        **facts,
    )
    print_table(rows)


if __name__ == "__main__":
    main()
