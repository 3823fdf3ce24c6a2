"""The adapter of a model: which linear layers have a low-rank adapter, and how it begins.

Checkpoints keep Q, K and V apart, and so do the adapters that people have: each stored linear layer
has an A and a B. Ours are stacked like the weights next to them (`precision.adapter`). The master
weights of the adapter of `layers.0.qkv` are `layers.0.qkv.lora_A` and `layers.0.qkv.lora_B`.

Targets are written as PEFT has them: `all-linear`; names, which stand for every stored linear layer
that is so called or ends with it after a dot; or one text, a regular expression that matches the
whole of a layer's name without its `model.` in front, or with it.

A new adapter changes nothing: A is uniform within 1 / sqrt(K), as PEFT draws it, and B is zero. A
draw is a function of the run's seed and the stored layer's name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.files import shown_value
from jetrl.models.families import (
    ModelConfig,
    StoredTensor,
    linear_layers,
    parameter_shapes,
)
from jetrl.models.nvfp4_files import CodedWeights, codes_of
from jetrl.models.patterns import matching
from jetrl.precision.adapter import AdapterShape
from jetrl.randomness import derive_seed

ALL_LINEAR = "all-linear"
_DIGEST_ROWS = 1024
_EMBEDDINGS, _HEAD, _SCORE = "embed.weight", "lm_head.weight", "score.weight"


@dataclass(frozen=True)
class LoRA:
    """The kind of an adapter: its rank and scale, its layers, and what else is trained.

    Attributes:
        rslora: Divide by the root of the rank instead of the rank.
    """

    rank: int
    alpha: float
    rslora: bool = False
    targets: tuple[str, ...] | str = (ALL_LINEAR,)
    train_embeddings: bool = False
    train_norms: bool = False
    train_head: bool = False

    @property
    def scale(self) -> float:
        """The factor of the adapter's product."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def trains(self, name: str) -> bool:
        """Return whether a parameter of the base is trained; a scalar head always is.

        Args:
            name: The name of the parameter, as in `families.parameter_shapes`.
        """
        if name == _EMBEDDINGS:
            return self.train_embeddings
        if name == _HEAD:
            return self.train_head
        return name == _SCORE or (name.endswith("norm.weight") and self.train_norms)

    def shapes(self, config: ModelConfig) -> dict[str, AdapterShape]:
        """Return the shape of each adapter by the name of its linear layer."""
        tied = config.tie_word_embeddings and config.head == "lm"
        if tied and self.train_head != self.train_embeddings:
            raise UserError(
                "adapter.train_head and adapter.train_embeddings: the model ties its output head "
                "to its embedding, so set both or none of them"
            )
        whole = parameter_shapes(config)
        shapes: dict[str, AdapterShape] = {}
        for layer, parts in adapted_parts(config, self.targets).items():
            num_rows, num_columns = whole[f"{layer}.weight"]
            rows = tuple((part.first_row, part.shape[0]) for part in parts)
            shapes[layer] = AdapterShape(self.rank, self.scale, num_rows, num_columns, rows)
        return shapes


def adapted_parts(
    config: ModelConfig, targets: tuple[str, ...] | str, key: str = "adapter.targets"
) -> dict[str, tuple[StoredTensor, ...]]:
    """Return the stored linear layers that targets stand for, by the name of our layer.

    Args:
        targets: As of `LoRA`.
    """
    linears = linear_layers(config)
    chosen = _chosen([part.module for parts in linears.values() for part in parts], targets, key)
    adapted = {
        layer: tuple(part for part in parts if part.module in chosen)
        for layer, parts in linears.items()
    }
    return {layer: parts for layer, parts in adapted.items() if parts}


def _chosen(names: list[str], targets: tuple[str, ...] | str, key: str) -> set[str]:
    """Return the names that targets stand for; a message calls the targets by a key."""
    if targets in (ALL_LINEAR, (ALL_LINEAR,)):
        return set(names)
    last = sorted({name.rpartition(".")[2] for name in names})
    known = f"matches no linear layer; the model's are called {', '.join(last)}"
    if isinstance(targets, str):
        short = {name.removeprefix("model."): name for name in names}
        chosen = {short.get(name, name) for name in matching([targets], [*names, *short], key)}
        if not chosen:
            raise UserError(f"{key} = {shown_value(targets)} {known}")
        return chosen
    chosen = set()
    for target in targets:
        matched = {name for name in names if name == target or name.endswith(f".{target}")}
        if not matched:
            whole = "; adapter.train_head and train_embeddings train lm_head and embed_tokens"
            hint = whole if target in ("lm_head", "embed_tokens") else ""
            raise UserError(f"{key}: {shown_value(target)} {known}{hint}")
        chosen |= matched
    if not chosen:
        raise UserError(f"{key} is empty: name linear layers, or {ALL_LINEAR}")
    return chosen


