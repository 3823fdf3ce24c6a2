"""Train a small model that sees drawn shapes, by supervised training, as a start for GRPO.

    python -m benchmarks.shapes_start build/smollm2 build/shapes-start      one GPU, minutes
    python -m benchmarks.shapes_start tiny build/shapes-tiny             one CPU core, minutes

The first argument is a llama with its tokenizer (docs/smollm2.md), or `tiny`: three layers of
random weights with a token per word, a small tower, and one kind of question. The image tower is a
SigLIP of random weights, joined by a pixel shuffle to one feature per cell of the canvas, as in
Idefics3. transformers trains all of it on the training prompts of the task `shapes`, by cross
entropy of the answer and its end, until it answers 80% of the test prompts right, in samples at
temperature 1. Then 40% of the answers are wrong, until it answers less than 55% right: it sees and
yet errs, so reinforcement learning has something to improve. It writes a model directory that jetrl
and transformers open, and `start.json` in it.

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
from collections.abc import Callable, Iterable, Sequence
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
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

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


def read(processor: Idefics3Processor, prompts: Sequence[Prompt]) -> tuple[list[list[int]], Tensor]:
    """Return the token ids of prompts, and their pixels, float32 [N, 1, 3, side, side]."""
    token_ids, pixels = [], []
    for prompt in prompts:
        pictures = [decoded(image) for image in prompt.images]
        made = processor(text=prompt.text, images=[pictures], return_tensors="pt")
        token_ids.append(made["input_ids"][0].tolist())
        pixels.append(made["pixel_values"][0])
    return token_ids, torch.stack(pixels)


def answered(
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[Sequence[int]],
    pixels: Tensor,
    prompts: Sequence[Prompt],
) -> Encoded:
    """Return prompts, as `read` encodes them, with answers, on the device of the pixels."""
    rows: list[tuple[list[int], list[int]]] = []  # tokens and labels
    for token_ids, prompt in zip(asked, prompts, strict=True):
        answer = tokenizer.encode(str(prompt.answer), add_special_tokens=False)
        answer.append(tokenizer.get_vocab()[tokenizer.eos_token])
        rows.append(([*token_ids, *answer], [_IGNORED] * len(token_ids) + answer))
    longest = max(len(token_ids) for token_ids, _ in rows)

    def padded(rows: Iterable[Sequence[int]], filler: int) -> Tensor:
        filled = [[*row, *[filler] * (longest - len(row))] for row in rows]
        return torch.tensor(filled, device=pixels.device)

    return Encoded(
        token_ids=padded((token_ids for token_ids, _ in rows), 0),
        attended=padded(([1] * len(token_ids) for token_ids, _ in rows), 0),
        labels=padded((labels for _, labels in rows), _IGNORED),
        pixels=pixels,
    )


def answer_logprobs(model: Any, batch: Encoded) -> Tensor:
    """Return the log-prob of each prompt's answer with its end, float32 [N]."""
    device = batch.token_ids.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        hidden = model.model(
            input_ids=batch.token_ids, attention_mask=batch.attended, pixel_values=batch.pixels
        ).last_hidden_state
        trained = batch.labels[:, 1:] != _IGNORED
        logits = model.lm_head(hidden[:, :-1][trained])
    losses = nn.functional.cross_entropy(
        logits.float(), batch.labels[:, 1:][trained], reduction="none"
    )
    row = trained.nonzero()[:, 0]
    return -torch.zeros(len(batch.labels), device=device).index_add(0, row, losses)


@torch.no_grad()
def accuracy(model: Any, tests: Encoded) -> float:
    """Return the mean probability of the right answer: the accuracy of samples, without noise."""
    model.eval()
    parts = torch.arange(len(tests.labels)).split(100)
    found = torch.cat([answer_logprobs(model, tests.rows(part)) for part in parts])
    model.train()
    return float(found.exp().mean())


