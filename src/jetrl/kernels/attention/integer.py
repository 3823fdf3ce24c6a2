"""Causal attention on INT8 codes of queries, keys and values, with the same bits on every machine.

One function serves decode, prefill and training, as in `reference`. Products of codes are summed as
integers, so their order does not matter. Every other operation is an IEEE float32 operation: fl(x)
is x rounded once to float32, to nearest even, and fma(a, b, c) = fl(a * b + c). Subnormal values
are kept. This module is the definition; a kernel of a GPU has the same bits.

Inputs, for query i and key j of one head of D values (D <= 512): codes q_id, k_jd, v_jd of at most
127 in size, with float32 scales sq_i, sk_j, sv_j of the quantizer (`precision.quantize`, one group
per token and head). A scale is at least 2**-107, or NaN or Inf next to codes that are all 0. The
cache stores k and v like that.

    c    = fl(log2(e) / sqrt(D))           a_i  = fl(sq_i * c)
    S_ij = sum_d q_id k_jd                  int32
    y_ij = fl(S_ij * sk_j)                  S_ij is exact in float32

Keys are in blocks of 128, counted from the first token of the sequence, and blocks in splits of
1,024 keys. For query i, the visible keys of a block are those with j <= i. Maxima and sums are over
visible keys only: a hidden key may hold anything, and enters neither d nor r.

    x_i  = fl(a_i * max_j y_ij)
    n_i  = ceil(fma(|x_i|, 2**-22, x_i))    an integer in float32, so block weights are powers of 2
    u_ij = max(fma(y_ij, a_i, -n_i), -40)
    m_ij = rint(u_ij)    f_ij = u_ij - m_ij                       both exact
    p_ij = fma(fma(fma(P3, f_ij, P2), f_ij, P1), f_ij, P0)        about 32512 * 2**f, within 7.5e-5
    e_ij = p_ij * 2**m_ij                   exact: the exponent of p_ij, plus m_ij
    c_ij = rint(e_ij)    C_i = sum_j c_ij   int32, below 2**22
    r_i  = max_j sv_j    w_i = fl(1 / r_i)
    g_ij = fl(sv_j * w_i)
    d_ij = rint(e_ij * g_ij)                the exact product, rounded once to an integer
    O_i  = sum_j d_ij v_j                   int32; two INT8 planes, d = 256 * hi + lo,
                                            hi = (d + 128) >> 8 (0 to 127), lo = -128 to 127

P0 to P3 are `_COEFFICIENTS`. A block then has the state (n, C, fl(fl(O) * r)). A split folds its
blocks in order, and attention its splits in order, in the same way, from (N, L, A) = (-Inf, 0, 0):

    N' = max(N, n)    z = 2**max(N - N', -100)    z' = 2**max(n - N', -100)
    L' = fl(fl(L * z) + fl(C * z'))               A' = fl(fl(A * z) + fl(fl(fl(O) * r) * z'))

A block without visible keys changes nothing; nor does a split. At the end

    out_i = fl(A_i * fl(1 / L_i)), rounded to bfloat16, to nearest even.

The backward needs N_i and L_i.

Why it holds for all inputs:

* u_ij <= 0, so d_ij <= 32,515 and hi fits INT8: x_i may be rounded below a_i * y_ij, by 2**-24 of
  it, and n_i is above it by 2**-22. Without that term, scores above 2**17 would overflow hi. Some
  u_ij is above -1.1 if |x_i| < 2**18, so C_i >= 15,000 in one block and 1 / L_i is finite. Larger
  scores make attention one-hot, or, if n_i is 16 or more above x_i (|x_i| > 2**26), NaN: 0 / 0.
* Scores of any sign and size: n_i is relative. Below -16, a weight is 0. -40 keeps the exponents
  valid.
* A row of zeros has codes 0 and scale 2**-100 / 127: as a query, it weighs all keys alike; as a
  value, it adds 0, and w is finite (2**107).
* Non-finite values: their scale is NaN or Inf. A block whose n_i, or whose sk_j or sv_j of any
  visible key, is not finite has the state (0, NaN, NaN), so the output is NaN, whatever e and d
  came out as. So is that of a query with a non-finite scale, since n_i is then NaN. Scores beyond
  float32 make n_i Inf. The sign of a zero, the bits of a NaN, and N_i of a NaN row are not defined.
* Sums: |S| <= 127**2 * D < 2**23, |O| <= 128 * 127 * 32515 < 2**30. fl(O) * r overflows only for
  values above 1e30, and A, of up to 2**18 keys, for those above 1e28: the output is Inf or NaN.

Backward

Gradients are those of the stored codes: they pass straight through the quantization of queries,
keys and values. They are products of INT8 codes as well, summed as integers.

A value in two planes is an integer of at most 32,514 in size, with a scale that is a power of two.
For numbers x of one group, with r the largest |x|:

    r'    = max(fl(r * (1 + 2**-7)), 2**-101)
    t     = the integer with 2**(t-1) <= r' < 2**t, so -100 to 128
    code  = rint(x * 2**(15-t))             scale s = 2**(t-15)
    code  = 256 * hi + lo,  hi = (code + 128) >> 8 (-127 to 127),  lo = -128 to 127

If r' is not finite, the codes are 0 and s is NaN. The scale is exact, so it rounds nothing. BF16
values down to 2**-8 of r keep all their bits. The factor above r keeps hi within INT8.

Per query i and head, from dO_i and out_i (bfloat16), N_i and L_i:

    do_id, sdo_i = planes of dO_i over d;   o_id, so_i = planes of out_i over d
    delta_i = fl(fl(sum_d do_id o_id) * so_i)          the sum an integer below 2**39, int64
    g_i     = fl(fl(1 / L_i) * sdo_i)

Per query i and visible key j, in blocks of 64 queries and of 128 keys, both counted from the first
token of the sequence:

    y_ij, then u, m, f, p, e_ij as in the forward, with N_i for n_i       1 product: q k
    w_ij  = fl(e_ij * g_i)                  the weight P, times the scale of dO_i
    T_ij  = sum_d do_id v_jd                int32                         2 products: hi v, lo v
    z_ij  = fma(fl(T_ij), sv_j, -delta_i)   dP - delta, without the scale of dO_i
    ds_ij = fl(w_ij * z_ij)                 dS, without 1 / sqrt(D)

    A_ij, s = planes of fl(ds_ij * sk_j) over the visible keys of a block, per query
    dQ_i' = fl(dQ_i + fl(fl(sum_j A_ij k_jd) * s))                        2 products: hi k, lo k
    B_ij, s = planes of fl(ds_ij * sq_i) over the queries of a block that see the key, per key
    dK_j' = fl(dK_j + fl(fl(sum_i B_ij q_id) * s))                        2 products: hi q, lo q
    W_ij, s = planes of w_ij over the queries of a block that see the key, per key
    M_jd  = sum_i 256 * hi(W) hi(do) + hi(W) lo(do) + lo(W) hi(do)        3 products
    dV_j' = fl(dV_j + fl(fl(M_jd) * 256 s))  without lo(W) lo(do): 2**-16 of the largest term

Every sum is an int32, at most 127 * 32514 * 512. Products by s are exact below 2**128, so an fma
has the same bits. The sums dQ, dK and dV begin at 0, for each sequence and query head, and add
blocks in order. Then the heads of a group are added in order, and, of rows that sequences share
(`models.packed`), the sequences, in the order of the batch, each sum beginning at 0. A shared query
counts in the first of its sequences only; in others it is as if hidden from all keys. At last

    dQ = fl(dQ * c')    dK = fl(dK * c')    c' = fl(1 / sqrt(D)),    all rounded to bfloat16

A query whose g or delta is not finite, as after a NaN output, has w = ds = NaN at its visible keys:
it makes dQ_i NaN, and dK and dV of all keys that it sees. A group of zeros has t = -100, codes 0.
Values of at most 2**-116 become 0: dO, or ds times a scale of q or k. The sign of a zero and the
bits of a NaN are not defined.

These are 10 INT8 products, next to 5 of BF16 at half the rate (Hopper) or a quarter of it. Relative
errors next to float64 attention of the same codes, before the last rounding to BF16 (2,048 tokens,
4 query heads of one key head, D = 64, normal q, k, v and dO; q times 4 is peaked; 2026-11-29):

                                    dQ        dK        dV       out, rounded to BF16
    integer, normal                 0.00077   0.00070   0.00017  0.00167
    P, dS and out in BF16, normal   0.00185   0.00179   0.00152  0.00203
    integer, peaked                 0.00251   0.00224   0.00020  0.00167
    P, dS and out in BF16, peaked   0.00307   0.00282   0.00155  0.00177

The outputs in BF16 are compared with float64 attention of their own inputs, without codes. With the
activations of SmolLM2-135M, dK of 4 in 30 key heads is worse than in BF16: 1.02 to 1.12 times, and
1.77 times (0.0038, not 0.0021) in one, by the 15 bits of d in the forward.

Dimensions: B sequences, Q queries, L keys, H query heads, G key-value heads, D head size; in
blocks, R rows (queries of all heads of a group) and K keys.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jetrl.kernels.attention.reference import Stored, dense_batches, quantize_keys_and_values
from jetrl.precision.exact import LOG2_E, fma
from jetrl.precision.quantize import INT8_CODES, quantize
from jetrl.settings.presets import DEFAULT_SCALES, ScaleRule

_BLOCK_KEYS = 128
_SPLIT_KEYS = 1024
# Minimax polynomial of 32512 * 2**f on [-0.5, 0.5], by relative error, P0 to P3 in float32.
_COEFFICIENTS = (32509.662109375, 22539.30078125, 7887.7734375, 1793.7412109375)
_SMALLEST_POWER = -100
_SMALLEST_SCORE = -40.0
_ABOVE_ROUNDING = 2.0**-22
_BLOCK_QUERIES = 64
_PLANE_BITS = 15
_ROOM = 1.0 + 2.0**-7  # above the largest value, so that hi fits INT8
_SMALLEST = 2.0**-101  # its exponent t is -100
_MAX_TILE = 2**18  # scores per tile of the backward
_MAX_SCORES = 2**17  # scores per block and chunk, for the cache of a CPU; no bits depend on it


@dataclass(frozen=True)
class _Attended:
    """The output of attention, with the softmax's reference and mass per query for the backward.

    Attributes:
        out: bfloat16 [B, Q, H, D].
        reference: float32 [B, Q, H], N_i: an integer, in units of log2.
        mass: float32 [B, Q, H], L_i: the sum of the weights relative to 2**N_i, times 32512.
    """

    out: Tensor
    reference: Tensor
    mass: Tensor


@dataclass(frozen=True)
class _State:
    """A block, or blocks folded so far: N and L [B, G, R, 1] and A [B, G, R, D] of the module."""

    reference: Tensor
    mass: Tensor
    total: Tensor


@dataclass(frozen=True)
class _Keys:
    """Codes of keys (float32) and values (float64) [B, G, L, D], scales float32 [B, G, 1, L]."""

    k: Tensor
    k_scales: Tensor
    v: Tensor
    v_scales: Tensor

    @staticmethod
    def of(keys: Stored, values: Stored, b: slice) -> _Keys:
        """Return the keys and values of some sequences, from codes [B, L, G, D]."""
        (k, k_scales), (v, v_scales) = _coded(keys), _coded(values)
        return _Keys(
            k=k[b].transpose(1, 2).float(),
            k_scales=k_scales[b].transpose(1, 2).unsqueeze(2),
            v=v[b].transpose(1, 2).double(),
            v_scales=v_scales[b].transpose(1, 2).unsqueeze(2),
        )


def _quantize_queries(q: Tensor, scales: ScaleRule = DEFAULT_SCALES) -> Stored:
    """Return rotated queries [..., H, D] as INT8 codes and float32 scales [..., H]."""
    codes = quantize(q, (1, q.shape[-1]), INT8_CODES, scales)
    return codes.codes, codes.scales.squeeze(-1)


def attend(
    q: Tensor, keys: Stored, values: Stored, q_positions: Tensor, scales: ScaleRule
) -> Tensor:
    """Return attention of a padded batch, bfloat16 [B, Q, H, D].

    The bits of a row do not depend on padding, other rows, or L.

    Args:
        q: bfloat16 [B, Q, H, D], rotated; it is quantized here.
        keys: int8 codes [B, L, G, D] and float32 scales [B, L, G]; values have the same form.
        q_positions: int64 [B, Q]; a query attends to keys up to its position.
        scales: "fp32", or "pow2" for power-of-two scales of queries.
    """
    return _attend_codes(_quantize_queries(q, scales), keys, values, q_positions).out


def _attend_codes(q: Stored, keys: Stored, values: Stored, q_positions: Tensor) -> _Attended:
    """Return `attend` of quantized queries: codes [B, Q, H, D] and scales [B, Q, H]."""
    codes, q_scales = _coded(q)
    out = torch.empty(codes.shape, dtype=torch.bfloat16, device=codes.device)
    reference, mass = torch.empty_like(q_scales), torch.empty_like(q_scales)
    sequences, num_queries, heads, head_dim = codes.shape
    # Scores of a chunk of sequences and queries fit `_MAX_SCORES` per block.
    block = min(_BLOCK_KEYS, keys[0].shape[1])
    rows = max(1, _MAX_SCORES // (block * heads))
    step = max(1, rows // num_queries)
    for first in range(0, sequences, step):
        b = slice(first, first + step)
        stored = _Keys.of(keys, values, b)
        groups = stored.k.shape[1]
        for query in range(0, num_queries, rows):
            part = slice(query, query + rows)
            positions = q_positions[b, part]
            state = _attend_rows(
                rows=_by_group(codes[b, part], groups).float(),
                a=_score_factors(_by_group(q_scales[b, part, :, None], groups), head_dim),
                positions=positions.repeat(1, heads // groups)[:, None, :, None],
                keys=stored,
            )
            heads_out = state.total * _inverse(state.mass)
            size = positions.shape[1]
            out[b, part] = _by_query(heads_out, size).to(torch.bfloat16)
            reference[b, part] = _by_query(state.reference, size).squeeze(-1)
            mass[b, part] = _by_query(state.mass, size).squeeze(-1)
    return _Attended(out, reference, mass)


def _attend_rows(rows: Tensor, a: Tensor, positions: Tensor, keys: _Keys) -> _State:
    """Return the state of all keys, for rows [B, G, R, D] with positions [B, 1, R, 1]."""
    empty = _State(
        reference=torch.full_like(a, -torch.inf),
        mass=torch.zeros_like(a),
        total=torch.zeros_like(rows),
    )
    whole = empty
    length = min(keys.k.shape[2], int(positions.max()) + 1)
    for first in range(0, length, _SPLIT_KEYS):
        split = empty
        for start in range(first, min(first + _SPLIT_KEYS, length), _BLOCK_KEYS):
            block = _attend_block(rows, a, positions, keys, start)
            split = _fold(split, block, positions >= start)
        whole = _fold(whole, split, positions >= first)
    return whole


def _attend_block(rows: Tensor, a: Tensor, positions: Tensor, keys: _Keys, start: int) -> _State:
    """Return the state of one block of keys, NaN for rows that see none."""
    block = slice(start, start + _BLOCK_KEYS)
    k_scales, v_scales = keys.k_scales[..., block], keys.v_scales[..., block]
    y = _scores(rows, keys.k[:, :, block], k_scales)
    number = torch.arange(start, start + y.shape[-1], device=y.device)
    hidden = number > positions if start + y.shape[-1] > int(positions.min()) + 1 else None
    if hidden is not None:
        y.masked_fill_(hidden, -torch.inf)
    x = y.amax(-1, keepdim=True) * a
    n = (x + x.abs() * _ABOVE_ROUNDING).ceil()  # this product is exact: fma's one rounding
    e = _exponentials(y, a, n)
    # The largest scale of visible values. If a scale of keys is not finite, n is NaN already.
    so_far = v_scales.cummax(-1).values
    last = (positions - start).clamp(0, y.shape[-1] - 1)
    r = so_far.expand(-1, -1, rows.shape[2], -1).gather(-1, last.expand(-1, rows.shape[1], -1, -1))
    factors = v_scales * _inverse(r)
    if hidden is not None:
        factors.masked_fill_(hidden, 0.0)
    codes = (e.double() * factors.double()).round_()
    values = (codes @ keys.v[:, :, block]).float() * r
    bad = (n - n) + (r - r)  # 0, or NaN unless both are finite
    return _State(
        reference=torch.where(bad.isnan(), 0.0, n),
        mass=e.round_().sum(-1, keepdim=True) + bad,
        total=values + bad,
    )


def _fold(state: _State, part: _State, changes: Tensor) -> _State:
    """Return the fold of two states; rows with `changes` False keep the first."""
    reference = torch.maximum(state.reference, part.reference)
    before = _power_of_two((state.reference - reference).clamp(min=_SMALLEST_POWER))
    after = _power_of_two((part.reference - reference).clamp(min=_SMALLEST_POWER))
    mass = (state.mass * before) + (part.mass * after)
    total = (state.total * before) + (part.total * after)
    return _State(
        reference=torch.where(changes, reference, state.reference),
        mass=torch.where(changes, mass, state.mass),
        total=torch.where(changes, total, state.total),
    )


def _coded(stored: Stored) -> tuple[Tensor, Tensor]:
    """Return codes and scales of stored values that have scales."""
    codes, scales = stored
    assert scales is not None, f"integer attention needs scales of its {codes.dtype}"
    return codes, scales


def _by_group(x: Tensor, groups: int) -> Tensor:
    """Return [B, Q, H, D] as [B, G, R, D], R = heads of a group times queries."""
    return x.unflatten(2, (groups, x.shape[2] // groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _by_query(x: Tensor, num_queries: int) -> Tensor:
    """Return [B, G, R, D] as [B, Q, H, D], the inverse of `by_group`."""
    return x.unflatten(2, (-1, num_queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _score_factors(q_scales: Tensor, head_dim: int) -> Tensor:
    """Return a_i, the factors from y_ij to scores in units of log2."""
    return q_scales * q_scales.new_tensor(LOG2_E / math.sqrt(head_dim))


def _scores(rows: Tensor, k: Tensor, k_scales: Tensor) -> Tensor:
    """Return y_ij, float32 [..., R, K], from codes in float32 and scales [..., 1, K]."""
    # All partial sums are integers below 2**24: float32 adds them without rounding, in any order.
    return (rows @ k.mT).mul_(k_scales)


def _exponentials(y: Tensor, a: Tensor, reference: Tensor) -> Tensor:
    """Return e_ij, float32: 32512 * 2**(y * a - reference), within 7.5e-5."""
    u = fma(y, a, -reference).clamp_(min=_SMALLEST_SCORE)
    m = u.round()
    f = u.sub_(m)
    constants = [f.new_tensor(c) for c in _COEFFICIENTS]
    p = fma(constants[3], f, constants[2])
    p = fma(p, f, constants[1])
    p = fma(p, f, constants[0])
    p.view(torch.int32).add_(m.to(torch.int32).bitwise_left_shift_(23))
    return p


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2**exponent, float32, of integers from -126 to 127 in any dtype."""
    return exponent.to(torch.int32).add_(127).bitwise_left_shift_(23).view(torch.float32)


