"""Compare formats for AdamW's moments by how the master weights move, for docs/benchmarks.md.

    python -m benchmarks.optimizer_states --out build/optimizer_states.json    minutes, on a CPU
    pip install torchao                                   for its two rows (version printed)

The demo is run with its gradients recorded: 100 updates of its supervised warm-up from random
weights, and 100 of its reinforcement learning. A third source is noise about a mean, with channels
30 times larger than others. Each format then makes 100 updates of every matrix at a learning rate
of 1e-6 from the same gradients, and ||dW - dW'|| / ||dW'|| is printed, dW' being AdamW in float64.
Master weights are float32 but in the last row. Prints a line for each format and writes JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import json
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from benchmarks.harness import write_results
from torch import Tensor

import jetrl
from jetrl.kernels.adamw import adamw_ref_
from jetrl.kernels.adamw_scalars import adamw_scalars
from jetrl.precision import dequantize, quantize
from jetrl.training.optimizer import Optimizer

STEPS, LR, EPS, GROUP = 100, 1e-6, 1e-8, 128
BETAS = ((0.9, 0.99), (0.9, 0.999))
Gradients = list[Tensor]
Source = list[tuple[Tensor, Gradients]]  # of each matrix: itself, and the gradients of each update


def demo_gradients(skip: int, words: list[str]) -> Source:
    """The clipped gradients of `STEPS` updates of the demo, after `skip` others."""
    seen: dict[str, tuple[Tensor, Gradients]] = {}
    apply, updates = Optimizer.apply, 0

    def record(self: Optimizer, total_norm: Tensor) -> None:
        nonlocal updates
        if skip <= updates < skip + STEPS:
            clip = (self.settings.grad_clip / (total_norm + 1e-6)).clamp(max=1.0)
            for name, p in self.masters.items():
                if p.ndim == 2:
                    kept = seen.setdefault(name, (p.detach().clone(), []))
                    kept[1].append(p.grad * clip)
        updates += 1
        apply(self, total_norm)

    Optimizer.apply = record
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        jetrl.train(
            jetrl.load_config("demo", [f"run.dir={folder}", "report.enabled=false", *words])
        )
    Optimizer.apply = apply
    return list(seen.values())


def noise() -> Source:
    g = torch.Generator().manual_seed(0)
    shape = (256, 512)
    size = torch.exp(0.7 * (torch.randn(256, 1, generator=g) + torch.randn(1, 512, generator=g)))
    size[:, ::64] *= 30
    mean = 0.2 * torch.randn(shape, generator=g)
    gradients = [1e-5 * size * (mean + torch.randn(shape, generator=g)) for _ in range(STEPS)]
    return [(0.02 * torch.randn(shape, generator=g), gradients)]


def adamw(w: Tensor, gradients: Gradients, betas: tuple[float, float], keep: Callable, carry: bool):
    """Return the weight after plain AdamW steps whose moments are stored by a function."""
    w = w.clone()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    b1, b2 = betas
    for t, g in enumerate(gradients, 1):
        m = b1 * m + (1 - b1) * g.to(w.dtype)
        v = b2 * v + (1 - b2) * g.to(w.dtype).square()
        denominator = (v / (1 - b2**t)).sqrt() + EPS
        update = LR * m / (1 - b1**t) / denominator
        kept, v = keep(m, v, t)
        if carry:
            ahead = sum(b1**k / (1 - b1 ** (t + k)) for k in range(1, 100))
            update -= LR * ahead * (kept - m) / denominator
        m = kept
        w -= update
    return w


def compact(
    w: Tensor, gradients: Gradients, betas: tuple[float, float], carry: bool = True
) -> Tensor:
    w = w.clone()
    ratio, root = torch.zeros_like(w, dtype=torch.uint8), torch.zeros_like(w, dtype=torch.int16)
    for t, g in enumerate(gradients, 1):
        scalars = adamw_scalars(t, lambda k: LR, betas, EPS, 0.0)
        if not carry:
            scalars = scalars._replace(carry=0.0)
        adamw_ref_(w, g, ratio, root, torch.tensor(1.0), scalars)
    return w


def exact(m: Tensor, v: Tensor, t: int) -> tuple[Tensor, Tensor]:
    return m, v


def bfloat16(m: Tensor, v: Tensor, t: int) -> tuple[Tensor, Tensor]:
    return m.bfloat16().float(), v.bfloat16().float()


def fp8(m: Tensor, v: Tensor, t: int) -> tuple[Tensor, Tensor]:
    """Quantize m and the root of v by jetrl's quantizer, in groups of 1 x 128."""
    return dequantize(quantize(m)), dequantize(quantize(v.sqrt())).square()