class Training:
    """Supervised training of all parameters, with one optimizer for all its phases.

    Attributes:
        curve: Update, loss and accuracy at each evaluation.
    """

    def __init__(self, model: Any, tests: Encoded, args: argparse.Namespace) -> None:
        self._model, self._tests, self._args = model, tests, args
        language = {id(weight) for weight in model.model.text_model.parameters()}
        language |= {id(weight) for weight in model.lm_head.parameters()}
        seeing = [weight for weight in model.parameters() if id(weight) not in language]
        speaking = [weight for weight in model.parameters() if id(weight) in language]
        groups = [{"params": seeing, "lr": args.tower_lr}, {"params": speaking, "lr": args.lr}]
        self._optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
        self._warm_up = torch.optim.lr_scheduler.LinearLR(self._optimizer, 0.1, total_iters=20)
        self._order = torch.Generator().manual_seed(args.seed)
        self._updates, self._began = 0, time.perf_counter()
        self.curve: list[tuple[int, float, float]] = []

    def until(self, prompts: Encoded, done: Callable[[float], bool], every: int) -> None:
        """Train on the prompts until the tests' accuracy, after `every` updates, is as asked.

        Raises UserError if `args.updates` updates in all do not suffice.
        """
        chosen = torch.empty(0, dtype=torch.int64)
        while self._updates < self._args.updates:
            if len(chosen) < self._args.batch:
                shuffled = torch.randperm(len(prompts.labels), generator=self._order)
                chosen = torch.cat([chosen, shuffled])
            loss = self._update(prompts.rows(chosen[: self._args.batch]))
            chosen = chosen[self._args.batch :]
            if self._updates % every == 0 and done(self._evaluated(loss)):
                return
        raise UserError(
            f"after {self._updates} updates the accuracy is {self.curve[-1][-1]:.1%}, and not yet "
            "what --sees and --until ask for: raise --updates"
        )

    def _update(self, batch: Encoded) -> float:
        loss = -answer_logprobs(self._model, batch).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._warm_up.step()
        self._optimizer.zero_grad()
        self._updates += 1
        return loss.item()

    def _evaluated(self, loss: float) -> float:
        reached, seconds = accuracy(self._model, self._tests), time.perf_counter() - self._began
        self.curve.append((self._updates, round(loss, 4), round(reached, 4)))
        line = f"update {self._updates:5}  loss {loss:.4f}  accuracy {reached:.1%}"
        print(f"{line}  {seconds:.0f} s", flush=True)
        return reached


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("language", help="a llama's directory, or tiny")
    parser.add_argument("out", type=Path, help="the directory to write")
    parser.add_argument("--options", type=json.loads, help="task.options, as JSON")
    parser.add_argument("--sees", type=float, default=0.8, help="accuracy before mistakes")
    parser.add_argument("--mistakes", type=float, default=0.4, help="share of wrong answers")
    parser.add_argument("--until", type=float, default=0.55, help="accuracy of the start")
    parser.add_argument("--updates", type=int, default=6000, help="after which it has failed")
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
    width, layers = (64, 2) if tiny else (192, 4)
    task = Shapes(**options)
    with tempfile.TemporaryDirectory() as scratch:
        language = tiny_llama(Path(scratch), task, args.seed) if tiny else Path(args.language)
        model, processor = build(language, task.size, width, layers)
    model.to(args.device).train()
    prompts = task.prompts("train")
    asked, pixels = read(processor, prompts)
    pixels, tokenizer = pixels.to(args.device), processor.tokenizer
    right = answered(tokenizer, asked, pixels, prompts)
    careless = with_mistakes(prompts, args.mistakes, args.seed)
    wrong = answered(tokenizer, asked, pixels, careless)
    held_out = task.prompts("test")
    asked, pixels = read(processor, held_out)
    tests = answered(tokenizer, asked, pixels.to(args.device), held_out)
    training = Training(model, tests, args)
    training.until(right, lambda reached: reached >= args.sees, every=20)
    training.until(wrong, lambda reached: reached <= args.until, every=2)
    model.bfloat16().save_pretrained(args.out)
    processor.tokenizer.save_pretrained(args.out)
    processor.image_processor.save_pretrained(args.out)
    facts = {"command": command_typed("python -m benchmarks.shapes_start", argv), **environment()}
    updates, _, reached = training.curve[-1]
    facts |= {"task_options": options, "accuracy": reached, "updates": updates}
    text = json.dumps({**facts, "curve": training.curve}, indent=1)
    (args.out / "start.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
