"""A sampler may compute something otherwise than the trainer, on purpose: for comparisons.

Other systems sample with one engine and train with another, and the two differ a little. A plan
whose `SamplerDeviation` is not empty does the same in a known way and a known amount, and promises
no equal bits. An empty one, which is every plan's own but that of the preset `alike`, changes
nothing and costs nothing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from jetrl.presets import Format, KVFormat, LinearFormat, ScaleRule


@dataclass(frozen=True)
class SamplerDeviation:
    """The settings of the sampler alone; by default it computes what the trainer does.

    Attributes:
        linears: The format of the sampler's linear layers; None: the plan's.
        weights_through_bf16: Whether the sampler's FP8 codes are made of master weights that were
            rounded to BF16 first, as where weights travel to another engine in BF16.
        bf16_layers: The decoder layers, from 0, whose linears are BF16 on the sampler's side.
        scales: The rule of the sampler's scales, of weights, activations, keys and values; None:
            the plan's.
        kv: The sampler's keys and values; None: the plan's.
        attention_split: The keys after which the sampler's attention begins a new sum; None: the
            sums are the trainer's. On a CPU the sums of a split are float32 sums in the library's
            order, where the trainer's are exact.
        lm_head: The format of the sampler's output projection; None: the plan's.
    """

    linears: LinearFormat | None = None
    weights_through_bf16: bool = False
    bf16_layers: tuple[int, ...] = ()
    scales: ScaleRule | None = None
    kv: KVFormat | None = None
    attention_split: int | None = None
    lm_head: Format | None = None
    logit_noise: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are set, by name, as lists and plain values."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in fields.items()
            if value != defaults[name]
        }

    def describe(self) -> str:
        """Return the fields that are set, as text for people."""
        return ", ".join(
            f"{name} = {' '.join(map(str, value)) if isinstance(value, list) else value}"
            for name, value in self.to_dict().items()
        )


NO_DEVIATION = SamplerDeviation()