def eight_bits(m: Tensor, v: Tensor, t: int, along: int) -> tuple[Tensor, Tensor]:
    """Store m and v in 8 + 8 bits, by the best form that was found.

    m is as in the compact states, without the bit for its sign; v is logarithmic over 2**-9 to 2**7
    times the mean of its group of 128 along a dimension, which is held in float32, with a dither.
    """
    if along == 0:
        kept = eight_bits(m.T.contiguous(), v.T.contiguous(), t, 1)
        return kept[0].T, kept[1].T
    mean = v.reshape(-1, GROUP).mean(1, keepdim=True).expand(-1, GROUP).reshape(v.shape)
    elements = torch.arange(v.numel()).view(v.shape)
    dither = ((elements * 0xC13FA9A9 + t * 0x9E3779B9) % 2**32).double() / 2**32
    code = ((v.double() / mean).log2() * 16 + 144 + dither).floor().clamp(0, 255)
    held = (((code - 144) / 16).exp2() * mean).float()
    bound = 2.4 * held.sqrt()
    size = ((m.abs() / bound).sqrt() * 127).round().clamp(max=127) / 127
    return m.sign() * size.square() * bound, held


def torchao_step(name: str) -> Callable:
    import torchao.optim

    def run(w: Tensor, gradients: Gradients, betas: tuple[float, float]) -> Tensor:
        p = torch.nn.Parameter(w.clone())
        make = getattr(torchao.optim, name)
        optimizer = make([p], lr=LR, betas=betas, eps=EPS, weight_decay=0.0)
        compiled, torch.compile = torch.compile, lambda function, **_: function
        for g in gradients:
            p.grad = g.clone()
            optimizer.step()
        torch.compile = compiled
        return p.detach()

    return run


def with_moments(keep: Callable, carry: bool = False) -> Callable:
    return lambda w, gradients, betas: adamw(w, gradients, betas, keep, carry)


def bfloat16_masters(w: Tensor, gradients: Gradients, betas: tuple[float, float]) -> Tensor:
    p = torch.nn.Parameter(w.bfloat16())
    optimizer = torch.optim.AdamW([p], lr=LR, betas=betas, eps=EPS, weight_decay=0.0)
    for g in gradients:
        p.grad = g.bfloat16()
        optimizer.step()
    return p.detach().double() - w.bfloat16() + w.double()


def formats() -> dict[str, tuple[str, Callable]]:
    """Return the bytes a parameter and the function that runs each format, by name."""
    rows = {
        "float32": ("8", with_moments(exact)),
        "BF16, to nearest": ("4", with_moments(bfloat16)),
        "`compact`": ("3", compact),
        "the same, errors of m not carried": ("3", functools.partial(compact, carry=False)),
        "FP8 by our quantizer, 1 x 128": ("2.06", with_moments(fp8)),
        "FP8 likewise, errors of m carried": ("2.06", with_moments(fp8, True)),
        "8 + 8 bits, v in groups of 128 along K": (
            "2.03",
            with_moments(lambda m, v, t: eight_bits(m, v, t, 1), True),
        ),
        "8 + 8 bits, v in groups of 128 along N": (
            "2.03",
            with_moments(lambda m, v, t: eight_bits(m, v, t, 0), True),
        ),
    }
    try:
        version = importlib.metadata.version("torchao")
    except importlib.metadata.PackageNotFoundError:
        print("torchao is not installed: without its rows", file=sys.stderr)
    else:
        for name in ("AdamW8bit", "AdamWFp8"):
            rows[f"torchao {version} `{name}`"] = ("2.03", torchao_step(name))
    rows["float32 moments, BF16 masters"] = ("8", bfloat16_masters)
    return rows


def error(source: Source, run: Callable, betas: tuple[float, float]) -> float:
    """Percent, over all matrices together."""
    off = total = 0.0
    for w, gradients in source:
        true = adamw(w.double(), gradients, betas, exact, False) - w.double()
        moved = run(w, gradients, betas).double() - w.double()
        off += float((moved - true).square().sum())
        total += float(true.square().sum())
    return 100 * math.sqrt(off / total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/optimizer_states.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    warm_up = ["sft.steps=100", "sft.until=none", "loop.steps=0", "eval.every=0"]
    learning = ["sft.steps=600", "sft.until=none", "loop.steps=50", "eval.every=0"]
    sources = {
        "warm_up": demo_gradients(0, warm_up),
        "rl": demo_gradients(600, learning),
        "noise": noise(),
    }
    columns = [(name, betas) for betas in BETAS for name in sources]
    rows = []
    for name, (size, run) in formats().items():
        percent = {
            f"{source}, {betas[1]}": round(error(sources[source], run, betas), 2)
            for source, betas in columns
        }
        rows.append({"moments": name, "bytes": float(size), "percent": percent})
        print(json.dumps(rows[-1]), flush=True)
    command = "python -m benchmarks.optimizer_states"
    write_results(args.out, "optimizer_states", command, rows, device="CPU")


if __name__ == "__main__":
    main()
