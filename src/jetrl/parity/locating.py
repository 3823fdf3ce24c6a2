"""Which operation is the first to differ, for one sequence run both ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.policy import Policy
from jetrl.rollout.cache import PagedCache
from jetrl.rollout.key_values import Span

_PAGE_SIZE = 64


@dataclass(frozen=True)
class Location:
    """The first operation whose output differs.

    operation: as `layers.3.attention`. position: of the first token with a difference. values:
    elements of its output that differ, of how many; largest: the largest difference among them."""

    operation: str
    position: int
    values: int
    of: int
    largest: float

    def __str__(self) -> str:
        return (
            f"the first operation that differs is {self.operation}, at token {self.position}: "
            f"{self.values} of {self.of} values, by at most {self.largest:.3g}"
        )


@torch.no_grad()
def locate(policy: Policy, prompt: Sequence[int], completion: Sequence[int]) -> Location | None:
    """Run one sequence as the sampler did (prefill of the prompt, then token by token over a paged
    cache) and as the trainer does, and compare every operation's output in order.

    Returns None when none differs: what differed then depended on the rest of the batch.
    """
    tokens = torch.tensor([*prompt, *completion], device=policy.device)
    trainer, rollout = _Recorder(), _Recorder()
    decoder = policy.decoder
    try:
        decoder.trace = trainer
        targets = torch.arange(len(prompt), len(tokens), device=policy.device)
        ends = torch.tensor([0, len(tokens)], device=policy.device)
        with torch.enable_grad():  # with gradients other kernels run: those of a training step
            policy.train_logprobs(tokens, ends, targets)
        decoder.trace = rollout
        _replay(policy, tokens, len(prompt))
    finally:
        decoder.trace = None
    for name, ours in trainer.outputs():
        theirs = rollout.output(name)
        # The sampler's last layer gives a prompt's last token alone, as lm_head does for both.
        first = len(prompt) - 1 if len(theirs) == len(completion) else 0
        ours = ours[first:] if len(ours) == len(tokens) else ours
        rows = min(len(ours), len(theirs))  # the sampler never runs the last token
        found = _compare(ours[:rows], theirs[:rows])
        if found is not None:
            row, values, largest = found
            return Location(name, first + row, values, ours[row].numel(), largest)
    return None


class _Recorder:
    """A trace of the decoder that keeps every output."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Tensor]] = {}

    def __call__(self, name: str, value: Tensor) -> None:
        self._parts.setdefault(name, []).append(value.detach().clone())

    def outputs(self) -> list[tuple[str, Tensor]]:
        return [(name, torch.cat(parts)) for name, parts in self._parts.items()]

    def output(self, name: str) -> Tensor:
        return torch.cat(self._parts[name])


def _replay(policy: Policy, tokens: Tensor, prompt_length: int) -> None:
    """The sampler's forwards of a sequence whose tokens are given."""
    pages = list(range(-(-len(tokens) // _PAGE_SIZE)))
    cache = PagedCache(policy.config, policy.plan, len(pages), _PAGE_SIZE, policy.device)
    starts = [0, *range(prompt_length, len(tokens) - 1)]
    for start, end in zip(starts, [*starts[1:], len(tokens) - 1], strict=True):
        positions = torch.arange(start, end, device=policy.device)
        kv = cache.key_values([Span(0, start, end - start, pages)], ends=start == 0)
        hidden = policy.rollout_forward(tokens[start:end], positions, kv)
        policy.rollout_logits(hidden[-1:])


def _compare(a: Tensor, b: Tensor) -> tuple[int, int, float] | None:
    """(first row that differs in any bit, values of it that do, largest difference) or None."""
    a, b = a.float().flatten(1), b.float().flatten(1)
    unequal = (a.view(torch.int32) != b.view(torch.int32)).cpu()
    rows = unequal.any(1).nonzero().flatten()
    if not len(rows):
        return None
    row = int(rows[0])
    return row, int(unequal[row].sum()), float((a[row] - b[row]).abs().max())
