"""The error of eight-bit formats on a pretrained model, by what shares a scale and by rotation.

    python -m benchmarks.eight_bits MODEL_DIR --text data/gsm8k/test.jsonl --out FILE.json

All linear layers of the decoder are rounded in plain PyTorch (quantize, dequantize, FP32 product).
A name such as `int8 h64 1xK | 1x128` has the format, the rotation, and the groups of weights and of
activations along K; K is the whole sum. `h64` multiplies both operands by a Hadamard matrix in
blocks of 64 along K, which leaves the product as it was and spreads outliers. Two tables, against
FP32: KL divergence per token, difference of the log-prob, share of tokens whose most likely next
token differs; and the relative error and cosine of the weight gradients of all linear layers.

With one scale per row of each operand, the sums of an INT8 product are integers over the whole K:
exact in any order, with any tile, on any GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import Row, command_typed, print_table, write_results
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

LIMITS = {"int8": 127.0, "e4m3": 448.0, "e5m2": 57344.0}
CASTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LENGTH = 512  # tokens of a sequence
GRADIENT_SEQUENCES = 8


@dataclass(frozen=True)
class Rounding:
    """How the operands of a product are rounded; a group of 0 is the whole dimension.

    Attributes:
        weight, x: Rows and columns that share a scale; None: not rounded.
        rotation: Size of the Hadamard blocks along K; 0: none.
    """

    format: str
    weight: tuple[int, int] | None
    x: tuple[int, int] | None
    rotation: int = 0

    def __str__(self) -> str:
        groups = [
            "-" if g is None else "x".join(str(n or "K") for n in g) for g in (self.weight, self.x)
        ]
        turned = f" h{self.rotation}" if self.rotation else ""
        return f"{self.format}{turned} {groups[0]} | {groups[1]}"


@dataclass(frozen=True)
class Flow:
    """The rounding of the three products of a linear layer; None: FP32."""

    forward: Rounding | None = None
    dgrad: Rounding | None = None
    wgrad: Rounding | None = None

    def __str__(self) -> str:
        parts = {"fprop": self.forward, "dgrad": self.dgrad, "wgrad": self.wgrad}
        if len(set(parts.values())) == 1:
            return f"all: {self.forward}"
        return "; ".join(f"{name}: {rounding}" for name, rounding in parts.items() if rounding)


@functools.cache
def hadamard(size: int, device: torch.device) -> Tensor:
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def rotate(x: Tensor, size: int) -> Tensor:
    """Multiply the last dimension by Hadamard blocks; one that they do not divide is padded."""
    padded = functional.pad(x, (0, -x.shape[-1] % size))
    return (padded.unflatten(-1, (-1, size)) @ hadamard(size, x.device)).flatten(-2)


def rounded(x: Tensor, format: str, group: tuple[int, int]) -> Tensor:
    """Quantize and dequantize x [R, C] with one scale per group."""
    rows, columns = (g or n for g, n in zip(group, x.shape, strict=True))
    padded = functional.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp_min(1e-12) / LIMITS[format]
    codes = blocks / scale
    codes = codes.round() if format == "int8" else codes.to(CASTS[format]).float()
    return (codes * scale).flatten(2, 3).flatten(0, 1)[: x.shape[0], : x.shape[1]]


def product(x: Tensor, weight: Tensor, how: Rounding | None) -> Tensor:
    """Return x [M, K] times weight [N, K] transposed, both rounded."""
    if how is None:
        return x @ weight.T
    if how.rotation:
        x, weight = rotate(x, how.rotation), rotate(weight, how.rotation)
    x = x if how.x is None else rounded(x, how.format, how.x)
    weight = weight if how.weight is None else rounded(weight, how.format, how.weight)
    return x @ weight.T


class RoundedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, flow: Flow) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.flow = flow
        return product(x.flatten(0, -2), weight, flow.forward).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        dy = grads[0].flatten(0, -2)
        dx = product(dy, weight.T.contiguous(), ctx.flow.dgrad)
        rows = x.flatten(0, -2).T.contiguous()
        return dx.view(x.shape), product(dy.T.contiguous(), rows, ctx.flow.wgrad), None


class Model:
    """A pretrained model in FP32 whose decoder's linear layers round as `flow` says."""

    def __init__(self, path: str, device: torch.device) -> None:
        self.flow = Flow()
        module: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.module = module.to(device)
        self.linears = [
            module
            for name, module in self.module.named_modules()
            if isinstance(module, torch.nn.Linear) and "lm_head" not in name
        ]
        for linear in self.linears:
            setattr(linear, "forward", self._forward_of(linear))  # noqa: B010, a method to mypy

    def _forward_of(self, linear: torch.nn.Linear) -> Callable[[Tensor], Tensor]:
        return lambda x: RoundedLinear.apply(x, linear.weight, self.flow)

    @torch.no_grad()
    def logprobs(self, ids: Tensor) -> Tensor:
        return self.module(ids[None]).logits[0].log_softmax(-1)

    def gradients(self, ids: Tensor) -> Tensor:
        """Return the gradients of all linear weights, one after the other, float32."""
        self.module.zero_grad()
        logits = self.module(ids).logits[:, :-1].flatten(0, 1)
        functional.cross_entropy(logits, ids[:, 1:].flatten()).backward()
        return torch.cat(
            [g.flatten() for one in self.linears if (g := one.weight.grad) is not None]
        )


