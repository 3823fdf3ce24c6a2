"""The router of experts: from logits to the experts of each token and their weights.

Experts are chosen by score, those with equal scores by index, the lower one first; no expert has a
capacity and no token is dropped. Slots are in the order of choice. Operation by operation, float32,
each rounded, sums over slots from the first on:

    e       = exp(l - max(l)),  p = e / float32(exact_sum(e))      softmax; `precision.exact`
    p       = sigmoid(l)                                           sigmoid
    chosen  = the k largest (l, -index); with a bias (p + bias, -index)
    w       = p[chosen]
    n       = (w[0] + w[1] + ...) + floor,  w = w / n              if normalized
    w       = w * scale                                            if scale is not 1
    w is rounded to the dtype of logits                            its gradient is not

    g       = dw * scale                                           backward
    dp      = (g - ((g[0] * q[0]) + g[1] * q[1] + ...)) / n        if normalized, q the quotients
    c       = (p[0] * dp[0]) + p[1] * dp[1] + ...                  softmax, over chosen experts
    dl      = p * (dp - c)                                         dp is 0 for all others
    dl      = dp * (p * (1 - p))                                   sigmoid

The load-balancing loss of a layer is 1 if all experts have equal loads and scores (Fedus et al.,
Switch Transformers, arXiv 2101.03961, eq. 4, over k slots). A token's sigmoids are divided by their
sum (DeepSeek-V3, arXiv 2412.19437, eq. 19), so that the loss does not fall by lowering all of them.
With f the share of rows per expert, float32, and T tokens:

    n       = 1 softmax, float32(exact_sum over experts of p) + floor sigmoid
    q       = p / n
    P       = float32(exact_sum over tokens of q) / T
    loss    = float32(exact_sum(f * P)) * E
    g       = (f * E) / T * dloss                                  backward
    d       = g - float32(exact_sum over experts of q * g)
    dl      = q * d                                                softmax
    dl      = (d / n) * (p * (1 - p))                              sigmoid

dl is rounded to the dtype of logits. Qwen3 and OLMoE have BF16 logits and softmax; DeepSeek-style
routers have float32 logits, sigmoids and a bias for choice. `rule` is that of the family
(`kernels.routing_rule`).

Legend: T tokens, E experts, k experts per token (slots).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl.kernels.backend import kernels_of
from jetrl.kernels.routing_rule import RoutingRule
from jetrl.precision.exact import exact_sum, exp_nonpositive, log_positive, sigmoid

_SMALLEST = 2.0**-126  # below which p log p is 0


def route(logits: Tensor, rule: RoutingRule, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the chosen experts, int64 [T, k], and their weights, float32 [T, k], differentiable.

    Args:
        logits: bfloat16 or float32 [T, E].
        bias: float32 [E], added to scores for the choice only.
    """
    return _Route.apply(logits, rule, bias)


def router_scores(logits: Tensor, rule: RoutingRule) -> Tensor:
    """Return the scores p of all experts, float32 [T, E]."""
    values = logits.float()
    if rule.scores == "sigmoid":
        return sigmoid(values)
    powers = exp_nonpositive(values - values.amax(-1, keepdim=True))
    return powers / exact_sum(powers).float()[:, None]


def row_shares(chosen: Tensor, num_experts: int) -> Tensor:
    """Return the share of rows per expert, float32 [E], of chosen experts int64 [T, k]."""
    counts = torch.zeros(num_experts, device=chosen.device)
    experts = chosen.flatten()
    counts.index_add_(0, experts, torch.ones_like(experts, dtype=torch.float32))
    return counts / counts.new_tensor(len(experts))


def balance_loss(logits: Tensor, chosen: Tensor, rule: RoutingRule) -> Tensor:
    """Return the load-balancing loss of a layer, a float32 scalar, differentiable in logits."""
    return _Balance.apply(logits, row_shares(chosen, logits.shape[1]), rule)


def router_entropy(logits: Tensor, rule: RoutingRule) -> Tensor:
    """Return the entropy in nats of each token's scores, divided by their sum: float32 [T]."""
    scores = router_scores(logits, rule)
    shares = (scores / exact_sum(scores).float()[:, None]).clamp(min=_SMALLEST)
    return exact_sum(shares * -log_positive(shares.double()).float()).float()


class _Balance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, shares: Tensor, rule: RoutingRule) -> Tensor:
        scores = router_scores(logits, rule)
        total = _total_score(scores, rule)
        ctx.save_for_backward(scores, total, shares)
        ctx.rule, ctx.dtype = rule, logits.dtype
        means = exact_sum((scores / total).mT).float() / shares.new_tensor(len(scores))
        return exact_sum(shares * means).float() * len(shares)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        scores, total, shares = ctx.saved_tensors
        quotients = scores / total
        per_score = (shares * len(shares)) / shares.new_tensor(len(scores)) * grads[0]
        relative = per_score - exact_sum(quotients * per_score).float()[:, None]
        if ctx.rule.scores == "softmax":
            dlogits = quotients * relative
        else:
            dlogits = (relative / total) * (scores * (1.0 - scores))
        return dlogits.to(ctx.dtype), None, None


def _total_score(scores: Tensor, rule: RoutingRule) -> Tensor:
    """Return what the balancing loss divides a token's scores by, float32 [T, 1]."""
    if rule.scores == "softmax":
        return scores.new_ones(())
    return exact_sum(scores).float()[:, None] + rule.floor


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rule: RoutingRule, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.rule, ctx.dtype = rule, logits.dtype
        if (kernels := kernels_of(logits)) is not None:
            chosen, weights, scores = kernels.route(logits, rule, bias)
            ctx.save_for_backward(scores, chosen)
            ctx.mark_non_differentiable(chosen)
            return chosen, weights
        scores = router_scores(logits, rule)
        order = logits.float() if bias is None else scores + bias
        # A stable sort keeps the lower index first among equal values; top-k would not.
        order = torch.sort(order, dim=-1, descending=True, stable=True).indices
        chosen = order[:, : rule.num_chosen].contiguous()
        weights = scores.gather(1, chosen)
        ctx.save_for_backward(scores, chosen)
        if rule.normalized:
            weights = weights / _over_slots(weights).add_(rule.floor)
        if rule.scale != 1.0:
            weights = weights * rule.scale
        ctx.mark_non_differentiable(chosen)
        return chosen, weights.to(logits.dtype).float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        scores, chosen = ctx.saved_tensors
        rule: RoutingRule = ctx.rule
        if (kernels := kernels_of(scores)) is not None:
            return kernels.route_backward(grads[1], scores, chosen, rule, ctx.dtype), None, None
        p, dp = scores.gather(1, chosen), grads[1]
        if rule.scale != 1.0:
            dp = dp * rule.scale
        if rule.normalized:
            total = _over_slots(p).add_(rule.floor)
            dp = (dp - _over_slots(dp * (p / total))) / total
        dscores = torch.zeros_like(scores).scatter_(1, chosen, dp)
        if rule.scores == "softmax":
            dlogits = scores * (dscores - _over_slots(p * dp))
        else:
            dlogits = dscores * (scores * (1.0 - scores))
        return dlogits.to(ctx.dtype), None, None


def _over_slots(x: Tensor) -> Tensor:
    """Return the sum of float32 x [T, k] over slots in order, [T, 1]."""
    total = x[:, :1].clone()
    for slot in range(1, x.shape[1]):
        total += x[:, slot, None]
    return total
