"""Sampling on Hopper: the integer draw of `kernels.sampling`, one program a row.

A row is read three times (after the first from the cache): its statistics, just as the trainer
takes them (`row_statistics`: equal bits of log-probs); the int64 weights, summed for each block;
and the one block in which the cumulative sum passes the target. Integer sums are the same in any
order, so for the same weights this picks the reference's token. The weights themselves come from
the hardware's exp2, so they may differ from the CPU's in the last bits.

top_k and top_p need the row sorted: their weights are written out, and the rest is the reference's
own integer code on the GPU.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.logprob_triton import BLOCK, LOG2_E, NUM_WARPS, row_statistics, scaled_logits
from jetrl.kernels.sampling import _keep_most_probable
from jetrl.precision.quantize_hopper import check_matrix

_WEIGHT_ONE = 2.0**40


@triton.jit
def _weights(
    row_ptr, columns, num_columns, temperature, row_max, LOG2_E: tl.constexpr, ONE: tl.constexpr
):
    """int64 round(exp(z - max) * 2**40), half to even; 0 outside."""
    z = scaled_logits(row_ptr, columns, num_columns, temperature)
    scaled = tl.math.exp2((z - row_max) * LOG2_E) * ONE
    magic = tl.full(scaled.shape, 12582912.0, tl.float32)  # 1.5 * 2**23: rounds below 2**22
    return tl.where(scaled < 4194304.0, (scaled + magic) - magic, scaled).to(tl.int64)


@triton.jit
def _sample_kernel(
    logits_ptr,
    bits_ptr,
    temperature_ptr,
    tokens_ptr,
    logprobs_ptr,
    max_ptr,
    lse_ptr,
    sums_ptr,
    weights_ptr,
    num_columns,
    num_blocks,
    WRITE_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOG2_E: tl.constexpr,
    ONE: tl.constexpr,
):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * num_columns
    given = tl.load(temperature_ptr + row)
    greedy = given == 0.0
    temperature = tl.where(greedy, 1.0, given)
    row_max, lse, _ = row_statistics(row_ptr, num_columns, temperature, BLOCK, LOG2_E)
    tl.store(max_ptr + row, row_max)
    tl.store(lse_ptr + row, lse)

    total = tl.zeros([], tl.int64)
    best = num_columns
    for block in range(0, num_blocks):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        weights = _weights(row_ptr, columns, num_columns, temperature, row_max, LOG2_E, ONE)
        if WRITE_WEIGHTS:
            places = weights_ptr + row.to(tl.int64) * num_columns + columns
            tl.store(places, weights, mask=columns < num_columns)
        if greedy:
            z = scaled_logits(row_ptr, columns, num_columns, temperature)
            best = tl.minimum(best, tl.min(tl.where(z == row_max, columns, num_columns), 0))
        part = tl.sum(weights, 0)
        tl.store(sums_ptr + row * num_blocks + block, part)
        total += part

    token = best
    if not greedy:
        tl.debug_barrier()
        wanted = tl.load(bits_ptr + row).to(tl.float64) * (2.0**-53) * total.to(tl.float64)
        target = tl.minimum(wanted.to(tl.int64), total - 1)
        before = tl.zeros([], tl.int64)
        place = 0
        for block in range(0, num_blocks):
            part = tl.load(sums_ptr + row * num_blocks + block)
            skip = (before + part <= target) & (block == place)
            before += tl.where(skip, part, 0)
            place += tl.where(skip, 1, 0)
        columns = place * BLOCK + tl.arange(0, BLOCK)
        weights = _weights(row_ptr, columns, num_columns, temperature, row_max, LOG2_E, ONE)
        passed = (before + tl.cumsum(weights, 0) <= target) & (columns < num_columns)
        token = place * BLOCK + tl.sum(passed.to(tl.int32), 0)
    token = tl.minimum(token, num_columns - 1)
    z = tl.math.div_rn(tl.load(row_ptr + token), temperature)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(logprobs_ptr + row, (z - row_max) - lse)


def sample_unchecked(
    logits: Tensor,
    bits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    filtered: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.sampling.sample_unchecked` on Hopper: the same arguments and results."""
    check_matrix("sample", logits, (torch.float32,))
    rows, vocabulary = logits.shape
    for name, x, dtype in (
        ("bits", bits, torch.int64),
        ("temperature", temperature, torch.float32),
        ("top_p", top_p, torch.float32),
        ("top_k", top_k, torch.int64),
    ):
        if x.shape != (rows,) or x.dtype != dtype or not x.is_contiguous():
            raise ValueError(f"{name}: {dtype} [{rows}], not {x.dtype} {list(x.shape)}")
    if filtered is None:
        filtered = bool((top_p < 1).any()) or bool((top_k > 0).any())
    device, blocks = logits.device, triton.cdiv(vocabulary, BLOCK)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs, row_max, lse = torch.empty(3, rows, dtype=torch.float32, device=device)
    sums = torch.empty(rows, blocks, dtype=torch.int64, device=device)
    weights = torch.empty(logits.shape if filtered else (1,), dtype=torch.int64, device=device)
    if rows:
        _sample_kernel[(rows,)](
            logits,
            bits,
            temperature,
            tokens,
            logprobs,
            row_max,
            lse,
            sums,
            weights,
            vocabulary,
            blocks,
            filtered,
            BLOCK,
            LOG2_E,
            _WEIGHT_ONE,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    if filtered:
        drawn = _draw_filtered(weights, bits, top_p, top_k)
        tokens = torch.where(temperature == 0, tokens, drawn)
        scale = torch.where(temperature == 0, 1.0, temperature)
        z = logits.gather(1, tokens[:, None]).squeeze(1) / scale
        logprobs = (z - row_max) - lse
    return tokens, logprobs, lse


def _draw_filtered(weights: Tensor, bits: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """The reference's draw from int64 weights [R, V]: token ids int64 [R]."""
    cumulative = _keep_most_probable(weights, top_p, top_k).cumsum(-1)
    total = cumulative[:, -1:]
    target = ((bits[:, None].double() * 2.0**-53) * total.double()).long()
    return (cumulative <= torch.minimum(target, total - 1)).sum(-1)