def _inverse(x: Tensor) -> Tensor:
    """Return fl(1 / x); torch divides a Python number by a tensor in other ways on some devices."""
    return torch.ones_like(x) / x


class _Gradients(NamedTuple):
    """Sums of one batch of sequences, float32, dQ and dK without 1 / sqrt(D).

    Attributes:
        dq: [B, L, H, D].
        dk, dv: [B, L, G, D].
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True)
class _Queries:
    """Queries of a batch by query head, [B, G, heads of the group, L, D] or 1 instead of D.

    Attributes:
        codes: float32; `scales` are sq_i, `factors` a_i.
        reference, delta, weights: N_i, delta_i and g_i.
        do: The codes of dO, float64.
        counted: bool, False for padding and for queries that count in another sequence.
    """

    codes: Tensor
    scales: Tensor
    factors: Tensor
    reference: Tensor
    delta: Tensor
    weights: Tensor
    do: Tensor
    counted: Tensor

    def part(self, rows: slice) -> _Queries:
        """Return some of the L queries."""
        return _Queries(**{name: x[..., rows, :] for name, x in vars(self).items()})


@dataclass(frozen=True)
class _Block:
    """Codes of keys and values [B, G, 1, K, D], and scales [B, G, 1, 1, K], of one block."""

    start: int
    k: Tensor
    k_scales: Tensor
    v: Tensor
    v_scales: Tensor


def attend_packed_integer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scales: ScaleRule = DEFAULT_SCALES,
    row_of: Tensor | None = None,
) -> Tensor:
    """Return causal attention of packed sequences on INT8 codes, differentiable, for training.

    Args:
        q: bfloat16 [T, H, D], rotated, like k [T, G, D]; v is [T, G, D].
        cu_seqlens: int64 [S + 1], first row of each sequence, then the total number of rows.
        row_of: int64, row in q of each row that cu_seqlens counts, if sequences share their first
            rows (`models.packed`); None: the row itself.
    """
    return _PackedIntegerAttention.apply(q, k, v, cu_seqlens, scales, row_of)


class _PackedIntegerAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        scales: ScaleRule,
        row_of: Tensor | None,
    ) -> Tensor:
        queries = _quantize_queries(q, scales)
        keys, values = quantize_keys_and_values(k, v, INT8_CODES, scales)
        out = torch.empty_like(q)
        reference, mass = (torch.empty(q.shape[:2], device=q.device) for _ in range(2))
        # Each sequence writes the rows that it shares, with the same bits.
        for rows, positions, valid in dense_batches(cu_seqlens):
            tokens = rows if row_of is None else row_of[rows]
            dense = _attend_codes(
                _rows(queries, tokens), _rows(keys, tokens), _rows(values, tokens), positions
            )
            out[tokens[valid]] = dense.out[valid]
            reference[tokens[valid]] = dense.reference[valid]
            mass[tokens[valid]] = dense.mass[valid]
        ctx.save_for_backward(*queries, *keys, *values, out, reference, mass, cu_seqlens, row_of)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: with activation checkpointing, each access computes them
        stored, (out, reference, mass, cu_seqlens, row_of) = saved[:6], saved[6:]
        queries, keys, values = stored[:2], stored[2:4], stored[4:]
        first = _counts_here(cu_seqlens, row_of, len(out))
        # Sums of each sequence, on rows of its own.
        length, groups = int(cu_seqlens[-1]), keys[0].shape[1:]
        sums = _Gradients(
            dq=torch.zeros(out.shape, device=out.device),
            dk=torch.zeros((length, *groups), device=out.device),
            dv=torch.zeros((length, *groups), device=out.device),
        )
        for rows, _, valid in dense_batches(cu_seqlens):
            tokens = rows if row_of is None else row_of[rows]
            counted = valid & first[rows]
            dense = _attend_backward(
                queries=_rows(queries, tokens),
                keys=_rows(keys, tokens),
                values=_rows(values, tokens),
                attended=_Attended(out[tokens], reference[tokens], mass[tokens]),
                do=grads[0][tokens],
                counted=counted,
            )
            sums.dq[tokens[counted]] = dense.dq[counted]
            sums.dk[rows[valid]] = dense.dk[valid]
            sums.dv[rows[valid]] = dense.dv[valid]
        factor = sums.dq.new_tensor(1.0 / math.sqrt(out.shape[-1]))
        dk, dv = (_over_sequences(x, cu_seqlens, row_of, len(out)) for x in (sums.dk, sums.dv))
        dq, dk, dv = (x.to(out.dtype) for x in (sums.dq * factor, dk * factor, dv))
        return dq, dk, dv, None, None, None


def _rows(stored: Stored, tokens: Tensor) -> Stored:
    """Return the codes and scales of tokens [B, L]."""
    codes, scales = _coded(stored)
    return codes[tokens], scales[tokens]


def _counts_here(cu_seqlens: Tensor, row_of: Tensor | None, size: int) -> Tensor:
    """Return whether no earlier sequence has the row in q of a row, bool [cu_seqlens[-1]]."""
    counts = torch.ones(int(cu_seqlens[-1]), dtype=torch.bool, device=cu_seqlens.device)
    if row_of is None:
        return counts
    seen = counts.new_zeros(size)
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        counts[start:end] = ~seen[row_of[start:end]]
        seen[row_of[start:end]] = True
    return counts


def _over_sequences(x: Tensor, cu_seqlens: Tensor, row_of: Tensor | None, size: int) -> Tensor:
    """Return the sums over sequences that share rows, in order, [size, G, D]."""
    if row_of is None:
        return x
    total = x.new_zeros((size, *x.shape[1:]))
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        total[row_of[start:end]] += x[start:end]  # a sequence has each row once
    return total


def _attend_backward(
    queries: Stored, keys: Stored, values: Stored, attended: _Attended, do: Tensor, counted: Tensor
) -> _Gradients:
    """Return the gradients of a padded batch of sequences, each from its first token on.

    Args:
        queries: int8 codes [B, L, H, D] and float32 scales [B, L, H]; keys and values have the
            same form, with G heads.
        do: bfloat16 [B, L, H, D], the gradient of `attended.out`.
        counted: bool [B, L], False for padding, and for queries that count in another sequence.
    """
    (codes, q_scales), (k, k_scales), (v, v_scales) = map(_coded, (queries, keys, values))
    batch, length, heads, head_dim = codes.shape
    groups = k.shape[2]
    rows = _queries_of(codes, q_scales, attended, do, counted, groups)
    padded = rows.codes.shape[-2]
    shape = (batch, groups, heads // groups, padded, head_dim)
    dq = torch.zeros(shape, device=do.device)
    dk, dv = (torch.zeros((batch, groups, length, head_dim), device=do.device) for _ in range(2))
    step = (
        _MAX_TILE // (batch * heads * min(_BLOCK_KEYS, length)) // _BLOCK_QUERIES * _BLOCK_QUERIES
    )
    step = max(_BLOCK_QUERIES, step)
    for start in range(0, length, _BLOCK_KEYS):
        part = slice(start, min(start + _BLOCK_KEYS, length))
        block = _Block(
            start=start,
            k=k[:, part].transpose(1, 2).unsqueeze(2).float(),
            k_scales=k_scales[:, part].transpose(1, 2)[:, :, None, None],
            v=v[:, part].transpose(1, 2).unsqueeze(2).double(),
            v_scales=v_scales[:, part].transpose(1, 2)[:, :, None, None],
        )
        per_head = [dq.new_zeros((*shape[:3], part.stop - start, head_dim)) for _ in range(2)]
        for first in range(start, padded, step):
            at = slice(first, first + step)
            _add_tile(rows.part(at), block, first, dq[..., at, :], per_head[0], per_head[1])
        for head in range(shape[2]):
            dk[:, :, part] += per_head[0][:, :, head]
            dv[:, :, part] += per_head[1][:, :, head]
    dq = _by_query(dq[..., :length, :].flatten(2, 3), length)
    return _Gradients(dq, dk.transpose(1, 2), dv.transpose(1, 2))


def _queries_of(
    codes: Tensor, scales: Tensor, attended: _Attended, do: Tensor, counted: Tensor, groups: int
) -> _Queries:
    """Return the queries by head, padded to whole blocks, with what is made once for each."""
    do_codes, do_scales = _planes(do.float(), -1)
    out_codes, out_scales = _planes(attended.out.float(), -1)
    products = (do_codes.double() * out_codes.double()).sum(-1, keepdim=True)  # exact integers
    delta = products.float() * out_scales
    weights = _inverse(attended.mass)[..., None] * do_scales
    bad = (weights - weights) + (delta - delta)  # 0, or NaN unless both are finite
    heads, length = codes.shape[2], codes.shape[1]
    padding = (0, 0, 0, -length % min(_BLOCK_QUERIES, length))

    def by_head(x: Tensor) -> Tensor:
        turned = _by_group(x, groups).unflatten(2, (heads // groups, length))
        return torch.nn.functional.pad(turned, padding)

    return _Queries(
        codes=by_head(codes.float()),
        scales=by_head(scales[..., None]),
        factors=by_head(_score_factors(scales[..., None], codes.shape[-1])),
        reference=by_head(attended.reference[..., None]),
        delta=by_head(delta),
        weights=by_head(weights + bad),
        do=by_head(do_codes.double()),
        counted=by_head(counted[..., None, None].expand(-1, -1, heads, -1)),
    )


def _add_tile(
    rows: _Queries, block: _Block, first: int, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Add the products of queries from `first` on with a block of keys to dQ, dK and dV."""
    y = _scores(rows.codes, block.k, block.k_scales)
    e = _exponentials(y, rows.factors, rows.reference)
    w = e * rows.weights
    dp = fma((rows.do @ block.v.mT).float(), block.v_scales, -rows.delta)
    ds = w * dp
    query = torch.arange(first, first + y.shape[-2], device=y.device)
    key = torch.arange(block.start, block.start + y.shape[-1], device=y.device)
    hidden = ~rows.counted | (key > query[:, None])
    # dQ: planes over the keys of the block.
    codes, scale = _planes((ds * block.k_scales).masked_fill_(hidden, 0.0), -1)
    dq.copy_(_plus((codes.double() @ block.k.double()), scale, dq))
    # dK and dV: planes over each block of queries; blocks add in order.
    blocks = (-1, min(_BLOCK_QUERIES, len(query)))
    q, do = (x.double().unflatten(-2, blocks) for x in (rows.codes, rows.do))
    codes, scale = _planes((ds * rows.scales).masked_fill_(hidden, 0.0).unflatten(-2, blocks), -2)
    products = codes.double().mT @ q
    for i in range(q.shape[-3]):
        dk.copy_(_plus(products[..., i, :, :], scale[..., i, :, :].mT, dk))
    codes, scale = _planes(w.masked_fill_(hidden, 0.0).unflatten(-2, blocks), -2)
    high, high_do = ((x.double() + 128).div_(256).floor_() for x in (codes, do))
    low = codes.double() - 256 * high
    products = high.mT @ do + low.mT @ high_do
    for i in range(do.shape[-3]):
        dv.copy_(_plus(products[..., i, :, :], 256 * scale[..., i, :, :].mT, dv))


def _plus(products: Tensor, scale: Tensor, total: Tensor) -> Tensor:
    """Return total plus integer products times a power of two."""
    return products.float().mul_(scale).add_(total)


def _planes(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return float32 x as integers of at most 32,514 in size, and power-of-two scales along dim."""
    largest = (x.abs().amax(dim, keepdim=True) * _ROOM).clamp_(min=_SMALLEST)
    exponent = torch.frexp(largest).exponent
    exponent = torch.where(largest.isfinite(), exponent, 0)
    codes = (x * _power_of_two(_PLANE_BITS - exponent)).round_()
    # 0 * NaN is NaN: a code of NaN would reach sums with a weight of 0.
    codes.masked_fill_(~largest.isfinite(), 0.0)
    return codes, _power_of_two(exponent - _PLANE_BITS) + (largest - largest)
