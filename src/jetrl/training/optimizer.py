"""The optimizer: AdamW on the float32 master weights, a schedule, and a global gradient-norm clip.

With float32 states the update is `torch.optim.AdamW(fused=True)`. With compact states matrices use
`CompactAdamW` (3 bytes per parameter, kernels/adamw.py), which applies the clip in the same pass;
norms and biases keep float32. Weight decay applies to matrices only. State is saved by the name of
the master weight, never by position.

The gradient norm has the same bits with any number of ranks: every block of 128 rows has its own
sum of squares, computed by its owner; these are gathered and added in float64, in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from jetrl.distributed.collectives import gather_equal
from jetrl.distributed.shards import BLOCK_ROWS, Shard
from jetrl.distributed.world import world
from jetrl.errors import UserError
from jetrl.kernels.adamw import adamw_, is_compact
from jetrl.kernels.adamw_scalars import AdamWScalars, adamw_scalars, from_element
from jetrl.kernels.norm import block_squares
from jetrl.settings.loading import Settings
from jetrl.settings.sections import TrainSettings

if TYPE_CHECKING:
    from jetrl.models.model import Model


def gradient_norm(gradients: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> Tensor:
    """Return the norm of all gradients together, a float32 scalar on their device.

    Args:
        gradients: By name, own rows of a divided master weight; the same names on every rank.
        shards: How the rows of divided weights are owned, by name.
    """
    # One sum of squares per 128 rows, which no division among ranks cuts.
    squares = {name: block_squares(gradient) for name, gradient in gradients.items()}
    if not squares:
        return torch.zeros(())
    divided = [name for name in squares if name in shards]
    if divided:
        squares |= _gathered({name: squares[name] for name in divided}, shards)
    return torch.cat([squares[name] for name in gradients]).double().sum().sqrt().float()


def _gathered(own: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> dict[str, Tensor]:
    """Return the sums of all blocks of matrices, of which each rank has its own."""
    # One padded gather for all matrices; then each rank's pieces are cut out again.
    counts = {name: shards[name].counts(BLOCK_ROWS) for name in own}
    of_rank = [sum(count) for count in zip(*counts.values(), strict=True)]
    mine = torch.cat(list(own.values()))
    padded = mine.new_zeros((max(of_rank), mine.shape[1]))
    padded[: len(mine)] = mine
    pieces = [
        everything[:total].split([count[rank] for count in counts.values()])
        for rank, (everything, total) in enumerate(zip(gather_equal(padded), of_rank, strict=True))
    ]
    return {
        name: torch.cat(list(p)) for name, p in zip(own, zip(*pieces, strict=True), strict=True)
    }


KEYS = {"ratio": torch.uint8, "root": torch.int16}


@dataclass
class _State:
    """The moments of one master weight, and its number of updates."""

    ratio: torch.Tensor
    root: torch.Tensor
    step: int = 0


class CompactAdamW:
    """AdamW over named float32 matrices with compact states (kernels/adamw.py)."""

    def __init__(
        self,
        masters: Mapping[str, nn.Parameter],
        settings: TrainSettings,
        shards: Mapping[str, Shard],
    ) -> None:
        self._masters, self._shards = dict(masters), shards
        self._settings = settings
        self._states: dict[str, _State] = {}

    @torch.no_grad()
    def step(self, clip: torch.Tensor, lr: Callable[[int], float]) -> None:
        """Update the matrices by their gradients, multiplied by `clip` (a float32 scalar)."""
        settings = self._settings
        scalars: dict[int, AdamWScalars] = {}  # by step, as a rule the same one for all
        for name, master in self._masters.items():
            if master.grad is None:
                continue
            state = self._states.get(name)
            if state is None:
                ratio, root = (torch.zeros_like(master, dtype=dtype) for dtype in KEYS.values())
                state = _State(ratio, root)
                self._states[name] = state
            state.step += 1
            if state.step not in scalars:
                scalars[state.step] = adamw_scalars(
                    state.step, lr, settings.betas, settings.eps, settings.weight_decay
                )
            # A rank rounds the rows that it owns as one rank would: random bits count elements.
            own = scalars[state.step]
            if name in self._shards:
                own = from_element(own, self._shards[name].first_row * math.prod(master.shape[1:]))
            gradient = master.grad.contiguous()
            adamw_(master.detach(), gradient, state.ratio, state.root, clip, own)

    def state(self, name: str) -> dict[str, torch.Tensor]:
        """Return a matrix's `ratio`, `root` and `step`; {} before its first gradient."""
        state = self._states.get(name)
        if state is None:
            return {}
        step = torch.tensor(float(state.step))
        return {"step": step, "ratio": state.ratio, "root": state.root}

    def load(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self._states = {
            name: _State(state["ratio"], state["root"], int(state["step"]))
            for name, state in states.items()
        }


ADVICE = (
    "the weights, gradients and AdamW's moments take 16 bytes per parameter, or 11 with "
    "train.optimizer_states=compact (jetrl train --dry-run has the memory plan): use that, a GPU "
    "with more memory, or a smaller model. The last checkpoint is good"
)
_LAYOUTS = {
    "fp32": {"exp_avg": torch.float32, "exp_avg_sq": torch.float32},
    "compact": KEYS,
}


def learning_rate(update: int, settings: TrainSettings, total_updates: int) -> float:
    """Return the learning rate of an update, counted from 0: linear warm-up, then the schedule.

    Warm-up update u has lr * (u + 1) / warmup_steps. The first update after it has the full lr;
    with `linear` or `cosine` update total_updates - 1 and any later have lr * min_lr_ratio.
    """
    if update < settings.warmup_steps:
        return settings.lr * (update + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    span = max(1, total_updates - settings.warmup_steps - 1)
    progress = min(1.0, (update - settings.warmup_steps) / span)
    if settings.schedule == "linear":
        share = 1.0 - progress
    else:
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.lr * (settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * share)


class Optimizer:
    """AdamW over the master weights of one model.

    Args:
        masters: The float32 parameters by name; gradients are read from `.grad`.
        shards: How the rows of parameters are divided among ranks, by name; moments have the shape
            of this rank's rows.
    """

    def __init__(
        self,
        masters: Mapping[str, nn.Parameter],
        settings: TrainSettings,
        total_updates: int,
        shards: Mapping[str, Shard] | None = None,
    ) -> None:
        self.masters, self.shards = dict(masters), dict(shards or {})
        self.settings = settings
        self.total_updates = total_updates
        self.num_updates = 0
        # Vectors are few and sensitive: only matrices get compact states.
        kinds = {
            name: "compact" if is_compact(p.ndim, settings.optimizer_states) else "fp32"
            for name, p in self.masters.items()
        }
        self._kinds = kinds
        compact = {name: p for name, p in self.masters.items() if kinds[name] == "compact"}
        self._compact = CompactAdamW(compact, settings, self.shards)
        self._wide = [p for name, p in self.masters.items() if kinds[name] == "fp32"]
        groups = [
            {
                "params": [p for p in self._wide if p.ndim >= 2],
                "weight_decay": settings.weight_decay,
            },
            {"params": [p for p in self._wide if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            groups,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )

    @property
    def lr(self) -> float:
        """Return the learning rate of the next update."""
        return self._lr(0)

    def _lr(self, later: int) -> float:
        return learning_rate(self.num_updates + later, self.settings, self.total_updates)

    def zero_grad(self) -> None:
        for master in self.masters.values():
            master.grad = None

    def gradient_norm(self) -> torch.Tensor:
        """Return the norm of all gradients together, a float32 scalar on the device."""
        gradients = {name: p.grad for name, p in self.masters.items() if p.grad is not None}
        return gradient_norm(gradients, self.shards)

    def nonfinite_gradients(self) -> list[str]:
        """Return the names of master weights whose gradient has a NaN or infinity."""
        own = [
            name
            for name, master in self.masters.items()
            if master.grad is not None and not bool(torch.isfinite(master.grad).all())
        ]
        found = set().union(*world().gather("the gradients that are not finite", own))
        return [name for name in self.masters if name in found]

    def apply(self, total_norm: torch.Tensor) -> None:
        """Clip the gradients to `grad_clip`, update the master weights, drop the gradients.

        Args:
            total_norm: The result of `gradient_norm`, known to be finite.
        """
        torch.nn.utils.clip_grads_with_norm_(self._wide, self.settings.grad_clip, total_norm)
        # Both optimizers use the schedule's rate; the compact one also clips in its own pass.
        for group in self._adamw.param_groups:
            group["lr"] = self.lr
        self._adamw.step()
        clip = (self.settings.grad_clip / (total_norm + 1e-6)).clamp(max=1.0)  # as torch's
        self._compact.step(clip, self._lr)
        self.num_updates += 1
        self.zero_grad()

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return the moments by name: the optimizer's own tensors, not copies.

        float32 `exp_avg.NAME` and `exp_avg_sq.NAME`, or compact `ratio.NAME` and `root.NAME`, and
        `step.NAME` (float32 scalar); nothing for a master weight that never had a gradient.
        """
        tensors = {}
        for name, master in self.masters.items():
            if self._kinds[name] == "compact":
                state = self._compact.state(name)
            else:
                state = self._adamw.state.get(master, {})
            for key in ("step", *_LAYOUTS[self._kinds[name]]):
                if key in state:
                    tensors[f"{key}.{name}"] = state[key]
        return tensors

    def shard_of(self, name: str) -> Shard | None:
        """Return how the rows of a state tensor are divided; None if every rank has it whole."""
        key, _, master = name.partition(".")
        return None if key == "step" else self.shards.get(master)

    def load_state(self, tensors: Mapping[str, torch.Tensor], num_updates: int) -> None:
        """Load the result of `state_tensors`, bit for bit, and the number of updates so far.

        Raises:
            UserError: States of the other kind, of an unknown master weight, or of another shape.
                Nothing was changed then.
        """
        states: dict[str, dict[str, torch.Tensor]] = {}
        for full_name, tensor in tensors.items():
            key, _, name = full_name.partition(".")
            self._check_state(full_name, tensor)
            states.setdefault(name, {})[key] = tensor.to(self.masters[name].device, copy=True)
        for name, state in states.items():
            if len(state) != 1 + len(_LAYOUTS[self._kinds[name]]):
                raise UserError(f"optimizer state of {name!r} is incomplete: {sorted(state)}")
        # Everything was checked before, so from here on nothing can fail half-way.
        self._adamw.state.clear()
        for name, state in states.items():
            if self._kinds[name] == "fp32":
                self._adamw.state[self.masters[name]] = state
        self._compact.load({n: s for n, s in states.items() if self._kinds[n] == "compact"})
        self.num_updates = num_updates

    def _check_state(self, full_name: str, tensor: torch.Tensor) -> None:
        """Raise a `UserError` if a tensor is not one of this optimizer's states."""
        key, _, name = full_name.partition(".")
        master = self.masters.get(name)
        saved = next((kind for kind, keys in _LAYOUTS.items() if key in keys), None)
        if master is None or (saved is None and key != "step"):
            raise UserError(f"optimizer state {full_name!r} belongs to no parameter of the model")
        kind = self._kinds[name]
        if saved not in (None, kind):
            raise UserError(
                f"the checkpoint has {saved} optimizer states, and train.optimizer_states is "
                f"{self.settings.optimizer_states} here: resume with train.optimizer_states={saved}"
            )
        shape = torch.Size() if key == "step" else master.shape
        dtype = torch.float32 if key == "step" else _LAYOUTS[kind][key]
        if tensor.shape != shape or tensor.dtype != dtype:
            expected = str(dtype).removeprefix("torch.")
            raise UserError(
                f"optimizer state {full_name!r} is {tensor.dtype} {tuple(tensor.shape)}; "
                f"this model needs {expected} {tuple(shape)}"
            )


def supervised_optimizer(model: Model, settings: Settings) -> Optimizer:
    """Return an optimizer with lr, warm-up and schedule of `sft`, the rest of `train`."""
    sft = settings.sft
    train = settings.train.model_copy(
        update={"lr": sft.lr, "warmup_steps": sft.warmup_steps, "schedule": sft.schedule}
    )
    return Optimizer(model.master_weights(), train, sft.steps, model.weights.shards)
