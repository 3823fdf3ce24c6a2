"""Compare portable/logprob.py and portable/sampling.py with their references in bits.

TRITON_INTERPRET=1 python tests/kernels/interpreted_probs.py

It prints the cases that differ, each with the number of different values.
"""

from __future__ import annotations

import json
import math
from unittest import mock

import numpy as np
import torch
from tests.kernels.bits import different
from torch import Tensor

from jetrl.kernels import exponential_triton, sampling_triton
from jetrl.kernels.allowed_tokens import RowFilters, allowed_tokens, exclude_tokens_ref
from jetrl.kernels.logprob import chosen_logprobs_ref, logits_gradient_ref
from jetrl.kernels.portable import logprob, sampling
from jetrl.kernels.sampling import sample_ref


def logits_of(rows: int, vocabulary: int, std: float, device: str) -> Tensor:
    """Random logits on a grid of 2**-6, so that some are equal; two in ten are far below."""
    g = torch.Generator().manual_seed(rows + vocabulary)
    logits = torch.randn(rows, vocabulary, generator=g) * std
    logits = torch.where(torch.rand(rows, vocabulary, generator=g) < 0.3, logits.round(), logits)
    far = torch.rand(rows, vocabulary, generator=g) < 0.2
    return torch.where(far, logits * 30 - 100, logits).to(device)


def special_rows(vocabulary: int, device: str) -> Tensor:
    """Rows of equal logits, with -inf, and those that have no softmax."""
    rows = logits_of(10, vocabulary, 3.0, "cpu")
    middle = vocabulary // 2
    rows[0] = 0.0
    rows[1] = -7.5
    rows[2, 1:] = -math.inf
    rows[2, 0] = 1.0
    rows[3] = -math.inf
    rows[4, middle] = math.nan
    rows[5, middle] = math.inf
    rows[6] = math.nan
    rows[7] = 3e38
    rows[7, middle:] = -3e38
    rows[8] = 1e-40
    rows[9, middle] = 90.0
    return rows.to(device)


def logprob_differences(logits: Tensor) -> dict[str, int]:
    """Return how many values differ from the references, by case and result."""
    rows, vocabulary = logits.shape
    g = torch.Generator().manual_seed(1)
    chosen = torch.randint(0, vocabulary, (rows,), generator=g).to(logits.device)
    grad = torch.randn(rows, generator=g).to(logits.device)
    grad[0] = 0.0
    found = {}
    for number in (1.0, 0.7, 30.0, 0.0):
        temperature = torch.full((rows, 1), number, device=logits.device)
        if number == 0.0:
            temperature = torch.rand(rows, 1, generator=g).to(logits.device) + 0.1
            temperature[::2] = 1.0
        name = f"{rows} x {vocabulary}, temperature {number or 'mixed'}: "
        ours = logprob.exact_logprobs(logits, chosen, temperature)
        theirs = chosen_logprobs_ref(logits, chosen, temperature)
        found[name + "logprobs"] = different(ours[0], theirs[0])
        found[name + "entropy"] = different(ours[1][0], theirs[1][0])
        found[name + "variance"] = different(ours[1][1], theirs[1][1])
        expected = logits_gradient_ref(logits, chosen, temperature, grad)
        given = (logits, chosen, temperature, ours[2], grad)
        found[name + "gradient"] = different(logprob.exact_logits_gradient(*given), expected)
        if number:
            leaf = logits.clone().requires_grad_()
            autograd = logprob.chosen_logprobs(leaf, chosen, number)
            autograd[0].backward(grad)
            found[name + "autograd logprobs"] = different(autograd[0].detach(), theirs[0])
            assert leaf.grad is not None
            found[name + "autograd gradient"] = different(leaf.grad, expected)
    return {name: count for name, count in found.items() if count}


def filters(rows: int, vocabulary: int) -> dict[str, RowFilters]:
    """Filters of the rows, by name."""
    off, every, none = torch.ones(rows), torch.zeros(rows, dtype=torch.int64), torch.zeros(rows)
    g = torch.Generator().manual_seed(2)
    mixed_p = torch.rand(rows, generator=g)
    mixed_p[::3] = 1.0
    mixed_k = torch.randint(0, min(vocabulary, 60) + 2, (rows,), generator=g)
    floor = torch.rand(rows, generator=g) ** 4
    return {
        "off": RowFilters(off, every, none),
        "top_p": RowFilters(mixed_p, every, none),
        "top_k": RowFilters(off, mixed_k, none),
        "all": RowFilters(mixed_p.flip(0), mixed_k, floor),
        "one": RowFilters(off * 0, every, none),
        "near one": RowFilters(off * (1 - 2.0**-24), every + vocabulary, none),
        "min_p": RowFilters(off, every, floor),
    }


