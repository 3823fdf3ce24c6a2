"""Decide whether the samples of an update share their prompts: always, never, or where it pays.

A stem, the whole blocks of 128 tokens of a prompt, is computed once for all samples of the prompt
in a micro-batch (`models.stems`). That changes which samples meet in a micro-batch, so it pays only
where enough tokens are saved. `train.share_prompts = "auto"` decides by the lengths of the update's
samples alone, so that every rank, and a resumed run, decides alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from jetrl.types import Sample, stem_length

SharePrompts = bool | Literal["auto"]
# The share of an update's tokens that "auto" wants to save. A smaller one may be lost again:
# products take as long for some more rows, and another packing may fill micro-batches less evenly.
# Measured at the shape of Qwen3-8B, 10% of the tokens save 3% of an update, and 58% save half.
WORTH_SHARING = 0.08


def shares_prompts(
    setting: SharePrompts, samples: Sequence[Sample], sample_ids: Iterable[int] | None = None
) -> bool:
    """Return whether the samples of an update are packed with shared prompts.

    Args:
        setting: `train.share_prompts`.
        sample_ids: The numbers of the update's samples; by default all.
    """
    if setting != "auto":
        return setting
    chosen = range(len(samples)) if sample_ids is None else sample_ids
    return saved_share([samples[i] for i in chosen]) >= WORTH_SHARING


def saved_share(samples: Iterable[Sample]) -> float:
    """Return the share of the tokens that is not computed if every stem is computed once.

    Args:
        samples: The samples of an update. Those without a completion token are not trained on, and
            count for nothing.
    """
    total = saved = 0
    stems: set[tuple[int, ...]] = set()
    for sample in samples:
        if not sample.completion.token_ids:
            continue
        total += len(sample.prompt_token_ids) + len(sample.completion.token_ids)
        stem = tuple(sample.prompt_token_ids[: stem_length(len(sample.prompt_token_ids))])
        saved += len(stem) if stem in stems else 0
        stems.add(stem)
    return saved / total if total else 0.0
