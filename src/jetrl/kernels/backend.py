"""The kernels of a device for the operations of this package (see `precision.backend`)."""

from __future__ import annotations

import functools
from typing import Protocol

from torch import Tensor

from jetrl.kernels.adamw_scalars import AdamWScalars
from jetrl.kernels.decode_state import (
    DecodeInputs,
    DecodeState,
    Drafts,
    DraftText,
    Drawn,
    Verified,
    VerifyInputs,
)
from jetrl.precision.backend import REFERENCE, backend_of
from jetrl.precision.gradients import Gradients


class Kernels(Protocol):
    """A device's kernels, each named like the public operation that it computes."""

    # fmt: off
    def adamw_(
        self, master: Tensor, grad: Tensor, ratio: Tensor, root: Tensor, clip: Tensor,
        scalars: AdamWScalars, /,
    ) -> None: ...
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, /) -> Tensor: ...
    def block_squares(self, x: Tensor, /) -> Tensor: ...
    def swiglu(self, gate_up: Tensor, /) -> Tensor: ...

    # kernels.logprob; the second also makes the logits, one chunk of rows at a time
    def chosen_logprobs(
        self, logits: Tensor, chosen: Tensor, temperature: float, /
    ) -> tuple[Tensor, Tensor]: ...
    def lm_head_logprobs(
        self, hidden: Tensor, master: Tensor, weight: Tensor, chosen: Tensor, temperature: float,
        *, recompute: bool, gradients: Gradients,
    ) -> tuple[Tensor, Tensor]: ...

    # kernels.sampling
    def sample(
        self, logits: Tensor, bits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor,
        filtered: bool, /,
    ) -> tuple[Tensor, Tensor, Tensor]: ...
    def add_noise_(self, logits: Tensor, bits: Tensor, scale: float, counter: int, /) -> Tensor: ...

    # kernels.decode and kernels.draft
    def next_inputs(self, state: DecodeState, rows: Tensor, page_size: int, /) -> DecodeInputs: ...
    def take_draws(
        self, state: DecodeState, rows: Tensor, tokens: Tensor, logprobs: Tensor, lse: Tensor,
        out: Drawn, /,
    ) -> None: ...
    def propose(
        self, draft_text: DraftText, state: DecodeState, rows: Tensor, longest_only: bool, /
    ) -> Drafts: ...
    def verify_inputs(
        self, state: DecodeState, draft_text: DraftText, drafts: Drafts, rows: Tensor,
        page_size: int, width: int, size: int, /,
    ) -> VerifyInputs: ...
    def take_verified(
        self, state: DecodeState, draft_text: DraftText, drafts: Drafts, inputs: VerifyInputs,
        rows: Tensor, tokens: Tensor, logprobs: Tensor, lse: Tensor, out: Verified, width: int, /,
    ) -> None: ...
    # fmt: on


@functools.cache
def _hopper() -> Kernels:
    from jetrl.kernels import hopper

    return hopper


def kernels_of(x: Tensor) -> Kernels | None:
    """Return the kernels of a tensor's device; None: compute the reference."""
    return None if backend_of(x) is REFERENCE else _hopper()
