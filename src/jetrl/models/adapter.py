"""The adapter of a model: which linear layers have a low-rank adapter, and its initial values.

Checkpoints keep Q, K and V apart, and so do adapters that others wrote: each stored linear layer
has an A and a B. Ours are stacked like the weights next to them (`precision.adapter`): the master
weights of the adapter of `layers.0.qkv` are `layers.0.qkv.lora_A` and `layers.0.qkv.lora_B`.

Targets are written as in PEFT: `all-linear`; names, each for every stored linear layer with that
name or with a name that ends with it after a dot; or one text, a regular expression that matches
the whole of a layer's name, with or without its `model.` in front.

A new adapter changes nothing: A is uniform within 1 / sqrt(K), as in PEFT, and B is zero. A draw
depends on the run's seed and the stored layer's name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.files import shown_value
from jetrl.models.coded_weights import CodedWeights, MadeWeights
from jetrl.models.families import ModelConfig, StoredTensor, linear_layers, parameter_shapes
from jetrl.models.patterns import matching
from jetrl.precision.adapter_weight import AdapterShape
from jetrl.randomness import derive_seed

ALL_LINEAR = "all-linear"
_DIGEST_ROWS = 1024
_EMBEDDINGS, _HEAD, _SCORE = "embed.weight", "lm_head.weight", "score.weight"


@dataclass(frozen=True)
class LoRA:
    """The kind of an adapter: rank, scale, target layers, and parameters trained next to it.

    `rslora` divides alpha by the square root of the rank instead of the rank.
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
        """Return whether a base parameter, named as in `families.parameter_shapes`, is trained."""
        if name == _EMBEDDINGS:
            return self.train_embeddings
        if name == _HEAD:
            return self.train_head
        return name == _SCORE or (name.endswith("norm.weight") and self.train_norms)

    def shapes(self, config: ModelConfig) -> dict[str, AdapterShape]:
        """Return each linear layer's adapter shape by the layer's name."""
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
    """Return the stored linear layers that targets (see `LoRA`) select, by our layer's name."""
    linears = linear_layers(config)
    chosen = _chosen([part.module for parts in linears.values() for part in parts], targets, key)
    adapted = {
        layer: tuple(part for part in parts if part.module in chosen)
        for layer, parts in linears.items()
    }
    return {layer: parts for layer, parts in adapted.items() if parts}


def _chosen(names: list[str], targets: tuple[str, ...] | str, key: str) -> set[str]:
    """Return the names that targets select; `key` names the targets in messages."""
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
    """An adapter with its initial values: shapes by linear layer, tensors by `adapter_names`.

    `tensors` may make or read each one on access. `origin` is the directory that the adapter was
    read from; None if it is new.
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
        """Return a new adapter, A random and B zero; on "meta" it has shapes without values."""
        shapes, parts = lora.shapes(config), adapted_parts(config, lora.targets)
        device = "meta" if device == "meta" else "cpu"  # draws there are the same for all devices

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
        return Adapter(lora, shapes, MadeWeights(names, drawn))

    def check_base(self, digest: str) -> None:
        """Raise a UserError if the adapter was trained on another base.

        With replaced parameters the stored digest includes them, so it is not compared.
        """
        if not self.replaced and self.base_digest not in (None, digest):
            raise UserError(
                f"{self.origin}: this adapter was trained on another base than the one here; give "
                "its own base as model.path, or as base_model_name_or_path of its directory"
            )

    def shape(self, config: ModelConfig) -> ModelConfig:
        """Return the config of a base with the adapter, which may untie the head."""
        return dataclasses.replace(config, tie_word_embeddings=False) if self.unties else config

    def over(self, weights: CodedWeights) -> CodedWeights:
        """Return the base's weights with those that the adapter replaces."""
        if not self.replaced:
            return weights
        head = (_HEAD,) if self.unties else ()

        def value(name: str) -> Tensor:
            if name in self.replaced:
                return self.replaced[name]
            return weights[_EMBEDDINGS if name in head else name]  # an untied head begins so

        return MadeWeights([*weights, *head], value, weights.codes)


def base_digest(config: ModelConfig, vectors: Sequence[Tensor], embedding: Tensor) -> str:
    """Return a digest of a base model's parameter names and shapes, and of some values.

    The values are `vectors`, the FP32 weights of norms and biases in order, and the first rows of
    the embedding [V, D]. Training changes them in practice, and they are the same under every
    precision plan.
    """
    digest = hashlib.sha256(repr(sorted(parameter_shapes(config).items())).encode())
    for values in (*vectors, embedding[:_DIGEST_ROWS]):
        rounded = values.detach().bfloat16().cpu().contiguous()
        digest.update(rounded.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def stored_base_digest(config: ModelConfig, weights: Mapping[str, Tensor]) -> str:
    """Return the `base_digest` of a base's stored weights."""
    vectors = [weights[name] for name, shape in parameter_shapes(config).items() if len(shape) == 1]
    return base_digest(config, vectors, weights[_EMBEDDINGS])
