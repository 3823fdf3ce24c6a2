"""Optimizer: AdamW on float32 master weights, a learning-rate schedule, and global-norm clipping.

With float32 states, the update is `torch.optim.AdamW(fused=True)` on a GPU, and `adamw_` on a CPU.
Compact states of matrices take 3 bytes per parameter (kernels/adamw.py), and gradients are clipped
in the same pass; norms and biases keep float32 states. Weight decay applies to matrices only. State
is saved by master-weight name.

The gradient norm has the same bits with any number of ranks: sums of squares per block of 128 rows
are gathered and added in float64: by `exact_sum` if they are exact (float64), else in the order of
a GPU's library. The factor that clips gradients is in float32

    clip = min(grad_clip * (1 / (norm + 1e-6)), 1)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from jetrl.distributed.collectives import gather_equal
from jetrl.distributed.shards import BLOCK_ROWS, Shard
from jetrl.distributed.world import world
from jetrl.errors import UserError
from jetrl.kernels.adamw import adamw_, is_compact
from jetrl.kernels.adamw_scalars import AdamWScalars, adamw_scalars, from_element
from jetrl.kernels.norm import block_squares
from jetrl.precision.backend import has_defined_bits
from jetrl.precision.exact import exact_sum, square_root
from jetrl.settings.sections import TrainSettings
from jetrl.training.host_math import cos_of_half_turns


def _gathered(own: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> dict[str, Tensor]:
    """Return the sums of all blocks of all matrices, gathered from the ranks."""
    # One padded gather for all matrices, then split by rank.
    counts = {name: shards[name].counts(BLOCK_ROWS) for name in own}
    of_rank = [sum(count) for count in zip(*counts.values(), strict=True)]
    mine = torch.cat(list(own.values()))
    padded = mine.new_zeros((max(of_rank), mine.shape[1]))
    padded[: len(mine)] = mine
    pieces = [
        everything[:total].split([count[rank] for count in counts.values()])
        for rank, (everything, total) in enumerate(zip(gather_equal(padded), of_rank, strict=True))
    ]
    whole = (torch.cat(list(parts)) for parts in zip(*pieces, strict=True))
    return dict(zip(own, whole, strict=True))


ADVICE = (
    "the weights, gradients and AdamW's moments take 16 bytes per parameter, or 11 with "
    "train.optimizer_states=compact (jetrl train --dry-run has the memory plan): use that, a GPU "
    "with more memory, or a smaller model. The last checkpoint is good"
)
_COMPACT = {"ratio": torch.uint8, "root": torch.int16}
_LAYOUTS = {"fp32": {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}, "compact": _COMPACT}


def learning_rate(update: int, settings: TrainSettings, total_updates: int) -> float:
    """Return the learning rate of an update (from 0): linear warm-up, then the schedule.

    Warm-up update u uses lr * (u + 1) / warmup_steps. With `linear` or `cosine`, updates from
    total_updates - 1 on use lr * min_lr_ratio.
    """
    if update < settings.warmup_steps:
        return settings.lr * (update + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    # The last update of the run uses the minimum rate.
    span = max(1, total_updates - settings.warmup_steps - 1)
    progress = min(1.0, (update - settings.warmup_steps) / span)
    cosine = 0.5 * (1.0 + cos_of_half_turns(progress))
    share = 1.0 - progress if settings.schedule == "linear" else cosine
    return settings.lr * (settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * share)


class Optimizer:
    """AdamW over a model's float32 master weights, by name.

    Buffers, which need no gradients, are left as they are. `shards` splits the rows of weights
    across ranks; moments cover only this rank's rows.
    """

    def __init__(
        self,
        masters: Mapping[str, nn.Parameter],
        settings: TrainSettings,
        total_updates: int,
        shards: Mapping[str, Shard] | None = None,
    ) -> None:
        self.masters = {name: p for name, p in masters.items() if p.requires_grad}
        self.shards = dict(shards or {})
        self.settings = settings
        self.total_updates = total_updates
        self.num_updates = 0
        # Compact states are for matrices only: vectors are few and sensitive.
        states = settings.optimizer_states
        self._wide = {n: p for n, p in self.masters.items() if not is_compact(p.ndim, states)}
        # States by name, as torch.optim.AdamW stores them; empty before the first update.
        self._compact: dict[str, dict[str, Tensor]] = {}
        wide = self._wide.values()
        groups = [
            {"params": [p for p in wide if p.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in wide if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True
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

    def gradient_norm(self) -> Tensor:
        """Return the global gradient norm, a float32 scalar on the device."""
        # One sum of squares per 128 rows, so that sharding never splits it.
        masters = self.masters.items()
        squares = {name: block_squares(p.grad) for name, p in masters if p.grad is not None}
        if not squares:
            return torch.zeros(())
        divided = {name: square for name, square in squares.items() if name in self.shards}
        if divided:
            squares |= _gathered(divided, self.shards)
        terms = torch.cat(list(squares.values())).flatten()
        # A few terms per matrix: exact in any order if the squares are, which are then float64.
        exact = terms.dtype == torch.float64
        total = exact_sum(terms) if exact else terms.double().sum()
        return square_root(total).float()

    def nonfinite_gradients(self) -> list[str]:
        """Return the names of master weights with a NaN or infinity in their gradient."""
        # Each rank checks its own rows; a name is reported if any rank found it.
        gradients = {n: p.grad for n, p in self.masters.items() if p.grad is not None}
        own = [n for n, gradient in gradients.items() if not bool(torch.isfinite(gradient).all())]
        found = set().union(*world().gather("the gradients that are not finite", own))
        return [name for name in self.masters if name in found]

    def apply(self, total_norm: Tensor) -> None:
        """Clip gradients to `grad_clip`, update the master weights, and free the gradients."""
        most = self.settings.grad_clip
        clip = (most / (total_norm + 1e-6)).clamp(max=1.0)  # as in torch
        if has_defined_bits(total_norm):
            # The reference has the same bits everywhere; torch's own AdamW does not promise them.
            self._apply_fp32(clip)
        else:
            torch.nn.utils.clip_grads_with_norm_(self._wide.values(), most, total_norm)
            # Both optimizers use the scheduled rate; the compact one also clips in its own pass.
            for group in self._adamw.param_groups:
                group["lr"] = self.lr
            self._adamw.step()
        self._apply_compact(clip)
        self.num_updates += 1
        self.zero_grad()

    @torch.no_grad()
    def _apply_fp32(self, clip: Tensor) -> None:
        """Update parameters with float32 states from gradients times `clip`, on a CPU."""
        settings = self.settings
        for master in self._wide.values():
            if master.grad is None:
                continue
            # States are stored as torch.optim.AdamW stores them on a GPU.
            state = self._adamw.state[master]
            if not state:
                zeros = (torch.zeros_like(master.detach()) for _ in range(2))
                state |= zip(("step", *_LAYOUTS["fp32"]), (torch.zeros(()), *zeros), strict=True)
            state["step"] += 1
            # Vectors, such as weights of norms, do not decay.
            scalars = adamw_scalars(
                int(state["step"]),
                self._lr,
                betas=settings.betas,
                eps=settings.eps,
                weight_decay=settings.weight_decay if master.ndim >= 2 else 0.0,
            )
            first, second, gradient = (
                state["exp_avg"],
                state["exp_avg_sq"],
                master.grad.contiguous(),
            )
            adamw_(master.detach(), gradient, first, second, clip, scalars)

    @torch.no_grad()
    def _apply_compact(self, clip: Tensor) -> None:
        """Update matrices with compact states from gradients times `clip`, a float32 scalar."""
        settings = self.settings
        scalars: dict[int, AdamWScalars] = {}  # by step, usually the same for all
        for name, master in self.masters.items():
            if name in self._wide or master.grad is None:
                continue
            if name not in self._compact:
                zeros = {k: torch.zeros_like(master, dtype=d) for k, d in _COMPACT.items()}
                self._compact[name] = {"step": torch.zeros(()), **zeros}
            state = self._compact[name]
            state["step"] += 1
            step = int(state["step"])  # step counters are on the CPU
            if step not in scalars:
                scalars[step] = adamw_scalars(
                    step,
                    self._lr,
                    betas=settings.betas,
                    eps=settings.eps,
                    weight_decay=settings.weight_decay,
                )
            # Random bits are indexed by global element, so that sharding does not change the
            # rounding.
            own = scalars[step]
            if name in self.shards:
                own = from_element(own, self.shards[name].first_row * math.prod(master.shape[1:]))
            gradient = master.grad.contiguous()
            adamw_(master.detach(), gradient, state["ratio"], state["root"], clip, own)

    def _kind(self, name: str) -> str:
        return "fp32" if name in self._wide else "compact"

    def _state(self, name: str) -> Mapping[str, Tensor]:
        """Return the states of a master weight; {} before its first gradient."""
        if name not in self._wide:
            return self._compact.get(name, {})
        return self._adamw.state.get(self.masters[name], {})

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the moments by name: the optimizer's own tensors, not copies.

        float32 `exp_avg.NAME` and `exp_avg_sq.NAME`, or compact `ratio.NAME` and `root.NAME`, and
        `step.NAME` (float32 scalar); none for a master weight that never had a gradient.
        """
        return {
            f"{key}.{name}": state[key]
            for name in self.masters
            if (state := self._state(name))
            for key in ("step", *_LAYOUTS[self._kind(name)])
        }

    def shard_of(self, name: str) -> Shard | None:
        """Return how the rows of a state tensor are divided; None if every rank has it whole."""
        key, _, master = name.partition(".")
        return None if key == "step" else self.shards.get(master)

    def load_state(self, tensors: Mapping[str, Tensor], num_updates: int) -> None:
        """Load the result of `state_tensors`, bit for bit; a UserError has changed nothing."""
        states: dict[str, dict[str, Tensor]] = {}
        # Validate and move everything first.
        for full_name, tensor in tensors.items():
            key, _, name = full_name.partition(".")
            self._check_state(full_name, tensor)
            on_host = key == "step" and name not in self._wide
            device = "cpu" if on_host else self.masters[name].device
            states.setdefault(name, {})[key] = tensor.to(device, copy=True)
        for name, state in states.items():
            if len(state) != 1 + len(_LAYOUTS[self._kind(name)]):
                raise UserError(f"optimizer state of {name!r} is incomplete: {sorted(state)}")
        # Everything is validated, so nothing can fail halfway from here on.
        self._adamw.state.clear()
        self._compact.clear()
        for name, state in states.items():
            if name in self._wide:
                self._adamw.state[self.masters[name]] = state
            else:
                self._compact[name] = state
        self.num_updates = num_updates

    def _check_state(self, full_name: str, tensor: Tensor) -> None:
        """Raise UserError if a tensor is not a valid state of this optimizer."""
        key, _, name = full_name.partition(".")
        saved = next((kind for kind, keys in _LAYOUTS.items() if key in keys), None)
        if name not in self.masters or (saved is None and key != "step"):
            raise UserError(f"optimizer state {full_name!r} belongs to no parameter of the model")
        kind = self._kind(name)
        if saved not in (None, kind):
            raise UserError(
                f"the checkpoint has {saved} optimizer states, and train.optimizer_states is "
                f"{self.settings.optimizer_states} here: resume with train.optimizer_states={saved}"
            )
        needed = (torch.float32, torch.Size())
        if key != "step":
            needed = (_LAYOUTS[kind][key], self.masters[name].shape)
        if (tensor.dtype, tensor.shape) != needed:
            raise UserError(
                f"optimizer state {full_name!r} is {tensor.dtype} {tuple(tensor.shape)}; "
                f"this model needs {needed[0]} {tuple(needed[1])}"
            )
