"""Check that a run fits on its device before anything is loaded, or say what would make it fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jetrl.distributed.agreement import LARGEST_SIZE, agree
from jetrl.distributed.world import world
from jetrl.errors import UserError
from jetrl.memory.plan import GIB, MOMENTS, MemoryPlan, OtherModels, Row, Workload
from jetrl.models.families import ModelConfig
from jetrl.precision.plan import PrecisionPlan
from jetrl.settings.loading import Settings, as_override

STEP = 1024  # Micro-batches are planned in multiples of so many tokens.
_MORE_GPUS = (2, 4, 8, 16, 32, 64)  # numbers of GPUs that are tried if a run does not fit
_Remedy = tuple[str, str, object]  # section, key and value of a setting
_FEW_SEQUENCES = 256  # Decode's graphs and logits take little for so many at once.


@dataclass(frozen=True)
class Fitted:
    """A memory plan that fits its device.

    Attributes:
        tokens: The micro-batch limit: train.tokens_per_micro_batch, or what fits of it.
        free: Bytes free before anything is loaded; None if unknown.
    """

    plan: MemoryPlan
    tokens: int
    free: int | None


@dataclass(frozen=True)
class _Run:
    """A run whose memory is planned: the constant arguments of `MemoryPlan`."""

    settings: Settings
    config: ModelConfig
    others: OtherModels
    load: Workload
    cards: int

    def plan(self, free: int | None, tokens: int, device: str = "cuda") -> MemoryPlan:
        return MemoryPlan(
            self.settings, self.config, self.others, self.load, free, tokens, device, self.cards
        )

    def largest(self, free: int) -> Fitted | None:
        """Return the plan with the largest micro-batches that fit; None if no size does."""
        most = self.settings.train.tokens_per_micro_batch
        fewest = self.settings.distributed.same_bits_down_to or self.cards
        for tokens in (most, *range((most - 1) // STEP * STEP, 0, -STEP)):
            plans = [replace(self, cards=n).plan(free, tokens) for n in {fewest, self.cards}]
            if all(plan.needed <= free for plan in plans):
                return Fitted(self.plan(free, tokens), tokens, free)
        return None

    def fits_with(self, remedies: Sequence[_Remedy], free: int, cards: int = 0) -> str:
        """Return in words how the run fits with some settings changed; "" if it does not."""
        settings = self.settings
        for section, key, value in remedies:
            new = getattr(settings, section).model_copy(update={key: value})
            settings = settings.model_copy(update={section: new})
        run = replace(self, settings=settings, cards=cards or self.cards)
        fitted = run.largest(free)
        if fitted is None:
            return ""
        words = " ".join(f"{part}.{key}={as_override(value)}" for part, key, value in remedies)
        where = f"with {words}"
        if cards:
            where = f"on {cards} GPUs like this one (torchrun --nproc-per-node)"
            where += f", with {words}" if words else ""
        size = f"{fitted.plan.needed / GIB:.1f} GiB{' on each' if cards else ''}"
        most = f"in micro-batches of up to {fitted.plan.micro_batch.tokens} tokens"
        return f"it fits {where}: {size}, {most}"


def check_fits(
    settings: Settings,
    config: ModelConfig,
    others: OtherModels,
    load: Workload,
    device: str,
    free: int | None,
    cards: int | None = None,
) -> Fitted:
    """Return the memory plan of a run, with the largest micro-batches that fit on a GPU.

    All ranks call it together. The plan is for the rank with the least free memory.

    Args:
        free: Bytes free before anything is loaded; None plans without a limit.
        cards: The number of GPUs; None: one per process.

    Raises:
        UserError: The run does not fit; the message names settings that would.
    """
    tokens = settings.train.tokens_per_micro_batch
    run = _Run(settings, config, others, load, world().size if cards is None else cards)
    fewest = settings.distributed.same_bits_down_to
    if fewest > run.cards:
        raise UserError(
            f"distributed.same_bits_down_to = {fewest}, and this run has {run.cards} "
            f"GPU{'s' * (run.cards > 1)}: its micro-batches would not be those of {fewest} GPUs; "
            f"set distributed.same_bits_down_to={run.cards}"
        )
    if free is not None:
        free = agree(LARGEST_SIZE, free)
    if free is None or device == "cpu":
        plan = run.plan(None, tokens, device)
        # The CPU's references keep other activations, so only what is certain is refused.
        needed = plan.at("optimizer") * world().local_size
        if free is not None and needed > free:
            what = "weights, optimizer states and gradients"
            sizes = f"{what} take {needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free"
            raise UserError(f"the model does not fit in CPU memory: {sizes}\n\n{shown(plan)}")
        return Fitted(plan, tokens, free)
    fitted = run.largest(free)
    if fitted is not None:
        return fitted
    tightest = replace(run, cards=fewest or run.cards)
    least = tightest.plan(free, min(STEP, tokens))
    where, each = ("the GPU", "") if tightest.cards == 1 else (f"{tightest.cards} GPUs", " on each")
    sizes = f"{least.needed / GIB:.1f} GiB{each}, and {free / GIB:.1f} GiB are free"
    why = f"even with micro-batches of {least.micro_batch.tokens} tokens it needs {sizes}"
    plan_and_advice = f"{shown(least)}\n\n{_advice(tightest, free)}"
    raise UserError(f"the model does not fit on {where}: {why}\n\n{plan_and_advice}")


def _advice(run: _Run, free: int) -> str:
    """Return, in words, the fewest settings with which the run fits, and the fewest GPUs."""
    remedies = list(_remedies(run))
    sets = (itertools.combinations(remedies, n) for n in range(1, len(remedies) + 1))
    by_settings = (run.fits_with(chosen, free) for chosen in itertools.chain(*sets))
    # More GPUs hold less each, unless forwards read the master weights.
    divided = PrecisionPlan.from_settings(run.settings.precision).rest != "fp32"
    counts = [n for n in _MORE_GPUS if divided and n > run.cards]
    pinned = bool(run.settings.distributed.same_bits_down_to)
    by_cards = (
        run.fits_with((*chosen, *[("distributed", "same_bits_down_to", n)] * pinned), free, n)
        for chosen in dict.fromkeys(((), tuple(remedies)))
        for n in counts
    )
    found = [next(filter(None, ways), "") for ways in (by_settings, by_cards)]
    nothing = "no setting makes it fit: use a smaller model or a GPU with more memory"
    nothing += ", or lower rollout.max_tokens" if run.load.sequences else ""
    return "\n".join(filter(None, found)) or nothing


def _remedies(run: _Run) -> Iterator[_Remedy]:
    """Yield settings that save memory, the cheapest first."""
    settings = run.settings
    train = settings.train
    measured = settings.reference.path is not None or settings.algorithm.kl > 0
    if measured and not settings.reference.offload:
        yield "reference", "offload", True
    if settings.reward.model_path is not None and not settings.reward.offload:
        yield "reward", "offload", True
    if train.optimizer_states == "fp32":
        yield "train", "optimizer_states", "compact"
    if run.load.of_a_rank(settings, run.cards).sequences > _FEW_SEQUENCES:
        yield "rollout", "max_batch_size", _FEW_SEQUENCES
    if not train.activation_checkpointing:
        yield "train", "activation_checkpointing", True


_LEAST = GIB / 2000  # bytes: less is 0.000 in the table


def shown(plan: MemoryPlan, indent: str = "  ") -> str:
    """Return a plan's table, without rows that would be 0.000 in every column."""
    moments = [moment for moment in MOMENTS if plan.at(moment)]
    rows = [row for row in plan.rows if max(row.bytes.values()) >= _LEAST]
    held = {moment: plan.at(moment) for moment in moments}
    rows.append(Row("held", held))
    if plan.reserve:
        rows.append(Row("left for kernels' code and holes", dict.fromkeys(moments, plan.reserve)))
        rows.append(Row("needed", {m: size + plan.reserve for m, size in held.items()}))
    width = max(len(row.what) for row in rows)
    lines = ["".join(("GiB".ljust(width), *(f"{moment:>11}" for moment in moments)))]
    for row in rows:
        sizes = (f"{row.bytes[m] / GIB:.3f}" if row.bytes.get(m) else "" for m in moments)
        lines.append("".join((row.what.ljust(width), *(f"{size:>11}" for size in sizes))))
    return "\n".join((indent + line).rstrip() for line in lines)
