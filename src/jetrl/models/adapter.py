"""The low-rank adapter (LoRA) of a model: its target layers and initial values.

In PEFT's files, each stored linear layer (Q, K and V separately) has an A and a B. In jetrl they
are stacked like the weights (`precision.adapter`): the master weights for `layers.0.qkv` are
`layers.0.qkv.lora_A` and `layers.0.qkv.lora_B`.

Targets are as in PEFT: `all-linear`; a list of names, each of which selects the stored linear
layers that have this name, or whose name ends with a dot and this name; or a regular expression
that matches the whole name of a layer, with or without the prefix `model.`. Names are those of
transformers: with images the prefix is `model.language_model.` or `model.text_model.`, and the
tower has no targets. Experts are selected only by their names (gate_proj, up_proj, down_proj), not
by `all-linear`.

A new adapter does not change the model: A is uniform in +-1 / sqrt(K), as in PEFT, and B is zero.
A draw depends only on the run's seed and the name of the stored layer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.files import shown_value
from jetrl.models.coded_weights import CodedWeights, MadeWeights
from jetrl.models.families import (
    FAMILIES,
    ModelConfig,
    StoredTensor,
    linear_layers,
    parameter_shapes,
)
from jetrl.models.patterns import matching
from jetrl.precision.adapter_weight import AdapterShape
from jetrl.randomness import derive_seed

ALL_LINEAR = "all-linear"
_DIGEST_ROWS = 1024
_EMBEDDINGS, _HEAD, _SCORE = "embed.weight", "lm_head.weight", "score.weight"


@dataclass(frozen=True)
class LoRA:
    """The settings of an adapter: rank, scale, target layers, and fully trained parameters.

    Attributes:
        rslora: Divide alpha by the square root of the rank instead of the rank.
        targets: As in PEFT (see the module's docstring).
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
        """The factor s in W + s B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def trains(self, name: str) -> bool:
        """Return whether a base parameter (`families.parameter_shapes`) is fully trained."""
        if name == _EMBEDDINGS:
            return self.train_embeddings
        if name == _HEAD:
            return self.train_head
        return name == _SCORE or (name.endswith("norm.weight") and self.train_norms)

    def shapes(self, config: ModelConfig) -> dict[str, AdapterShape]:
        """Return the shape of the adapter of each linear layer, by jetrl's name of the layer.

        Raises UserError for targets that match no layer, or for half of a tied pair.
        """
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
    """Return the stored linear layers that targets select, by jetrl's name of the layer.

    Raises UserError, with `key` in front, for targets that match no layer.
    """
    linears = linear_layers(config, loaded=True)
    if targets in (ALL_LINEAR, (ALL_LINEAR,)):
        return {layer: parts for layer, parts in linears.items() if not _by_name(config, layer)}
    names = [part.module for parts in linears.values() for part in parts]
    chosen = _chosen(config, names, targets, key)
    adapted = {
        layer: tuple(part for part in parts if part.module in chosen)
        for layer, parts in linears.items()
    }
    return {layer: parts for layer, parts in adapted.items() if parts}


def _by_name(config: ModelConfig, layer: str) -> bool:
    """Return whether targets select a linear layer only by name, as those of experts."""
    _, number, module = layer.split(".")
    shape = config.layers[int(number)]
    return any(module in half.by_name for half in (shape.mixer, shape.block))


def _chosen(
    config: ModelConfig, names: list[str], targets: tuple[str, ...] | str, key: str
) -> set[str]:
    """Return the names that targets select; they are not all-linear."""
    last = sorted({name.rpartition(".")[2] for name in names})
    known = f"matches no linear layer; the model's are called {', '.join(last)}"
    if config.vision is not None:
        known += " (the image tower is frozen and has no adapter)"
    if isinstance(targets, str):
        prefix = FAMILIES[config.family].language_module + "."
        short = {name.removeprefix(prefix): name for name in names}
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
    """Return the names of the master weights A and B of a linear layer."""
    return f"{layer}.lora_A", f"{layer}.lora_B"


@dataclass(frozen=True)
class Adapter:
    """An adapter with its initial values.

    Attributes:
        shapes: The shape per linear layer.
        tensors: A and B by `adapter_names`, float32; may be drawn on access.
        replaced: Parameters that replace those of the base, float32, by jetrl's names.
        origin: The directory of the adapter; None if it is new.
        base_digest: The digest of the base it was trained on; None if unknown.
        unties: Whether `replaced` unties the head from the embedding.
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
        """Return a new adapter: A is random, B is zero. On "meta", tensors have no values."""
        shapes, parts = lora.shapes(config), adapted_parts(config, lora.targets)
        device = "meta" if device == "meta" else "cpu"  # the same draws for all devices

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

        There is no check if the adapter replaces parameters, since the stored digest includes them.
        """
        if not self.replaced and self.base_digest not in (None, digest):
            raise UserError(
                f"{self.origin}: this adapter was trained on another base than the one here; give "
                "its own base as model.path, or as base_model_name_or_path of its directory"
            )

    def shape(self, config: ModelConfig) -> ModelConfig:
        """Return the configuration of a base with the adapter, which may untie the head."""
        return dataclasses.replace(config, tie_word_embeddings=False) if self.unties else config

    def over(self, weights: CodedWeights) -> CodedWeights:
        """Return the base's weights with the adapter's replacements."""
        if not self.replaced:
            return weights
        head = (_HEAD,) if self.unties else ()

        def value(name: str) -> Tensor:
            if name in self.replaced:
                return self.replaced[name]
            return weights[_EMBEDDINGS if name in head else name]  # for an untied head

        return MadeWeights([*weights, *head], value, weights.codes)


def base_digest(config: ModelConfig, weights: Mapping[str, Tensor]) -> str:
    """Return a digest of a base model: 32 hexadecimal digits of SHA-256.

    It covers names and shapes of parameters, and values that training changes in practice: norms
    and biases, and the first 1,024 rows of the embedding, as stored and rounded to BF16. So it does
    not depend on a plan. `weights` are the parameters by jetrl's names.
    """
    shapes = parameter_shapes(config)
    digest = hashlib.sha256(repr(sorted(shapes.items())).encode())
    for name in [*(name for name, shape in shapes.items() if len(shape) == 1), _EMBEDDINGS]:
        rounded = weights[name][:_DIGEST_ROWS] if name == _EMBEDDINGS else weights[name]
        rounded = rounded.detach().bfloat16().cpu().contiguous()
        digest.update(rounded.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]
