"""Routes replayed: the trainer computes with the experts that the sampler chose.

Systems whose two engines route differently record the sampler's choices and force them on the
trainer. Here the choices are not recorded but made again, by the sampler's forward of the same
tokens, so a step may have only one update: later ones would replay the choices of new weights. As
in those systems, the weights of the chosen experts are the trainer's, with gradients. Nothing in
jetrl replays routes: under its exact plans they are equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor, nn

from jetrl.errors import UserError
from jetrl.kernels.routing import route
from jetrl.kernels.routing_rule import RoutingRule
from jetrl.models.experts import blocks_of, observed_routes


@contextlib.contextmanager
def replayed_routes(decoder: nn.Module, sampler_forward: Callable[[], None]) -> Iterator[None]:
    """Replay the sampler's choices in the forwards of the context, which are of the same tokens."""
    with observed_routes(decoder) as sampled:
        sampler_forward()
    if not sampled:
        raise UserError("sampler_deviation.replayed_routes: the model has no experts")
    blocks = blocks_of(decoder)
    for block, routes in zip(blocks, sampled, strict=True):
        block.choose = partial(weights_of, routes.chosen)
    try:
        yield
    finally:
        for block in blocks:
            block.choose = route


def weights_of(
    chosen: Tensor, logits: Tensor, rule: RoutingRule, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return given experts [T, k] and their weights as `route` has them, but for its bits."""
    values = logits.float()
    scores = values.softmax(-1) if rule.scores == "softmax" else values.sigmoid()
    weights = scores.gather(1, chosen)
    if rule.normalized:
        weights = weights / (weights.sum(1, keepdim=True) + rule.floor)
    return chosen, (weights * rule.scale).to(logits.dtype).float()
