"""Check that a run fits on its device before loading anything, or propose settings that fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from pydantic import ValidationError

from jetrl.distributed.agreement import LARGEST_SIZE, agree
from jetrl.distributed.world import world
from jetrl.errors import UserError
from jetrl.memory.graphs import NotCapturedError
from jetrl.memory.plan import GIB, MemoryPlan, PlannedRun, shown
from jetrl.precision.formats import INT8, NVFP4
from jetrl.precision.plan import PrecisionPlan
from jetrl.settings.loading import Settings, as_override

STEP = 1024  # granularity of micro-batch sizes, in tokens
_MORE_GPUS = (2, 4, 8, 16, 32, 64)  # numbers of GPUs to try if a run does not fit
_SHORT_ANSWER = 256  # minimum of proposed completion lengths, in tokens
_MOST_WAYS = 3  # maximum number of proposals of one kind
_PINNED = "distributed.same_bits_down_to"
Changes = dict[str, object]  # values of settings by their dotted names
_FEW_SEQUENCES = 256  # decode batch size whose graphs and logits take little memory


@dataclass(frozen=True)
class Fitted:
    """A memory plan with micro-batches of `tokens` that fits in `free` bytes (None: unknown)."""

    plan: MemoryPlan
    tokens: int
    free: int | None


@dataclass(frozen=True)
class Way:
    """Changes of settings with which a run fits, on `cards` GPUs (0: the same number)."""

    changes: Changes
    cards: int
    fitted: Fitted

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={as_override(value)}" for key, value in self.changes.items()]

    def __str__(self) -> str:
        words = " ".join(self.overrides)
        where = f"with {words}"
        if self.cards:
            where = f"on {self.cards} GPUs like this one (torchrun --nproc-per-node)"
            where += f", with {words}" if words else ""
        plan = self.fitted.plan
        rate = "; train.lr is then about ten times higher" if "adapter.kind" in self.changes else ""
        return (
            f"it fits {where}: {plan.needed / GIB:.1f} GiB{' on each' if self.cards else ''}, in "
            f"micro-batches of up to {plan.micro_batch.tokens} tokens{rate}"
        )


class DoesNotFitError(UserError):
    """A run does not fit; `ways` are the smallest changes with which it does."""

    def __init__(self, message: str, ways: list[Way]) -> None:
        super().__init__(message)
        self.ways = ways


def _largest(run: PlannedRun, free: int) -> Fitted | None:
    """Return the plan with the largest micro-batches that fit; None if no size does."""
    most = run.tokens
    fewest = run.settings.distributed.same_bits_down_to or run.cards
    for tokens in (most, *range((most - 1) // STEP * STEP, 0, -STEP)):
        on_fewest = MemoryPlan(replace(run, cards=fewest), free, tokens)
        plan = on_fewest if fewest == run.cards else MemoryPlan(run, free, tokens)
        if max(plan.needed, on_fewest.needed) <= free:
            return Fitted(plan, tokens, free)
    return None


def _changed(run: PlannedRun, changes: Changes, cards: int) -> PlannedRun | None:
    """Return the run with changed settings; None if they conflict with other settings."""
    tree = run.settings.model_dump(exclude_unset=True)
    for key, value in changes.items():
        section, _, name = key.partition(".")
        tree[section] = {**tree.get(section, {}), name: value}
    try:
        settings = Settings.model_validate(tree)
        PrecisionPlan.from_settings(settings.precision)
    except (ValidationError, UserError):
        return None
    load = run.load
    if "rollout.max_tokens" in changes:
        load = replace(load, tokens=min(load.tokens, load.prompt + settings.longest_answer))
    return replace(run, settings=settings, load=load, cards=cards)


def _way(run: PlannedRun, changes: Changes, free: int, cards: int = 0) -> Way | None:
    """Return a way to fit with changed settings or more GPUs; None if that does not fit."""
    changed = _changed(run, changes, cards or run.cards)
    # Try the smallest micro-batch first, since most changes do not suffice even for that.
    try:
        if changed is None or MemoryPlan(changed, free, min(STEP, run.tokens)).needed > free:
            return None
    except NotCapturedError:
        return None
    fitted = _largest(changed, free)
    return None if fitted is None else Way(changes, cards, fitted)


def check_fits(run: PlannedRun, free: int | None) -> Fitted:
    """Return the memory plan of a run, with the largest micro-batches that fit on a GPU.

    All ranks must call this function. The plan is for the rank with the least free memory: `free`
    bytes before loading; None for no limit. Raises DoesNotFitError, which proposes settings with
    which the run would fit.
    """
    fewest = run.settings.distributed.same_bits_down_to
    if fewest > run.cards:
        raise UserError(
            f"distributed.same_bits_down_to = {fewest}, and this run has {run.cards} "
            f"GPU{'s' * (run.cards > 1)}: its micro-batches would not be those of {fewest} GPUs; "
            f"set distributed.same_bits_down_to={run.cards}"
        )
    if free is not None:
        free = agree(LARGEST_SIZE, free)
    if free is None or run.device == "cpu":
        plan = MemoryPlan(run, None, run.tokens)
        if free is not None:
            _check_cpu(plan, free)
        return Fitted(plan, run.tokens, free)
    fitted = _largest(run, free)
    if fitted is None:
        raise _does_not_fit(replace(run, cards=fewest or run.cards), free)
    return fitted


def _check_cpu(plan: MemoryPlan, free: int) -> None:
    """Raise UserError if parameters and gradients exceed the CPU memory that is free."""
    # Activations differ on a CPU, so they are not counted.
    needed = plan.at("optimizer") * world().local_size
    if needed > free:
        raise UserError(
            "the model does not fit in CPU memory: weights, optimizer states and gradients take "
            f"{needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free; to plan for a GPU: "
            f"--dry-run --gpu-memory 80\n\n{shown(plan)}"
        )


def _does_not_fit(run: PlannedRun, free: int) -> DoesNotFitError:
    """Return the error for a run that does not fit, with its smallest plan and ways to fit."""
    least = MemoryPlan(run, free, min(STEP, run.tokens))
    where, each = ("the GPU", "") if run.cards == 1 else (f"{run.cards} GPUs", " on each")
    why = (
        f"even with micro-batches of {least.micro_batch.tokens} tokens it needs "
        f"{least.needed / GIB:.1f} GiB{each}, and {free / GIB:.1f} GiB are free"
    )
    ways = _ways(run, free)
    if run.load.image:
        why += (
            f" (the largest image has {run.load.image} tokens: max_pixels or size in "
            "preprocessor_config.json would bound them)"
        )
    nothing = "no setting makes it fit: use a smaller model or a GPU with more memory"
    advice = "\n".join(map(str, ways)) or nothing
    return DoesNotFitError(
        f"the model does not fit on {where}: {why}\n\n{shown(least)}\n\n{advice}", ways
    )


def _ways(run: PlannedRun, free: int) -> list[Way]:
    """Return the smallest changes that fit: for full training, for LoRA, and with more GPUs."""
    remedies, shorter = list(_remedies(run)), list(_shorter_answers(run))
    adapted: list[Changes] = [*remedies, {"precision.base": NVFP4.name}, *shorter]
    if run.settings.adapter.kind is None:
        whole = _smallest(run, [*remedies, *shorter], {}, free)
        ways = [*whole, *_smallest(run, adapted, {"adapter.kind": "lora"}, free)]
    else:
        ways = whole = _smallest(run, adapted, {}, free)
    # More GPUs need less memory each, unless forwards read master weights, which are not divided.
    if PrecisionPlan.from_settings(run.settings.precision).reads_masters:
        return ways
    pinned = run.settings.distributed.same_bits_down_to
    for changes in ({}, *([] if whole else [_merged(remedies)])):
        for cards in _MORE_GPUS:
            if cards <= run.cards:
                continue
            way = _way(run, {**changes, **({_PINNED: cards} if pinned else {})}, free, cards)
            if way is not None:
                return [*ways, way]
    return ways


def _smallest(
    run: PlannedRun, remedies: Sequence[Changes], always: Changes, free: int
) -> list[Way]:
    """Return up to three sets of remedies that fit, each with the minimum number of settings."""
    remedies = [remedy for remedy in remedies if _changed(run, {**always, **remedy}, run.cards)]
    if _way(run, _merged([always, *remedies]), free) is None:
        return []
    for count in range(len(remedies) + 1):
        found: dict[tuple[str, ...], Way] = {}
        for chosen in itertools.combinations(remedies, count):
            changes = _merged([always, *chosen])
            keys = tuple(changes)
            twice = len(keys) < len(always) + sum(map(len, chosen))  # of one setting
            if not twice and keys not in found and (way := _way(run, changes, free)):
                found[keys] = way
                if len(found) == _MOST_WAYS:
                    break
        if found:
            return list(found.values())
    return []


def _merged(changes: Iterable[Changes]) -> Changes:
    """Return all changes together; the last one of a setting counts."""
    return dict(pair for change in changes for pair in change.items())


def _remedies(run: PlannedRun) -> Iterator[Changes]:
    """Yield changes that save memory, cheapest first."""
    settings, train = run.settings, run.settings.train
    eager: Changes = {"train.graphs": "off"} if MemoryPlan(run, None, STEP).captures else {}
    if eager:
        yield eager
    measured = settings.reference.path is not None or settings.algorithm.kl > 0
    if measured and not settings.reference.offload:
        yield {"reference.offload": True}
    if settings.reward.model_path is not None and not settings.reward.offload:
        yield {"reward.offload": True}
    if train.optimizer_states != "compact":
        yield {"train.optimizer_states": "compact"}
    if run.load.of_a_rank(settings, run.cards).sequences > _FEW_SEQUENCES:
        yield {"rollout.max_batch_size": _FEW_SEQUENCES}
    codes: Changes = {"precision.saved": INT8.name}
    is_off = PrecisionPlan.from_settings(settings.precision).saved == "off"
    halves = [half for layer in run.config.layers for half in (layer.mixer, layer.block)]
    if is_off and all(half.saved_codes for half in halves) and _changed(run, codes, run.cards):
        yield codes
    if not train.activation_checkpointing:
        # `train.graphs = on` would refuse it.
        yield {"train.activation_checkpointing": True, **(eager if train.graphs == "on" else {})}


def _shorter_answers(run: PlannedRun) -> Iterator[Changes]:
    """Yield maximum completion lengths, each half of the one before."""
    settings, answer = run.settings, run.settings.longest_answer
    while run.load.sequences and (answer := answer // 2) >= _SHORT_ANSWER:
        shorter: Changes = {"rollout.max_tokens": answer}
        if (settings.eval.max_tokens or 0) > answer:
            shorter["eval.max_tokens"] = answer
        yield shorter
