"""Prompts that are computed once, on a Hopper GPU: the bits of whole sequences."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_models import config, make_policy

import jetrl.kernels.attention.backward as module
from jetrl.kernels.attention.forward import attend_tiles, stage_keys
from jetrl.kernels.attention.layout import KeyValueCodes, QueryTiles
from jetrl.kernels.attention.reference import quantize_keys_and_values
from jetrl.models.packed import ForwardInputs, Stems

pytestmark = pytest.mark.gpu

# Lengths of sequences, their stems' numbers, and the stems' lengths.
LENGTHS = [300, 129, 700, 64, 1500, 140, 257]
IDS = [0, 0, 2, 3, 2, 0, 2]
STEM_LENGTHS = [128, 128, 256, 0, 256, 128, 256]


@dataclass(frozen=True)
class Whole:
    """Tokens of whole sequences, equal where they share a stem, and the stems."""

    starts: list[int]
    stems: Stems

    def shared(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows whose stems are those of the first sequence of each stem."""
        rows = self.stems.rows.to(x.device)
        return x[rows][self.stems.row_of.to(x.device)].contiguous()

    def computed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of whole sequences that are computed."""
        return x[self.stems.rows.to(x.device)].contiguous()


def whole() -> Whole:
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]
    batch: Any = SimpleNamespace(
        stem_ids=np.array(IDS), stem_lengths=np.array(STEM_LENGTHS), cu_seqlens=np.array(starts),
        num_tokens=starts[-1], num_computed_tokens=0,
    )  # fmt: skip
    stems = Stems.of(batch)
    assert stems is not None
    return Whole(starts, stems)


@pytest.mark.hopper
@pytest.mark.parametrize("kv", ["fp8", "bf16", "int8", "int8+fp8"])
@pytest.mark.parametrize("heads, groups, head_dim", [(8, 2, 128), (4, 4, 64)])
@pytest.mark.parametrize("kept", [2**31, 0], ids=["dS kept", "dS made anew"])
def test_attention_has_the_bits_of_whole_sequences(
    heads: int, groups: int, head_dim: int, kv: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = whole()
    g = torch.Generator("cuda").manual_seed(0)

    def normal(count: int) -> torch.Tensor:
        shape = (w.starts[-1], count, head_dim)
        return w.shared(torch.randn(shape, device="cuda", generator=g).bfloat16())

    q, k, v, do = normal(heads), normal(groups), normal(groups), normal(heads)
    # The gradient of a stem's output counts once: in whole sequences it is that of the first.
    rows = w.stems.rows.cuda()
    once = torch.zeros(len(q), 1, 1, device="cuda", dtype=torch.bfloat16)
    once[rows] = 1
    monkeypatch.setattr(module, "STORED_DS_BYTES", kept)

    def run(q, k, v, do, tiles):
        (k_codes, k_scales), (v_codes, v_scales) = quantize_keys_and_values(k, v, kv)
        codes = KeyValueCodes(k_codes, k_scales, v_codes, v_scales)
        o, lse = attend_tiles(q, stage_keys(codes, tiles), tiles)
        return o, *module.attention_backward(do, q, codes, o, lse, tiles)

    expected = run(q, k, v, do * once, QueryTiles.packed(w.starts, "cuda"))
    tiles = QueryTiles.packed(w.stems.run_starts, "cuda", w.stems.stem_of)
    assert tiles.num_parts == 4  # of the two blocks of keys of the stem with the longest sequence
    shared = run(*(w.computed(x) for x in (q, k, v, do)), tiles)
    row_of = w.stems.row_of.cuda()
    of_stems = torch.zeros(len(rows), dtype=torch.bool, device="cuda")
    for start, end, i in zip(w.stems.run_starts, w.stems.run_starts[1:], range(99), strict=False):
        of_stems[start:end] = i in w.stems.stem_of
    o, dq, dk, dv = shared
    assert torch.equal(o, w.computed(expected[0]))
    assert torch.equal(dq, w.computed(expected[1]))
    for ours, of_whole in ((dk, expected[2]), (dv, expected[3])):
        assert torch.equal(ours[~of_stems], w.computed(of_whole)[~of_stems])
        total = torch.zeros(len(rows), *ours.shape[1:], device="cuda", dtype=torch.float64)
        total.index_add_(0, row_of, of_whole.double())
        error = (ours.double() - total)[of_stems].norm()
        assert error <= 2.0**-7 * total[of_stems].norm()
    again = run(*(w.computed(x) for x in (q, k, v, do)), tiles)
    assert all(torch.equal(x, y) for x, y in zip(shared, again, strict=True))


@pytest.mark.parametrize("preset", ["unified", "jet", "mixed"])
def test_log_probs_have_the_bits_of_whole_sequences(preset: str) -> None:
    """Gradients differ by roundings: of a product to BF16 (2**-9), of operands to E4M3 (2**-4)."""
    w = whole()
    policy = make_policy(config(max_position_embeddings=2048), preset)
    g = torch.Generator().manual_seed(0)
    tokens = w.shared(torch.randint(0, policy.config.vocab_size, (w.starts[-1],), generator=g))
    sequences = zip(w.starts, LENGTHS, STEM_LENGTHS, strict=False)
    targets = torch.cat([torch.arange(s + max(stem, 1), s + n) for s, n, stem in sequences])
    weights = torch.linspace(-1, 1, len(targets), device="cuda")

    def run(stems: Stems | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        ends = torch.tensor(w.starts)
        inputs = ForwardInputs.packed(tokens, ends)
        logprobs, _ = policy.train_logprobs(inputs, ends, targets, stems=stems)
        (logprobs * weights).sum().backward()
        masters = policy.master_weights()
        gradients = {n: p.grad.clone() for n, p in masters.items() if p.grad is not None}
        for p in masters.values():
            p.grad = None
        return logprobs.detach(), gradients

    expected, of_whole = run(None)
    logprobs, gradients = run(w.stems)
    if preset != "mixed":  # which takes the library's GEMMs, of any order of sums
        assert torch.equal(logprobs, expected)
    assert gradients.keys() == of_whole.keys()
    for name, gradient in gradients.items():
        difference = (gradient - of_whole[name]).norm()
        assert difference <= 2.0**-3 * of_whole[name].norm(), name
