"""Train a small model that sees drawn shapes, by supervised training, as a start for GRPO.

    python -m benchmarks.shapes_start build/smollm2 build/shapes-start      one GPU, minutes
    python -m benchmarks.shapes_start tiny build/shapes-tiny             one CPU core, minutes

The first argument is a llama with its tokenizer (docs/smollm2.md), or `tiny`: three layers of
random weights with a token per word, a small tower, and one kind of question. The image tower is a
SigLIP of random weights, joined by a pixel shuffle to one feature per cell of the canvas, as in
Idefics3. transformers trains all of it on the training prompts of the task `shapes`, by cross
entropy of the answer and its end. Of these answers 40% are wrong, so that the model learns to see
and yet errs: reinforcement learning has something to improve. The start is done when samples at
temperature 1 answer a share of `--until` of the test prompts right. It writes a model directory
that jetrl and transformers open, and `start.json` in it.

One seed gives the same weights on one machine, as far as torch has deterministic kernels; it warns
of those that it has not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import command_typed, environment
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    PreTrainedTokenizerBase,
)
from transformers.models.idefics3 import Idefics3ImageProcessorPil, Idefics3Processor

from jetrl.errors import UserError
from jetrl.models.tiny import make_tiny
from jetrl.models.vision_tiles import TileReader
from jetrl.tasks.shapes import Shapes
from jetrl.types import IMAGE_MARK, Prompt
from jetrl.types.images import decoded

OPTIONS: dict[str, Any] = {"count": 20_000, "ask": ["color", "place"], "most": 3}
TINY_OPTIONS: dict[str, Any] = {"count": 3000, "size": 48, "ask": ["color"], "most": 2}
_SIDE = 3  # features of a side, one for each cell of the canvas
_SCALE = 2  # patches of a feature's side
_IGNORED = -100  # the label of a token without a loss
_ROWS = 128  # of the embedding: a multiple, as in SmolVLM


@dataclass(frozen=True)
class Encoded:
    """Prompts with their answers as tensors on the device.

    Attributes:
        token_ids: int64 [N, T]: prompt, answer and end, padded on the right.
        attended: int64 [N, T]: 0 for padding.
        labels: int64 [N, T]: the token in the answer and its end, else -100.
        pixels: float32 [N, 1, 3, side, side].
    """

    token_ids: Tensor
    attended: Tensor
    labels: Tensor
    pixels: Tensor

    def rows(self, chosen: Tensor) -> Encoded:
        fields = (self.token_ids, self.attended, self.labels, self.pixels)
        return Encoded(*(field[chosen] for field in fields))


def build(
    language: Path, size: int, width: int, layers: int
) -> tuple[Idefics3ForConditionalGeneration, Idefics3Processor]:
    """Return a model with a random tower for images of `size` pixels, and its processor.

    Its language model has the weights and the tokenizer of a llama.
    """
    llama = AutoModelForCausalLM.from_pretrained(language, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(language)
    tokenizer.add_special_tokens({"additional_special_tokens": [*TileReader.tokens]})
    tokenizer.chat_template = None  # that of a llama has no place for an image
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    llama.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=_ROWS, mean_resizing=False)
    patch = size // (_SCALE * _SIDE)
    tower = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, width // 64),
        "image_size": size,
        "patch_size": patch,
    }
    settings = llama.config.to_dict()
    settings.pop("_name_or_path", None)
    config = Idefics3Config(
        vision_config=tower,
        text_config=settings,
        scale_factor=_SCALE,
        image_token_id=tokenizer.get_vocab()[TileReader.mark],
        tie_word_embeddings=llama.config.tie_word_embeddings,
    )
    config._attn_implementation = "eager"  # whose backward repeats
    model = Idefics3ForConditionalGeneration(config)
    model.model.text_model.load_state_dict(llama.model.state_dict())
    model.lm_head.load_state_dict(llama.lm_head.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    edge = {"longest_edge": size}
    images = Idefics3ImageProcessorPil(do_image_splitting=False, size=edge, max_image_size=edge)
    return model, Idefics3Processor(images, tokenizer, image_seq_len=_SIDE**2)


def tiny_llama(folder: Path, task: Shapes, seed: int) -> Path:
    """Write a llama of random weights whose tokens are the words of the task; return its path."""
    words = folder / "words.txt"
    prompts = task.prompts("train")
    lines = {f"{prompt.text}{prompt.answer}\n".replace(IMAGE_MARK, "") for prompt in prompts}
    words.write_text("".join(sorted(lines)), encoding="utf-8")
    return make_tiny(
        folder / "llama",
        "llama",
        num_layers=3,
        tokenizer="bpe",
        text_files=words,
        max_position_embeddings=256,
        seed=seed,
    )


def with_mistakes(prompts: Sequence[Prompt], share: float, seed: int) -> list[Prompt]:
    """Return the prompts with another answer to the same kind of question in `share` of them."""
    answers: dict[Any, set[str]] = {}
    for prompt in prompts:
        answers.setdefault(prompt.metadata["ask"], set()).add(str(prompt.answer))
    draw = random.Random(seed)
    made = []
    for prompt in prompts:
        wrong = sorted(answers[prompt.metadata["ask"]] - {prompt.answer})
        careless = draw.random() < share
        made.append(replace(prompt, answer=draw.choice(wrong)) if careless else prompt)
    return made


def encoded(processor: Idefics3Processor, prompts: Sequence[Prompt], device: str) -> Encoded:
    """Encode prompts of the task `shapes` in its format `text`."""
    tokenizer: PreTrainedTokenizerBase = processor.tokenizer
    rows: list[tuple[list[int], list[int]]] = []  # tokens and labels
    pixels = []
    for prompt in prompts:
        pictures = [decoded(image) for image in prompt.images]
        read = processor(text=prompt.text, images=[pictures], return_tensors="pt")
        asked = read["input_ids"][0].tolist()
        answer = tokenizer.encode(prompt.answer, add_special_tokens=False)
        answer.append(tokenizer.eos_token_id)
        rows.append((asked + answer, [_IGNORED] * len(asked) + answer))
        pixels.append(read["pixel_values"][0])
    longest = max(len(token_ids) for token_ids, _ in rows)

    def padded(values: list[int], filler: int) -> list[int]:
        return values + [filler] * (longest - len(values))

    made = Encoded(
        token_ids=torch.tensor([padded(ids, tokenizer.pad_token_id) for ids, _ in rows]),
        attended=torch.tensor([padded([1] * len(ids), 0) for ids, _ in rows]),
        labels=torch.tensor([padded(labels, _IGNORED) for _, labels in rows]),
        pixels=torch.stack(pixels),
    )
    return Encoded(*(field.to(device) for field in vars(made).values()))


def answer_logprobs(model: Any, batch: Encoded) -> Tensor:
    """Return the log-prob of each prompt's answer with its end, float32 [N]."""
    device = batch.token_ids.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        hidden = model.model(
            input_ids=batch.token_ids, attention_mask=batch.attended, pixel_values=batch.pixels
        ).last_hidden_state
        answered = batch.labels[:, 1:] != _IGNORED
        logits = model.lm_head(hidden[:, :-1][answered])
    losses = nn.functional.cross_entropy(
        logits.float(), batch.labels[:, 1:][answered], reduction="none"
    )
    row = answered.nonzero()[:, 0]
    return -torch.zeros(len(batch.labels), device=device).index_add(0, row, losses)


