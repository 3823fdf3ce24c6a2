"""Loads: prompts with completions of given lengths, their random contents, and their FLOPs.

FLOPs are those of the model, not of the machine: 2 per multiply-add of linear layers, of the output
projection at sampled tokens, and of the causal half of attention, not of an image tower. Of a
mixture's experts, those count that a token chooses. Backward takes twice the forward of a product
and 2.5 times that of attention. What is computed twice counts once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import PIL.Image

from jetrl.errors import UserError
from jetrl.models.experts_shape import ExpertsShape
from jetrl.models.families import LayerShape, ModelConfig
from jetrl.models.vision import ImageTower
from jetrl.types import Completion, Prompt, PromptInputs, Sample, Score
from jetrl.types.images import encoded

# Loads by name, as `load_text` reads them.
LOADS = {
    "8": ("1x8x128x1024",),
    "64": ("8x8x256x8192",),
    "grpo": ("64x8x256x8192x1500",),
    # A quarter of its sequences at half of its lengths.
    "tail": ("16x8x256x4096x750",),
    "256": ("32x8x256x2048",),
    # 64 sequences at the mean context of the load 64, for an eighth of its tokens.
    "64-part": ("64x1x3584x1024",),
}
TAILED = ("grpo", "tail")
_SIGMA = 0.8  # of the logarithm of lengths with a tail


@dataclass(frozen=True)
class Load:
    """The load of a step: prompts of one length, each with several completions.

    Completions have one length, or log-normal lengths with a long tail (standard deviation 0.8 of
    the logarithm). More prompts leave the lengths of the first completions as they are.

    Attributes:
        samples: Completions per prompt.
        response_length: Tokens per completion; with a tail, the maximum.
        mean_length: The mean of lengths with a tail, before the cut at the maximum; 0: no tail.
        image_side: Pixels of the side of an image that each prompt begins with; 0: no images. Its
            tokens count as tokens of the prompt.
    """

    prompts: int
    samples: int
    prompt_length: int
    response_length: int
    mean_length: int = 0
    image_side: int = 0

    @property
    def sequences(self) -> int:
        """The number of completions."""
        return self.prompts * self.samples

    @property
    def length(self) -> int:
        """The maximum number of tokens per sequence."""
        return self.prompt_length + self.response_length

    @property
    def tokens(self) -> int:
        """The tokens of all sequences, prompts included."""
        return self.sequences * self.prompt_length + self.drawn

    @property
    def drawn(self) -> int:
        """The tokens of all completions."""
        return sum(self.response_lengths())

    @property
    def most_held(self) -> int:
        """The maximum number of tokens in the KV cache when all sequences start together."""
        lengths = np.sort(self.response_lengths())
        running = np.arange(self.sequences, 0, -1)
        return int((running * (self.prompt_length + lengths)).max())

    def __str__(self) -> str:
        tail = f", log-normal with a mean of {self.mean_length}" if self.mean_length else ""
        seen = f", an image of {self.image_side}^2 pixels per prompt" if self.image_side else ""
        return (
            f"{self.prompts} prompts x {self.samples} samples, {self.prompt_length} + "
            f"{self.response_length} tokens{tail}{seen}"
        )

    def response_lengths(self, seed: int | np.random.Generator = 0) -> list[int]:
        """Return the tokens of each completion, grouped by prompt."""
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


def with_images(
    prompts: Sequence[Sequence[int]], side: int, tower: ImageTower, seed: int
) -> list[PromptInputs]:
    """Return prompts of the same lengths that begin with an image of noise each."""
    special = {tower.shape.image_token_id, *tower.shape.video_tokens}
    found = []
    for number, prompt in enumerate(prompts):
        noise = np.random.default_rng([seed, number]).integers(0, 256, (side, side, 3), np.uint8)
        image = encoded(PIL.Image.fromarray(noise), "noise")
        count = tower.num_features(image)
        if count >= len(prompt):
            raise UserError(f"an image takes {count} tokens, and --prompt-length is {len(prompt)}")
        rest = [0 if token in special else token for token in prompt[count:]]
        token_ids = (*[tower.shape.image_token_id] * count, *rest)
        found.append(PromptInputs(token_ids, tower.spans(token_ids, [image], "a prompt")))
    return found


def random_rewards(count: int, seed: int) -> list[float]:
    """Return random rewards between 0 and 1."""
    rewards: list[float] = np.random.default_rng(seed).random(count).tolist()
    return rewards


def make_samples(
    prompts: Sequence[Sequence[int]], completions: Sequence[Completion], rewards: Iterable[float]
) -> list[Sample]:
    """Return the samples of completions, which are grouped by prompt."""
    inputs = [p if isinstance(p, PromptInputs) else PromptInputs(tuple(p)) for p in prompts]
    each = len(completions) // len(prompts)
    return [
        Sample(
            prompt=Prompt(id=str(i // each), text="?"),
            group=i // each,
            inputs=inputs[i // each],
            completion=completion,
            score=Score(float(reward)),
        )
        for i, (completion, reward) in enumerate(zip(completions, rewards, strict=True))
    ]


def flops(config: ModelConfig, load: Load, frozen: bool = False) -> dict[str, float]:
    """Return the floating-point operations of a step by phase.

    The phases are `rollout` (each prompt counts once), `old_logprobs` (a forward) and `update`
    (forward and backward).

    Args:
        config: The model's shape.
        frozen: Whether only adapters are trained, so that no weight gradients are needed.
    """
    layers = sum(multiplied(config, layer) for layer in config.layers)
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


def multiplied(config: ModelConfig, layer: LayerShape) -> int:
    """Return the elements of a layer's matrices that a token meets: of experts, those chosen."""
    count = 0
    for half in (layer.mixer, layer.block):
        for name, shape in half.parameter_shapes(config.hidden_size).items():
            if len(shape) != 2:
                continue
            chosen = 1.0
            if isinstance(half, ExpertsShape) and name.removesuffix(".weight") in half.by_name:
                chosen = half.num_experts_per_tok / half.num_experts
            count += round(chosen * math.prod(shape))
    return count


def load_text(text: str) -> Load:
    """Return the load PxSxLxR or PxSxLxRxM.

    The numbers are prompts, samples per prompt, prompt and response tokens, and the mean response
    length of a load with a tail.
    """
    return Load(*map(int, text.split("x")))


def tailed_load(name: str, vocabulary: int) -> tuple[Load, list[list[int]], list[int]]:
    """Return a load with a tail, its prompts, and the tokens of each completion by prompt.

    For `grpo` one generator draws prompts and lengths, as in its earlier measurements, so its
    lengths differ from those of `jetrl bench speculation`. Other loads have the same lengths there.
    """
    (case,) = LOADS[name]
    load = load_text(case)
    seed = np.random.default_rng(0) if name == "grpo" else 0
    return load, load.random_prompts(vocabulary, seed), load.response_lengths(seed)
