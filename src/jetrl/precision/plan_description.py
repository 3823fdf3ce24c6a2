"""A precision plan in words: the rows that are printed before a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jetrl.presets import key_and_value_formats

if TYPE_CHECKING:
    from jetrl.precision.plan import PrecisionPlan


def described(plan: PrecisionPlan) -> list[tuple[str, str]]:
    """Return rows of (role, format) for people: what is printed before a run."""
    fp8 = f"FP8 e4m3, {plan.scales} scales"
    int8 = f"INT8, {plan.scales} scales"
    names = {"fp8": fp8, "int8": int8, "bf16": "BF16", "fp32": "FP32"}
    keys, values = (names[format] for format in key_and_value_formats(plan.kv))
    gradient = "BF16" if plan.grad_output == "bf16" else f"FP8 {plan.grad_output}"
    rollout, training = names[plan.rollout_linear], names[plan.train_linear]
    if plan.base == "nvfp4":
        rollout = training = "NVFP4 weights, frozen; BF16 activations"
    elif plan.train_linear == "fp8":
        training += f" (FProp, DGrad, WGrad; output gradients {gradient})"
    rows = [
        ("rollout linears", rollout),
        ("training linears", training),
        ("keys and values, both sides", keys if keys == values else f"{keys}; {values}"),
        ("embeddings, norms, residual", names[plan.rest]),
        ("lm_head, both sides", names[plan.lm_head]),
        ("master weights", "FP32"),
    ]
    if plan.first_layers_bf16 or plan.last_layers_bf16:
        kept = f"first {plan.first_layers_bf16}, last {plan.last_layers_bf16}"
        rows.insert(2, ("layers kept in BF16, both sides", kept))
    if plan.wgrad_input != "128x128":
        rows.append(("X into WGrad", f"{plan.wgrad_input} along tokens"))
    if plan.pinned_sums is not None:
        order = "one order, whatever the batch" if plan.pinned_sums else "the library's order"
        rows.append(("sums", order))
    if plan.deviation:
        rows.append(("sampler alone, otherwise", plan.deviation))
    promise = "bit for bit equal (checked every step)" if plan.exact else "not promised (measured)"
    return [*rows, ("sampler and trainer log-probs", promise)]