@torch.no_grad()
def accuracy(model: Any, tests: Encoded) -> float:
    """Return the mean probability of the right answer: the accuracy of samples, without noise."""
    model.eval()
    parts = torch.arange(len(tests.labels)).split(100)
    found = torch.cat([answer_logprobs(model, tests.rows(part)) for part in parts])
    model.train()
    return float(found.exp().mean())


def train(
    model: Any, training: Encoded, tests: Encoded, args: argparse.Namespace
) -> dict[str, Any]:
    """Train until the accuracy is that of `args.until`; return what was reached.

    Raises UserError if `args.updates` updates do not suffice.
    """
    language = {id(weight) for weight in model.model.text_model.parameters()}
    language |= {id(weight) for weight in model.lm_head.parameters()}
    seeing = [weight for weight in model.parameters() if id(weight) not in language]
    speaking = [weight for weight in model.parameters() if id(weight) in language]
    groups = [{"params": seeing, "lr": args.tower_lr}, {"params": speaking, "lr": args.lr}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
    order = torch.Generator().manual_seed(args.seed)
    number, started = len(training.labels), time.perf_counter()
    curve: list[list[float]] = []
    chosen = torch.empty(0, dtype=torch.int64)
    for update in range(1, args.updates + 1):
        if len(chosen) < args.batch:
            chosen = torch.cat([chosen, torch.randperm(number, generator=order)])
        loss = -answer_logprobs(model, training.rows(chosen[: args.batch])).mean()
        chosen = chosen[args.batch :]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad()
        if update % args.every:
            continue
        reached, seconds = accuracy(model, tests), time.perf_counter() - started
        curve.append([update, round(loss.item(), 4), round(reached, 4)])
        print(
            f"update {update:5}  loss {loss.item():.4f}  accuracy {reached:.1%}  {seconds:.0f} s",
            flush=True,
        )
        if reached >= args.until:
            return {"accuracy": round(reached, 4), "updates": update, "curve": curve}
    raise UserError(
        f"after {args.updates} updates the accuracy is below --until {args.until}: raise --updates"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("language", help="a llama's directory, or tiny")
    parser.add_argument("out", type=Path, help="the directory to write")
    parser.add_argument("--options", type=json.loads, help="task.options, as JSON")
    parser.add_argument("--mistakes", type=float, default=0.4, help="share of wrong answers")
    parser.add_argument("--until", type=float)
    parser.add_argument("--updates", type=int, default=6000, help="after which it has failed")
    parser.add_argument("--every", type=int, default=20, help="updates between evaluations")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--lr", type=float, help="of the language model")
    parser.add_argument("--tower-lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if args.device != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else products do not repeat
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(args.seed)
    tiny = args.language == "tiny"
    options = args.options or (TINY_OPTIONS if tiny else OPTIONS)
    args.lr = args.lr or (1e-3 if tiny else 3e-4)
    args.batch = args.batch or (32 if tiny else 128)
    args.until = args.until or (0.5 if tiny else 0.52)
    width, layers = (64, 2) if tiny else (192, 4)
    task = Shapes(**options)
    with tempfile.TemporaryDirectory() as scratch:
        language = tiny_llama(Path(scratch), task, args.seed) if tiny else Path(args.language)
        model, processor = build(language, task.size, width, layers)
    model.to(args.device).train()
    prompts = with_mistakes(task.prompts("train"), args.mistakes, args.seed)
    training, tests = (
        encoded(processor, each, args.device) for each in (prompts, task.prompts("test"))
    )
    reached = train(model, training, tests, args)
    model.bfloat16().save_pretrained(args.out)
    processor.tokenizer.save_pretrained(args.out)
    processor.image_processor.save_pretrained(args.out)
    facts = {"command": command_typed("python -m benchmarks.shapes_start", argv), **environment()}
    text = json.dumps({**facts, "task_options": options, **reached}, indent=1)
    (args.out / "start.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
