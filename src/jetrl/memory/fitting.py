"""Check that a run fits on its device before anything is loaded, and say what would make it fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jetrl.errors import UserError
from jetrl.memory.plan import GIB, MemoryPlan, OtherModels, Workload, memory_plan
from jetrl.models.families import ModelConfig
from jetrl.settings.loading import Settings, as_override

STEP = 1024  # Micro-batches are planned in multiples of so many tokens.
# Left out of the plan: the code of kernels (0.2 GiB), and holes between allocations.
MARGIN = 3 * 2**29
_FEW_SEQUENCES = 256  # Decode's graphs and logits take little for so many at once.


@dataclass(frozen=True)
class Fitted:
    """A memory plan that fits its device.

    Attributes:
        plan: What will be held.
        tokens: The most tokens of a micro-batch: train.tokens_per_micro_batch, or fewer where that
            many do not fit.
        free: Bytes that the device had free before anything was loaded; None where it is not known.
    """

    plan: MemoryPlan
    tokens: int
    free: int | None


def check_fits(
    settings: Settings,
    config: ModelConfig,
    others: OtherModels,
    load: Workload,
    device: str,
    free: int | None,
) -> Fitted:
    """Return the memory plan of a run that fits its device.

    On a GPU a micro-batch gets as many tokens as there is room for, up to
    train.tokens_per_micro_batch.

    Args:
        settings: The run's settings.
        config: The shape of the model that is trained.
        others: The shapes of the models beside it.
        load: The largest work of a step.
        device: "cpu" or "cuda".
        free: Bytes that the device has free before anything is loaded; None, where they are not
            known, plans whatever is asked for.

    Raises:
        UserError: The run does not fit; the message has the plan and settings that would fit.
    """
    tokens = settings.train.tokens_per_micro_batch
    if free is None or device == "cpu":
        plan = memory_plan(settings, config, others, load, tokens=tokens, device=device)
        # The CPU's references keep other activations, so only what is certain is refused.
        if free is not None and plan.at("optimizer") > free:
            raise UserError(
                f"the model does not fit in CPU memory: weights, optimizer states and gradients "
                f"take {plan.at('optimizer') / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free\n\n"
                + shown(plan)
            )
        return Fitted(plan, tokens, free)
    fitted = _largest(settings, config, others, load, free)
    if fitted is not None:
        return fitted
    least = memory_plan(settings, config, others, load, free, tokens=min(STEP, tokens))
    raise UserError(
        f"the model does not fit on the GPU: even with micro-batches of {least.micro_batch.tokens} "
        f"tokens it needs {(least.peak + MARGIN) / GIB:.1f} GiB, and {free / GIB:.1f} GiB are "
        f"free\n\n{shown(least)}\n\n{_advice(settings, config, others, load, free)}"
    )


def shown(plan: MemoryPlan, indent: str = "  ") -> str:
    """Return the table of a plan as text, each line after `indent`."""
    lines = plan.table()
    width = max(len(cells[0]) for cells in lines)
    return "\n".join(
        (indent + "  ".join((cells[0].ljust(width), *cells[1:]))).rstrip() for cells in lines
    )


def _largest(
    settings: Settings, config: ModelConfig, others: OtherModels, load: Workload, free: int
) -> Fitted | None:
    """Return the plan with the largest micro-batches that fit, None if no size does."""
    most = settings.train.tokens_per_micro_batch
    sizes = [most, *range((most - 1) // STEP * STEP, 0, -STEP)]
    for tokens in sizes:
        plan = memory_plan(settings, config, others, load, free, tokens)
        if plan.peak + MARGIN <= free:
            return Fitted(plan, tokens, free)
    return None


def _advice(
    settings: Settings, config: ModelConfig, others: OtherModels, load: Workload, free: int
) -> str:
    """Return, in words, the fewest settings with which the run fits."""
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


def _remedies(settings: Settings, load: Workload) -> Iterator[tuple[str, str, object]]:
    """Yield (section, key, value) of settings that save memory, the cheapest first."""
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
