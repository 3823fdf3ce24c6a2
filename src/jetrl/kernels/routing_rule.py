"""The rule by which a router's logits become experts and weights, a record per family.

This file must not import torch, so that records of `models` can name a rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RoutingRule:
    """The rule of `kernels.routing.route`.

    Attributes:
        num_chosen: k, the experts per token.
        scores: "softmax" is over all experts.
        normalized: Whether a token's weights are divided by their sum.
        floor: Added to that sum, against division by zero.
        scale: By which weights are multiplied at the end.
        wide: Whether logits are float32, in place of the dtype of activations.
    """

    num_chosen: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = True
    floor: float = 0.0
    scale: float = 1.0
    wide: bool = False