def sequences(path: str, text: Path, tokens: int, device: torch.device) -> Tensor:
    """Return token ids [sequences, LENGTH] of questions and answers through the chat template."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids: list[int] = []
    for line in text.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        roles = (("user", row["question"]), ("assistant", row["answer"]))
        turns = [{"role": role, "content": content} for role, content in roles]
        ids += tokenizer(tokenizer.apply_chat_template(turns, tokenize=False))["input_ids"]
        if len(ids) >= tokens:
            break
    return torch.tensor(ids[: len(ids) // LENGTH * LENGTH], device=device).view(-1, LENGTH)


def forward_rows(model: Model, ids: Tensor, roundings: Iterable[Rounding]) -> list[Row]:
    model.flow = Flow()
    exact = [model.logprobs(one) for one in ids]
    rows = []
    for rounding in roundings:
        model.flow = Flow(rounding)
        sums = torch.zeros(3, dtype=torch.float64, device=ids.device)
        for one, truth in zip(ids, exact, strict=True):
            found = model.logprobs(one)
            drawn = (truth - found)[:-1].gather(1, one[1:, None])
            kl = (truth.exp() * (truth - found)).sum()
            greedy = (truth.argmax(-1) != found.argmax(-1)).sum()
            sums += torch.stack([kl, drawn.abs().sum(), greedy]).double()
        kl, error, greedy = (sums / ids.numel()).tolist()
        row = {"kl": round(kl, 6), "logprob_error": round(error, 5), "greedy": round(greedy, 5)}
        rows.append({"forward": str(rounding), **row})
    return rows


def gradient_rows(model: Model, ids: Tensor, flows: Iterable[Flow]) -> list[Row]:
    model.flow = Flow()
    exact = model.gradients(ids)
    rows = []
    for flow in flows:
        model.flow = flow
        found = model.gradients(ids)
        error = ((found - exact).norm() / exact.norm()).item()
        cosine = functional.cosine_similarity(found.double(), exact.double(), 0).item()
        rows.append({"flow": str(flow), "error": round(error, 4), "cosine": round(cosine, 5)})
    return rows


SQUARE, GROUP, ROW = (128, 128), (1, 128), (1, 0)
FORWARDS = [
    Rounding("e4m3", SQUARE, GROUP),
    Rounding("e4m3", SQUARE, GROUP, 64),
    Rounding("e4m3", (1, 32), (1, 32)),
    Rounding("int8", SQUARE, GROUP),
    Rounding("int8", (1, 32), (1, 32)),
    *(Rounding("int8", group, GROUP, 64) for group in (SQUARE, (64, 64), GROUP)),
    *(Rounding("int8", ROW, ROW, size) for size in (0, 16, 32, 64, 128, 256)),
    *(Rounding(f, w, x) for f in ("e4m3", "int8") for w, x in ((SQUARE, None), (None, GROUP))),
    *(Rounding("int8", w, x, 64) for w, x in ((ROW, None), (None, ROW), (None, GROUP))),
]


def flows() -> list[Flow]:
    papers, squares, rows = FORWARDS[0], Rounding("int8", SQUARE, GROUP, 64), None
    rows = Rounding("int8", ROW, ROW, 64)
    apart = [Rounding("e4m3", SQUARE, GROUP), Rounding("int8", ROW, ROW), rows]
    apart.append(Rounding("int8", (1, 1024), (1, 1024), 64))
    return [
        *(Flow(one) for one in (papers, squares, rows)),
        *(Flow(one, one, one) for one in (papers, squares, rows)),
        *(Flow(dgrad=one) for one in apart[:3]),
        *(Flow(wgrad=one) for one in apart),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eight_bits", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", help="a Hugging Face directory")
    parser.add_argument("--text", type=Path, default=Path("data/gsm8k/test.jsonl"))
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--out", default="build/bench/eight_bits.json")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    model = Model(args.model, device)
    ids = sequences(args.model, args.text, args.tokens, device)
    rows = forward_rows(model, ids, FORWARDS)
    rows += gradient_rows(model, ids[:GRADIENT_SEQUENCES], flows())
    facts = {"model": Path(args.model).name, "tokens": ids.numel()}
    command = command_typed("python -m benchmarks.eight_bits", argv)
    write_results(args.out, "eight_bits", command, rows, **facts)
    print_table([row for row in rows if "kl" in row])
    print_table([row for row in rows if "kl" not in row])


if __name__ == "__main__":
    main()
