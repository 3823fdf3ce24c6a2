"""Whether a run fits on its device, before anything is loaded, and what would make it fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jetrl.errors import UserError
from jetrl.memory.plan import GIB, Load, MemoryPlan, OtherModels, memory_plan
from jetrl.models.families import ModelConfig
from jetrl.settings.loading import Settings, as_override

STEP = 1024  # tokens: micro-batches are planned in multiples of it
# What the plan leaves out: the code of kernels (0.2 GiB), and holes between allocations.
MARGIN = 3 * 2**29
_FEW_SEQUENCES = 256  # together: decode's graphs and logits take little


@dataclass(frozen=True)
class Fitted:
    """plan: what will be held. tokens: of a micro-batch at most; train.tokens_per_micro_batch, or
    less where that does not fit. free: bytes of the device before anything was loaded, None where
    it does not say."""

    plan: MemoryPlan
    tokens: int
    free: int | None


def check_fits(
    settings: Settings,
    config: ModelConfig,
    others: OtherModels,
    load: Load,
    device: str,
    free: int | None,
) -> Fitted:
    """The plan that fits. On a GPU a micro-batch takes as many tokens as there is room for, up to
    train.tokens_per_micro_batch.

    Args:
        device: cpu or cuda. free: its bytes before anything is loaded; None: not known, and
            whatever is asked for is planned.

    Raises:
        UserError: it does not fit: the plan, and the settings with which it would.
    """
    wanted = settings.train.tokens_per_micro_batch
    if free is None or device == "cpu":
        plan = memory_plan(settings, config, others, load, tokens=wanted, device=device)
        # The references of the CPU keep other activations: what is certain is refused.
        if free is not None and plan.at("optimizer") > free:
            raise UserError(
                f"the model does not fit in CPU memory: weights, optimizer states and gradients "
                f"take {plan.at('optimizer') / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free\n\n"
                + shown(plan)
            )
        return Fitted(plan, wanted, free)
    fitted = _largest(settings, config, others, load, free)
    if fitted is not None:
        return fitted
    wanted = min(STEP, wanted)
    least = memory_plan(settings, config, others, load, free, tokens=wanted)
    raise UserError(
        f"the model does not fit on the GPU: even with micro-batches of {least.micro_batch.tokens} "
        f"tokens it needs {(least.peak + MARGIN) / GIB:.1f} GiB, and {free / GIB:.1f} GiB are "
        f"free\n\n{shown(least)}\n\n{_advice(settings, config, others, load, free)}"
    )


def shown(plan: MemoryPlan, indent: str = "  ") -> str:
    """The table of a plan as lines."""
    lines = plan.table()
    width = max(len(cells[0]) for cells in lines)
    return "\n".join(
        (indent + "  ".join((cells[0].ljust(width), *cells[1:]))).rstrip() for cells in lines
    )


def _largest(
    settings: Settings, config: ModelConfig, others: OtherModels, load: Load, free: int
) -> Fitted | None:
    """The plan with the largest micro-batches that fit; None if none do."""
    wanted = settings.train.tokens_per_micro_batch
    sizes = [wanted, *range((wanted - 1) // STEP * STEP, 0, -STEP)]
    for tokens in sizes:
        plan = memory_plan(settings, config, others, load, free, tokens)
        if plan.peak + MARGIN <= free:
            return Fitted(plan, tokens, free)
    return None


def _advice(
    settings: Settings, config: ModelConfig, others: OtherModels, load: Load, free: int
) -> str:
    """The fewest settings with which it fits."""
    remedies = list(_remedies(settings, load))
    for count in range(1, len(remedies) + 1):
        for chosen in itertools.combinations(remedies, count):
            changed = settings
            for section, key, value in chosen:
                new = getattr(changed, section).model_copy(update={key: value})
                changed = changed.model_copy(update={section: new})
            together = min(load.sequences, changed.rollout.max_batch_size)
            fewer = replace(load, sequences=together)
            fitted = _largest(changed, config, others, fewer, free)
            if fitted is not None:
                words = " ".join(
                    f"{part}.{key}={as_override(value)}" for part, key, value in chosen
                )
                return (
                    f"it fits with {words}: {fitted.plan.peak / GIB:.1f} GiB, in micro-batches of "
                    f"up to {fitted.plan.micro_batch.tokens} tokens"
                )
    shorter = ", or lower rollout.max_tokens" if load.sequences else ""
    return f"no setting makes it fit: take a smaller model or a GPU with more memory{shorter}"


def _remedies(settings: Settings, load: Load) -> Iterator[tuple[str, str, object]]:
    """(section, key, value) of what takes less memory, the cheapest first."""
    train = settings.train
    measured = settings.reference.path is not None or settings.algorithm.kl > 0
    if measured and not settings.reference.offload:
        yield "reference", "offload", True
    if settings.reward.model_path is not None and not settings.reward.offload:
        yield "reward", "offload", True
    if train.optimizer_states == "fp32":
        yield "train", "optimizer_states", "compact"
    if load.sequences > _FEW_SEQUENCES:
        yield "rollout", "max_batch_size", _FEW_SEQUENCES
    if not train.activation_checkpointing:
        yield "train", "activation_checkpointing", True