FILTERS = ("off", "top_p", "top_k", "all", "one", "near one", "min_p")


def filter_differences(logits: Tensor, names: tuple[str, ...] = FILTERS) -> dict[str, int]:
    """Return how many logits differ from the reference after some filters, by case."""
    rows, vocabulary = logits.shape
    g = torch.Generator().manual_seed(3)
    device, found = logits.device, {}
    for name in names:
        top_p, top_k, min_p = (x.to(device) for x in filters(rows, vocabulary)[name])
        temperature = torch.rand(rows, generator=g).to(device) + 0.2
        temperature[::2] = 1.0
        temperature[3::5] = 0.0
        chosen = torch.randint(-1, vocabulary, (rows,), generator=g).to(device)
        for kept in (chosen, torch.full_like(chosen, -1)):
            given = (top_p, top_k, min_p)
            ours = sampling.exclude_tokens(logits.clone(), temperature, *given, kept)
            theirs = exclude_tokens_ref(logits, temperature, RowFilters(*given), kept)
            case = f"filter {rows} x {vocabulary}, {name}, {int(kept[0])}"
            found[case] = different(ours, theirs)
    return {name: count for name, count in found.items() if count}


def fast_filter_differences(logits: Tensor, names: tuple[str, ...] = FILTERS) -> dict[str, int]:
    """Return how many logits `sampling_triton` filters otherwise than its weights demand."""
    rows, vocabulary = logits.shape
    temperature, chosen = torch.linspace(0.5, 1.5, rows), torch.arange(rows) - 1
    z = logits / temperature[:, None]
    finite = z.amax(-1, keepdim=True).isfinite()
    scaled = (z - z.amax(-1, keepdim=True)) * exponential_triton.LOG2_E.value
    weights = torch.from_numpy(np.exp2(scaled.numpy())) * 2.0**40
    weights = torch.where(finite, weights, 0).round().long()
    found = {}
    for name in names:
        row_filters = filters(rows, vocabulary)[name]
        kept = allowed_tokens(weights, row_filters) | ~finite
        kept |= torch.arange(vocabulary) == chosen[:, None]
        theirs = torch.where(kept, logits, -math.inf)
        top_p, top_k, min_p = row_filters
        ours = sampling_triton.exclude_tokens(
            logits.clone(), temperature, top_p, top_k, min_p, chosen
        )
        found[f"fast filter {rows} x {vocabulary}, {name}"] = different(ours, theirs)
    return {name: count for name, count in found.items() if count}


def sample_differences(logits: Tensor) -> dict[str, int]:
    """Return how many values differ from the reference."""
    rows, vocabulary = logits.shape
    g = torch.Generator().manual_seed(4)
    device, found = logits.device, {}
    temperature = torch.rand(rows, generator=g).to(device) + 0.2
    temperature[::2] = 1.0
    temperature[1::5] = 0.0
    bits = torch.randint(0, 2**53, (rows,), generator=g).to(device)
    bits[0], bits[-1] = 2**53 - 1, 0
    # With the largest logits only, as filters leave them.
    largest = torch.where(
        logits >= logits.topk(min(2, vocabulary)).values[:, -1:], logits, -math.inf
    )
    for name, given in (("all", logits), ("filtered", largest)):
        ours = sampling.sample(given, bits, temperature)
        theirs = sample_ref(given, bits, temperature)
        defined = theirs[2].isfinite()
        case = f"sample {rows} x {vocabulary}, {name}: "
        found[case + "tokens"] = different(ours[0][defined], theirs[0][defined])
        found[case + "logprobs"] = different(ours[1][defined], theirs[1][defined])
        found[case + "lse"] = different(ours[2], theirs[2])
        outside = (ours[0] < 0) | (ours[0] >= vocabulary)
        found[case + "tokens outside the row"] = int(outside.sum())
    return {name: count for name, count in found.items() if count}


def differences(logits: Tensor) -> dict[str, int]:
    return logprob_differences(logits) | sample_differences(logits) | filter_differences(logits)


if __name__ == "__main__":
    import exact_interpreter  # noqa: F401

    torch.set_num_threads(1)
    logits, special = logits_of(2, 4100, 3.0, "cpu"), special_rows(6, "cpu")
    found = differences(logits) | logprob_differences(special)
    # Blocks of many rows, and a few rows at a time.
    with mock.patch.multiple(sampling, _FEW_ROWS=0, _ROUNDED_AT_ONCE=18, _EXCLUDE_BLOCK=4):
        found |= sample_differences(special) | filter_differences(special)
    found |= fast_filter_differences(logits, ("all",)) | fast_filter_differences(special)
    print(json.dumps(found))
