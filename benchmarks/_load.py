"""The load of a training step, and the floating-point operations that a model needs for it.

FLOPs are the model's, not the machine's: 2 for each multiply and add of the linear layers, of the
output projection at sampled tokens alone, and of the causal half of attention; backward takes twice
the forward of a product and 2.5 times that of attention. What is done twice (recomputed layers,
logits made again) counts once.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jetrl.models.families import ModelConfig, parameter_shapes
from jetrl.types import Completion, Prompt, Sample, Score

# Cases by name, as `load_text` reads them.
LOADS = {
    "8": ("1x8x128x1024",),
    "64": ("8x8x256x8192",),
    "grpo": ("64x8x256x8192x1500",),
    # A quarter of its sequences at half of its lengths.
    "tail": ("16x8x256x4096x750",),
    "256": ("32x8x256x2048",),
    # 64 sequences at the mean context of the load 64, for an eighth of its tokens.
    "64-part": ("64x1x3584x1024",),
    # 216,000 tokens at batches of 1 to 512 and contexts to 32k.
    "exact": (
        "1x1x30000x2000",
        "2x4x15000x1000",
        "4x8x7000x700",
        "8x8x1500x600",
        "16x8x500x400",
        "32x8x150x200",
        "64x8x60x70",
    ),
}
TAILED = ("grpo", "tail")
_SIGMA = 0.8  # of the logarithm of lengths with a tail


@dataclass(frozen=True)
class Load:
    """The load of a step: prompts of one length, each with completions.

    Completions have one length, or lengths with a long tail: drawn from a log-normal distribution
    whose logarithm has a standard deviation of 0.8. The first completions of a load with more
    prompts have the same lengths.

    Attributes:
        prompts: The number of prompts.
        samples: Completions of each prompt.
        prompt_length: Tokens of a prompt.
        response_length: Tokens of a completion; with a tail, of the longest that there can be.
        mean_length: The mean of lengths with a tail, before they are cut; 0: no tail.
    """

    prompts: int
    samples: int
    prompt_length: int
    response_length: int
    mean_length: int = 0

    @property
    def sequences(self) -> int:
        """The number of completions."""
        return self.prompts * self.samples

    @property
    def length(self) -> int:
        """The tokens of a sequence, of the longest that there can be."""
        return self.prompt_length + self.response_length

    @property
    def tokens(self) -> int:
        """The tokens of all sequences, which are trained on."""
        return self.sequences * self.prompt_length + self.drawn

    @property
    def drawn(self) -> int:
        """The tokens of all completions."""
        return sum(self.response_lengths())

    @property
    def most_held(self) -> int:
        """The most tokens that sequences hold at once where all begin together."""
        lengths = np.sort(self.response_lengths())
        running = np.arange(self.sequences, 0, -1)
        return int((running * (self.prompt_length + lengths)).max())

    def __str__(self) -> str:
        tail = f", log-normal with a mean of {self.mean_length}" if self.mean_length else ""
        return (
            f"{self.prompts} prompts x {self.samples} samples, {self.prompt_length} + "
            f"{self.response_length} tokens{tail}"
        )

    def response_lengths(self, seed: int | np.random.Generator = 0) -> list[int]:
        """Return the tokens of each completion, those of a prompt side by side."""
        if not self.mean_length:
            return [self.response_length] * self.sequences
        center = math.log(self.mean_length) - _SIGMA**2 / 2
        drawn = np.random.default_rng(seed).normal(center, _SIGMA, self.sequences)
        return [int(n) for n in np.exp(drawn).round().clip(1, self.response_length)]

    def random_prompts(self, vocabulary: int, seed: int | np.random.Generator) -> list[list[int]]:
        """Return random token ids for the prompts."""
        shape = (self.prompts, self.prompt_length)
        prompts: list[list[int]] = (
            np.random.default_rng(seed).integers(0, vocabulary, shape).tolist()
        )
        return prompts


def random_rewards(count: int, seed: int) -> list[float]:
    """Return random rewards between 0 and 1."""
    rewards: list[float] = np.random.default_rng(seed).random(count).tolist()
    return rewards


def make_samples(
    prompts: Sequence[Sequence[int]], completions: Sequence[Completion], rewards: Iterable[float]
) -> list[Sample]:
    """Return samples of completions, as many of each prompt.

    Args:
        prompts: Token ids of each prompt.
        completions: The completions, those of a prompt side by side.
        rewards: The reward of each completion.
    """
    each = len(completions) // len(prompts)
    return [
        Sample(
            prompt=Prompt(id=str(i // each), text="?"),
            group=i // each,
            prompt_token_ids=tuple(prompts[i // each]),
            completion=completion,
            score=Score(float(reward)),
        )
        for i, (completion, reward) in enumerate(zip(completions, rewards, strict=True))
    ]


def flops(config: ModelConfig, load: Load, frozen: bool = False) -> dict[str, float]:
    """Return the floating-point operations of a step by phase.

    The phases are `rollout` (a prompt counts once for its samples), `old_logprobs` (a forward) and
    `update` (forward and backward).

    Args:
        config: The model's shape.
        load: The prompts and completions of the step.
        frozen: Whether the weights get no gradients; adapters' own products are not counted.
    """
    shapes = parameter_shapes(config)
    layers = sum(
        math.prod(shape)
        for name, shape in shapes.items()
        if len(shape) == 2 and name.startswith("layers.")
    )
    head = config.vocab_size * config.hidden_size
    heads = 2 * config.num_layers * config.num_heads * config.head_dim
    squares = sum((load.prompt_length + n) ** 2 for n in load.response_lengths())
    prompt_square = load.prompt_length**2
    forward = 2 * (layers * load.tokens + head * load.drawn)
    attention = heads * squares
    prompts = load.prompts * load.prompt_length
    return {
        "rollout": 2 * (layers * (prompts + load.drawn) + head * load.drawn)
        + heads * (prompt_square * load.prompts + squares - prompt_square * load.sequences),
        "old_logprobs": forward + attention,
        "update": (2 if frozen else 3) * forward + 3.5 * attention,
    }


def add_load_arguments(parser: argparse.ArgumentParser, prompts: int, samples: int) -> None:
    """Add --prompts, --samples, --prompt-length and --response-length.

    Args:
        parser: The parser of the benchmark.
        prompts: The default of --prompts.
        samples: The default of --samples.
    """
    parser.add_argument("--prompts", type=int, default=prompts, help=f"default {prompts}")
    parser.add_argument("--samples", type=int, default=samples, help=f"a prompt, default {samples}")
    parser.add_argument("--prompt-length", type=int, default=256, help="tokens (default 256)")
    parser.add_argument("--response-length", type=int, default=2048, help="tokens (default 2048)")


def load_text(text: str) -> Load:
    """Return the load PxSxLxR or PxSxLxRxM.

    The numbers are prompts, samples of each, prompt and response tokens, and the mean length of
    responses with a tail.
    """
    return Load(*map(int, text.split("x")))


def tailed_load(name: str, vocabulary: int) -> tuple[Load, list[list[int]], list[int]]:
    """Return a load with a tail, its prompts, and the tokens of each completion.

    The completions of a prompt stand side by side. Rollouts of `grpo` have always been measured
    with prompts and lengths of one generator, so its lengths are not those of `jetrl bench
    speculation`; those of other loads are.

    Args:
        name: One of `TAILED`.
        vocabulary: The number of token ids.
    """
    (case,) = LOADS[name]
    load = load_text(case)
    seed = np.random.default_rng(0) if name == "grpo" else 0
    return load, load.random_prompts(vocabulary, seed), load.response_lengths(seed)


def load_of(args: argparse.Namespace) -> Load:
    """Return the load that the arguments of `add_load_arguments` give, with --mean-length."""
    mean = getattr(args, "mean_length", 0)
    return Load(args.prompts, args.samples, args.prompt_length, args.response_length, mean)
