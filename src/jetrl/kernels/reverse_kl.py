"""Reverse KL between two rows of logits, over the whole vocabulary.

    log p = log_softmax(z / T),  log q = log_softmax(y / T)      student's and teacher's logits
    KL    = sum over V of p * (log p - log q)                    nats
    dKL / dz = p * ((log p - log q) - KL) / T                    the teacher has no gradient

Float32. On a CPU exp, log and the sums over V are those of `precision.exact`, so a row's bits
depend on that row only; on a GPU they are torch's, and dKL / dz is kept in BF16. A teacher may have
more logits than the student, for tokens that nobody draws: log q counts them, the KL does not.

It takes seven float32 values per logit at once (`COPIES`), so callers pass it chunks of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl.kernels.logprob import log_softmax_parts
from jetrl.precision import exact
from jetrl.precision.backend import has_defined_bits

MOST_LOGITS = 2**26
"""Maximum logits of a chunk."""
COPIES = 7
"""Float32 values per logit of a chunk: both logits and log-probs, the gap, p, the gradient."""


def reverse_kl(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return KL(student || teacher) of each row, float32 [R], differentiable in the student.

    Args:
        student: Logits, float32 [R, V].
        teacher: Logits, float32 [R, W], with W of at least V.
    """
    assert len(student) == len(teacher), (student.shape, teacher.shape)
    assert student.shape[1] <= teacher.shape[1], (student.shape, teacher.shape)
    return _ReverseKL.apply(student, teacher, temperature)


def reverse_kl_ref(student: Tensor, teacher: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the KL of each row, float32 [R], and its gradient by the student's logits [R, V]."""
    logp = _log_softmax(student, temperature)
    gap = logp - _log_softmax(teacher, temperature)[:, : student.shape[1]]
    p = _exp(logp)
    kl = _row_sum(p * gap)
    if has_defined_bits(student):
        return kl, p * (gap - kl[:, None]) / temperature
    # Few passes over V, which take the time. The head's products read BF16.
    gradient = gap.sub_(kl[:, None]).mul_(p)
    return kl, (gradient if temperature == 1.0 else gradient.div_(temperature)).bfloat16()


class _ReverseKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        kl, gradient = reverse_kl_ref(student, teacher, temperature)
        ctx.save_for_backward(gradient)
        return kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0][:, None], None, None


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    if not has_defined_bits(logits):
        return torch.log_softmax(logits if temperature == 1.0 else logits / temperature, -1)
    per_row = logits.new_full((len(logits), 1), temperature)
    shifted, _, lse = log_softmax_parts(logits, per_row)
    return shifted - lse


def _exp(logp: Tensor) -> Tensor:
    return exact.exp(logp) if has_defined_bits(logp) else logp.exp()


def _row_sum(x: Tensor) -> Tensor:
    return exact.exact_sum(x).float() if has_defined_bits(x) else x.sum(-1)