def adapter_names(layer: str) -> tuple[str, str]:
    """Return the names of the master weights A and B of a linear layer's adapter."""
    return f"{layer}.lora_A", f"{layer}.lora_B"


@dataclass(frozen=True)
class Adapter:
    """An adapter with the values that it begins with.

    Attributes:
        shapes: The shape next to each linear layer that has one, by the layer's name.
        tensors: A and B of each of these, by the names of `adapter_names`; each may be made or read
            when it is asked for.
        origin: The directory that the adapter was read from; None of a new one.
    """

    lora: LoRA
    shapes: Mapping[str, AdapterShape]
    tensors: Mapping[str, Tensor]
    replaced: Mapping[str, Tensor] = field(default_factory=dict)
    origin: str | None = None
    base_digest: str | None = None
    unties: bool = False

    @staticmethod
    def new(config: ModelConfig, lora: LoRA, seed: int, device: str = "cpu") -> Adapter:
        """Return an adapter that changes nothing yet: A of small numbers, and B zero.

        Args:
            device: "meta" for shapes without values.
        """
        shapes, parts = lora.shapes(config), adapted_parts(config, lora.targets)
        device = "meta" if device == "meta" else "cpu"  # where draws are the same for all devices

        def drawn(name: str) -> Tensor:
            layer, _, kind = name.rpartition(".")
            shape = shapes[layer]
            if kind == "lora_B":
                return torch.zeros(shape.b_shape, device=device)
            values = torch.empty(shape.a_shape, device=device)
            if device == "meta":
                return values
            bound = 1 / math.sqrt(shape.num_columns)
            for part, rows in zip(parts[layer], values.split(shape.rank), strict=True):
                key = derive_seed(seed, "lora_A", part.module)
                rows.uniform_(-bound, bound, generator=torch.Generator().manual_seed(key))
            return values

        names = [name for layer in shapes for name in adapter_names(layer)]
        return Adapter(lora, shapes, CodedWeights(names, drawn))

    def check_base(self, digest: str) -> None:
        """Raise if the adapter was made on another base.

        An adapter that replaces parameters of the base has the digest of what it put there, which
        is not compared.
        """
        if not self.replaced and self.base_digest not in (None, digest):
            raise UserError(
                f"{self.origin}: this adapter was trained on another base than the one here; give "
                "its own base as model.path, or as base_model_name_or_path of its directory"
            )

    def shape(self, config: ModelConfig) -> ModelConfig:
        """Return the config of a base with the adapter, which may untie the head."""
        return dataclasses.replace(config, tie_word_embeddings=False) if self.unties else config

    def over(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the parameters of the base with those that the adapter replaces."""
        if not self.replaced:
            return weights
        head = (_HEAD,) if self.unties else ()

        def value(name: str) -> Tensor:
            if name in self.replaced:
                return self.replaced[name]
            return weights[_EMBEDDINGS if name in head else name]  # an untied head begins so

        return CodedWeights(chain(weights, head), value, codes_of(weights))


def base_digest(config: ModelConfig, vectors: Sequence[Tensor], embedding: Tensor) -> str:
    """Return a digest of a base model's parameter names and shapes, and of some parameter values.

    The values are those of norms and biases, and the first rows of the embedding, which training
    changes in practice. They are the same under every precision plan.

    Args:
        vectors: The FP32 weights of norms and biases, in order.
        embedding: The embedding [V, D], in any floating dtype.
    """
    digest = hashlib.sha256(repr(sorted(parameter_shapes(config).items())).encode())
    for values in (*vectors, embedding[:_DIGEST_ROWS]):
        digest.update(
            values.detach().bfloat16().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()[:32]


def stored_base_digest(config: ModelConfig, weights: Mapping[str, Tensor]) -> str:
    """Return the `base_digest` of a base's parameters, read by name."""
    shapes = parameter_shapes(config)
    vectors = [weights[name] for name, shape in shapes.items() if len(shape) == 1]
    return base_digest(config, vectors, weights[_EMBEDDINGS])
