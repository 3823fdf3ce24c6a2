"""The comparison of weights, prompts and samples, which all ranks have to have alike.

Each step compares a digest of it over the ranks. A rank that differs, by a fault of a GPU or by a
task that gives other prompts each time, ends the run by name: what it trains on would no longer be
what the others train on. In a run of one process nothing is computed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from jetrl.distributed.world import named, ranks_that_differ, world
from jetrl.errors import RanksDiffer
from jetrl.models.model import Model
from jetrl.rewards.sampling import EncodedPrompt
from jetrl.types import Sample


def compare_prompts(step: int, prompts: Sequence[EncodedPrompt]) -> None:
    """Check that all ranks have drawn the same prompts for a step.

    Args:
        step: The number of the step.
        prompts: The prompts of this rank.

    Raises:
        RanksDiffer: They have not.
    """
    if world().size == 1:
        return
    what = f"the prompts of step {step}, which a task has to give alike on every rank"
    own = [(p.prompt.id, p.prompt.task, p.prompt.answer, p.token_ids, p.stop) for p in prompts]
    world().same(what, _digest(own))


def compare_samples(step: int, samples: Sequence[Sample]) -> None:
    """Check that all ranks are about to train on the same samples.

    Args:
        step: The number of the step.
        samples: The samples of this rank, which are those of all ranks.

    Raises:
        RanksDiffer: They are not.
    """
    if world().size == 1:
        return
    world().same(f"the samples of step {step}", samples_digest(samples))


def samples_digest(samples: Sequence[Sample]) -> str:
    """Return a digest of all that is trained on, the same in every process.

    Args:
        samples: The samples of a step.
    """
    digest = hashlib.blake2b(digest_size=8)
    for sample in samples:  # as bytes: the texts of their numbers take ten times as long
        digest.update(array("i", sample.prompt_token_ids))
        digest.update(array("i", sample.completion.token_ids))
        digest.update(array("f", sample.completion.logprobs))
    sizes = [(s.group, len(s.completion.token_ids), s.score.reward) for s in samples]
    digest.update(repr(sizes).encode())
    return digest.hexdigest()


def compare_weights(when: str, *models: Model, beside: Mapping[str, Tensor] | None = None) -> None:
    """Check that all ranks read the same quantized weights, and the same undivided master weights.

    Args:
        when: The moment, for the message.
        models: The models that are trained.
        beside: Tensors of a draft head, by name, which every rank has whole.

    Raises:
        RanksDiffer: They do not; the message names a weight.
    """
    if world().size == 1:
        return
    tensors: dict[str, Tensor] = {}
    for name, tensor in (beside or {}).items():
        tensors[f"draft head: {name}"] = tensor.to(models[0].device)
    for number, model in enumerate(models):
        weights, prefix = model.weights, f"model {number + 1}: " if number else ""
        whole = {n: m.detach() for n, m in weights.masters.items() if n not in weights.shards}
        for name, tensor in (weights.quantized_tensors() | whole).items():
            tensors[prefix + name] = tensor
    sums = torch.stack([_sum(tensor) for tensor in tensors.values()]).tolist()
    all_sums = world().gather("sums of the weights", sums)
    ranks = ranks_that_differ(all_sums)
    if not ranks:
        return
    usual = next(sums for rank, sums in enumerate(all_sums) if rank not in ranks)
    places = zip(tensors, all_sums[ranks[0]], usual, strict=True)
    differing = [name for name, there, here in places if there != here]
    raise RanksDiffer(
        f"{named(ranks)} differ{'s' * (len(ranks) == 1)} from the other ranks in "
        f"{len(differing)} of {len(tensors)} weights {when}, first in {differing[0]}: a fault of a "
        "GPU or of its memory, or a bug; go on with --resume from the last checkpoint"
    )


def _sum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bytes, as 64-bit words that wrap around: int64 []."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    words = len(data) // 8 * 8 if data.data_ptr() % 8 == 0 else 0
    return data[:words].view(torch.int64).sum() + data[words:].sum(dtype=torch.int64)


def _digest(value: object) -> str:
    """Return a digest of plain values that is the same in every process."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()
