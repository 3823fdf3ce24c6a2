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

_BLOCK = 2**22  # words whose products are held at a time: 32 MiB
_FACTOR = -0x61C8864680B583EB  # odd, as an int64: 2**64 over the golden ratio


def compare_prompts(step: int, prompts: Sequence[EncodedPrompt]) -> None:
    """Check that all ranks have drawn the same prompts for a step.

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

    Raises:
        RanksDiffer: They are not.
    """
    if world().size == 1:
        return
    world().same(f"the samples of step {step}", samples_digest(samples))


def samples_digest(samples: Sequence[Sample]) -> str:
    """Return a digest of all that is trained on, the same in every process."""
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
    factors = _factors(models[0].device)
    digests = torch.stack([_in_order(tensor, factors) for tensor in tensors.values()]).tolist()
    all_digests = world().gather("digests of the weights", digests)
    ranks = ranks_that_differ(all_digests)
    if not ranks:
        return
    usual = next(digests for rank, digests in enumerate(all_digests) if rank not in ranks)
    places = zip(tensors, all_digests[ranks[0]], usual, strict=True)
    differing = [name for name, there, here in places if there != here]
    raise RanksDiffer(
        f"{named(ranks)} differ{'s' * (len(ranks) == 1)} from the other ranks in "
        f"{len(differing)} of {len(tensors)} weights {when}, first in {differing[0]}: a fault of a "
        "GPU or of its memory, or a bug; go on with --resume from the last checkpoint"
    )


def _factors(device: torch.device) -> Tensor:
    """Return the odd factors of the words of a block, int64 [_BLOCK], the same on any device."""
    mixed = torch.arange(1, _BLOCK + 1, device=device) * _FACTOR  # modulo 2**64
    return (mixed ^ (mixed >> 29)) * _FACTOR | 1


def _in_order(tensor: Tensor, factors: Tensor) -> Tensor:
    """Return a digest of a tensor's bytes and of their order: int64 [], modulo 2**64."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 4:
        data = data.clone()
    words = len(data) // 4 * 4
    digest = factors.new_zeros(())
    for part in (data[:words].view(torch.int32), data[words:]):
        for block in part.split(len(factors)):
            digest = digest * _FACTOR + (block * factors[: len(block)]).sum()
    return digest


def _digest(value: object) -> str:
    """Return a digest of plain values that is the same in every process."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()
