"""What becomes of small updates of a model whose weights lie on BF16's grid, as those of files do.

    python -m benchmarks.bf16_grid MODEL_DIR --text build/letters [--updates 20] [--lr 2e-5]

transformers trains the model in FP32 on worked answers (AdamW, a rate that falls to a tenth). After
some of the updates the held-out loss is taken with the FP32 weights, and with weights that were
rounded from them: to BF16 to nearest, to BF16 by fixed draws (`precision.bf16_rounding=dithered`),
and as `int8` and `unified` round the decoder's linear layers. `kept` is the share of FP32's
improvement that remains.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.eight_bits import rounded
from benchmarks.harness import Row, command_typed, print_table, write_results
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from jetrl.precision.quantize import dithered_bf16

EXAMPLES, HELD_OUT = 8, 24  # of an update, and held out
Rule = Callable[[str, Tensor], Tensor]


def in_linears(how: str) -> Rule:
    """Return the rounding of the decoder's linear layers; other weights are BF16 to nearest."""
    return lambda name, w: rounded(w, how if w.dim() > 1 and "_proj" in name else "bf16")


RULES: dict[str, Rule] = {
    "fp32": lambda _, w: w,
    "bf16": lambda _, w: rounded(w, "bf16"),
    "bf16_dithered": lambda name, w: (dithered_bf16(w, name) if w.dim() > 1 else w).float(),
    "int8": in_linears("int8 h64 1xK"),
    "unified": in_linears("e4m3 128x128"),
}


def examples(path: Path, count: int, tokenizer: Any) -> list[tuple[list[int], int]]:
    """Return token ids of prompts with their worked answers, and the length of each prompt."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines()[:count]:
        row = json.loads(line)
        turns = [{"role": "user", "content": row["prompt"]}]
        options = {"tokenize": False, "add_generation_prompt": True}
        prompt = tokenizer(tokenizer.apply_chat_template(turns, **options))["input_ids"]
        answer = tokenizer(row["demonstration"])["input_ids"] + [tokenizer.eos_token_id]
        found.append((prompt + answer, len(prompt)))
    return found


def loss(module: Any, batch: Sequence[tuple[list[int], int]], device: torch.device) -> Tensor:
    length = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in batch], device=device)
    place = torch.arange(length, device=device)
    ends = torch.tensor([[first, len(ids)] for ids, first in batch], device=device)
    targets = ids.masked_fill((place < ends[:, :1]) | (place >= ends[:, 1:]), -100)
    logits = module(ids, use_cache=False).logits[:, :-1]  # causal: the padding comes last
    return functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bf16_grid", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", help="a Hugging Face directory")
    parser.add_argument("--text", type=Path, default=Path("build/letters"))
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--every", type=int, default=5, help="updates between rows")
    parser.add_argument("--out", default="build/bench/bf16_grid.json")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    load: Any = AutoModelForCausalLM.from_pretrained
    module = load(args.model, dtype=torch.float32).to(device)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    train = examples(args.text / "train.jsonl", args.updates * EXAMPLES, tokenizer)
    held_out = examples(args.text / "test.jsonl", HELD_OUT, tokenizer)
    weights = dict(module.named_parameters())
    start = {name: w.detach().clone() for name, w in weights.items()}

    @torch.no_grad()
    def held_out_loss(rule: Rule) -> float:
        kept = {name: w.clone() for name, w in weights.items()}
        for name, w in weights.items():
            w.copy_(rule(name, w))
        batches = [held_out[i : i + 8] for i in range(0, len(held_out), 8)]
        total = sum(loss(module, b, device).item() * len(b) for b in batches) / len(held_out)
        for name, w in weights.items():
            w.copy_(kept[name])
        return total

    optimizer = torch.optim.AdamW(module.parameters(), betas=(0.9, 0.99), weight_decay=0)
    first, rows = {name: held_out_loss(rule) for name, rule in RULES.items()}, list[Row]()
    for number in range(args.updates):
        batch = train[number * EXAMPLES :][:EXAMPLES]
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (1 - 0.9 * number / args.updates)
        loss(module, batch, device).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (number + 1) % args.every and number + 1 < args.updates:
            continue
        moved = sum(int((w.bfloat16() != start[name]).sum()) for name, w in weights.items())
        row: Row = {"updates": number + 1}
        for name, rule in RULES.items():
            row[name] = round(held_out_loss(rule), 4)
            row[f"{name}_kept"] = round(
                (first[name] - row[name]) / (first["fp32"] - row["fp32"]), 3
            )
        row["moved"] = round(moved / sum(map(torch.numel, weights.values())), 4)
        rows.append(row)
    start_losses = {name: round(value, 4) for name, value in first.items()}
    facts = {"start": start_losses}
    command = command_typed("python -m benchmarks.bf16_grid", argv)
    write_results(args.out, "bf16_grid", command, rows, **facts)
    print_table(rows)


if __name__ == "__main__":
    main()
