"""Kernel tables per backend for the operations of this package (see `precision.backend`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor

from jetrl.kernels.adamw_scalars import AdamWScalars
from jetrl.kernels.attention.layout import KeyValueCodes, QueryTiles, SequenceQueries
from jetrl.kernels.decode_state import (
    DecodeInputs,
    DecodeState,
    Drafts,
    DraftText,
    Drawn,
    Verified,
    VerifyInputs,
)
from jetrl.kernels.routing_rule import RoutingRule
from jetrl.precision.backend import REFERENCE, backend_of
from jetrl.precision.gradients import Gradients
from jetrl.precision.quantize import FP8Format, QTensor

# fmt: off


class _Fused(Protocol):
    """RMSNorm and SwiGLU fused with quantization; callers wrap them in autograd functions."""

    def rms_norm_forward(self, x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None,
                         /) -> tuple[Tensor, Tensor, Tensor]: ...
    def rms_norm_quantize(
        self, x: Tensor, weight: Tensor, eps: float, delta: Tensor | None, for_training: bool,
        scales: str | None, with_values: bool,
        /) -> tuple[Tensor, Tensor | None, QTensor, Tensor | None]: ...
    def rms_norm_squares(self, total: Tensor, weight: Tensor, inverse_rms: Tensor, scales: str,
                         /) -> QTensor: ...
    def rms_norm_backward(self, dy: Tensor, x: Tensor, weight: Tensor, inverse_rms: Tensor,
                          dresidual: Tensor | None = None, sums: list[Tensor] | None = None,
                          /) -> tuple[Tensor, Tensor]: ...
    def swiglu_forward(self, gate_up: Tensor, /) -> Tensor: ...
    def swiglu_quantize(self, gate_up: Tensor, scales: str | None, /) -> QTensor: ...
    def swiglu_quantize_with_values(self, gate_up: Tensor, scales: str | None,
                                    /) -> tuple[QTensor, Tensor]: ...
    def swiglu_backward(self, dy: Tensor, gate_up: Tensor, y: Tensor | None = None,
                        /) -> Tensor: ...
    def swiglu_backward_quantize(self, dy: Tensor, gate_up: Tensor, format: FP8Format, scales: str,
                                 /) -> tuple[QTensor, QTensor, QTensor]: ...
    def swiglu_backward_values_(self, dy: Tensor, gate_up: Tensor, scales: str,
                                /) -> tuple[QTensor, Tensor]: ...


class _Attention(Protocol):
    """Attention, starting from qkv; decode, prefill and training are bitwise consistent."""

    SPLIT_KEYS: int  # default keys per split; the precision plan can override it

    def qk_norm_rotary_cache(
        self, qkv: Tensor, positions: Tensor, table: Tensor, norms: tuple[Tensor, Tensor] | None,
        eps: float, num_heads: int, cache: KeyValueCodes, slots: Tensor | None, scales: str,
        exponents: Tensor | None, /) -> Tensor: ...
    def qk_norm_rotary_backward(
        self, dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, positions: Tensor, table: Tensor,
        norms: tuple[Tensor, Tensor] | None, eps: float, exponents: Tensor | None,
        /) -> tuple[Tensor, Tensor | None, Tensor | None]: ...
    def attend_batch(self, q: Tensor, codes: KeyValueCodes, tiles: QueryTiles,
                     /) -> tuple[Tensor, Tensor]: ...
    def attention_backward(
        self, do: Tensor, q: Tensor, codes: KeyValueCodes, o: Tensor, lse: Tensor,
        tiles: QueryTiles, /) -> tuple[Tensor, Tensor, Tensor]: ...
    def attend_equal_lengths(self, q: Tensor, k: Tensor, v: Tensor, length: int,
                             /) -> tuple[Tensor, *tuple[Tensor, ...]]: ...
    def attend_equal_lengths_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, rest: tuple[Tensor, ...],
        length: int, /) -> tuple[Tensor, Tensor, Tensor]: ...
    def attend_prefill(self, q: Tensor, pages: KeyValueCodes, tiles: QueryTiles, split_keys: int,
                       /) -> Tensor: ...
    def attend_prefill_quantized(self, q: Tensor, pages: KeyValueCodes, tiles: QueryTiles,
                                 scales: str, split_keys: int, /) -> QTensor: ...
    def attend_decode(
        self, q: Tensor, pages: KeyValueCodes, block_tables: Tensor, lengths: Tensor, longest: int,
        split_keys: int, queries: SequenceQueries | None, /) -> Tensor: ...
    def attend_decode_quantized(
        self, q: Tensor, pages: KeyValueCodes, block_tables: Tensor, lengths: Tensor, longest: int,
        scales: str, split_keys: int, queries: SequenceQueries | None, /) -> QTensor: ...


class _OfOtherPlans(_Fused, _Attention, Protocol):
    def adamw_(self, master: Tensor, grad: Tensor, ratio: Tensor, root: Tensor, clip: Tensor,
               scalars: AdamWScalars, /) -> None: ...
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, /) -> Tensor: ...
    def block_squares(self, x: Tensor, /) -> Tensor: ...

    # kernels.routing, with the scores [T, E]
    def route(self, logits: Tensor, rule: RoutingRule, bias: Tensor | None,
              /) -> tuple[Tensor, Tensor, Tensor]: ...
    def route_backward(self, dweights: Tensor, scores: Tensor, chosen: Tensor, rule: RoutingRule,
                       dtype: torch.dtype, /) -> Tensor: ...

    # kernels.logprob; lm_head_logprobs also computes the logits, one chunk of rows at a time
    def chosen_logprobs(self, logits: Tensor, chosen: Tensor, temperature: float,
                        /) -> tuple[Tensor, Tensor]: ...
    def lm_head_logprobs(
        self, hidden: Tensor, master: Tensor, weight: Tensor, chosen: Tensor, temperature: float,
        *, recompute: bool, gradients: Gradients, kept: Callable[[Tensor, Tensor], Tensor],
        ) -> tuple[Tensor, Tensor]: ...

    # kernels.sampling
    def sample(self, logits: Tensor, bits: Tensor, temperature: Tensor,
               /) -> tuple[Tensor, Tensor, Tensor]: ...

    # kernels.allowed_tokens; writes over the logits
    def exclude_tokens(self, logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor,
                       min_p: Tensor, chosen: Tensor, /) -> Tensor: ...

    # kernels.decode and kernels.draft
    def next_inputs(self, state: DecodeState, rows: Tensor, page_size: int, /) -> DecodeInputs: ...
    def take_draws(self, state: DecodeState, rows: Tensor, tokens: Tensor, logprobs: Tensor,
                   lse: Tensor, out: Drawn, /) -> None: ...
    def propose(self, draft_text: DraftText, state: DecodeState, rows: Tensor, longest_only: bool,
                /) -> Drafts: ...
    def verify_inputs(
        self, state: DecodeState, draft_text: DraftText, drafts: Drafts, rows: Tensor,
        page_size: int, width: int, size: int, /) -> VerifyInputs: ...
    def take_verified(
        self, state: DecodeState, draft_text: DraftText, drafts: Drafts, inputs: VerifyInputs,
        rows: Tensor, tokens: Tensor, logprobs: Tensor, lse: Tensor, out: Verified, width: int,
        /) -> None: ...


class Kernels(_OfOtherPlans, Protocol):
    """All kernels of a backend; most have the names of public operations.

    A table has those for plans that are defined for every machine, or those for other plans.
    """

    # kernels.logprob, of plans that are defined for every machine
    def exact_logprobs(self, logits: Tensor, chosen: Tensor, temperature: Tensor,
                       /) -> tuple[Tensor, Tensor, Tensor]: ...
    def exact_logits_gradient(self, logits: Tensor, chosen: Tensor, temperature: Tensor,
                              softmax: Tensor, grad: Tensor, /) -> Tensor: ...


# fmt: on


@functools.cache
def _hopper() -> Kernels:
    from jetrl.kernels import hopper

    table: _OfOtherPlans = hopper
    return cast(Kernels, table)


@functools.cache
def _portable() -> Kernels:
    from jetrl.kernels.portable import table

    return cast(Kernels, table)  # without what plans of these backends refuse


@functools.cache
def _triton() -> Kernels:
    from jetrl.kernels import triton

    table: _OfOtherPlans = triton
    return cast(Kernels, table)


TABLES: dict[str, Callable[[], Kernels]] = {
    "hopper": _hopper,
    "triton": _triton,
    "portable": _portable,
}


def kernels_of(x: Tensor) -> Kernels | None:
    """Return the kernels for the device of x, or None if it runs the references."""
    backend = backend_of(x)
    return None if backend is REFERENCE else TABLES[backend.kernels]()


def device_kernels(x: Tensor) -> Kernels:
    """Return the kernels for the device of x, which must have a kernel table."""
    kernels = kernels_of(x)
    assert kernels is not None, f"no kernels for {x.device}"
    return kernels
