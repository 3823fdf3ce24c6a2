"""The search for the first operation that differs between sampler and trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.kernels.logprob import chosen_logprobs
from jetrl.models.policy import Policy
from jetrl.rollout.decode import DecodeBatch
from jetrl.rollout.kv_cache import PagedCache
from jetrl.rollout.pages import PageAllocator
from jetrl.rollout.prefill import Prefill
from jetrl.rollout.scheduler import Scheduler
from jetrl.rollout.sequence import RunningSequence
from jetrl.rollout.stopping import StopRules
from jetrl.types import SamplingParams

_PAGE_SIZE = 64  # tokens


@dataclass(frozen=True)
class Location:
    """The first operation whose output differs between sampler and trainer.

    Attributes:
        operation: The name of the operation, such as `layers.3.attention`.
    """

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
def locate(
    policy: Policy,
    prompt: Sequence[int],
    completion: Sequence[int],
    temperature: float = 1.0,
) -> Location | None:
    """Run one sequence as sampler and as trainer; return the first operation that differs.

    The sampler's way is prefill of the prompt, then token by token over a paged cache, by the
    engine's own classes. Every operation's output is compared in order, and after them the
    log-probs.

    Args:
        completion: Token ids, at least one.
        temperature: The temperature of the log-probs; 0 is greedy, with the log-probs of 1.

    Returns:
        The operation; None where none differs, since the difference depended on the batch.
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
        drawn, logprobs = _replay(policy, prompt, completion, temperature)
    finally:
        decoder.trace = None
    compared = [(name, ours, rollout.output(name)) for name, ours in trainer.outputs()]
    expected, _ = chosen_logprobs(trainer.output("lm_head"), drawn, temperature or 1.0)
    compared.append(("log-probs", expected[:, None], logprobs[:, None]))
    for name, ours, theirs in compared:
        # The sampler's last layer gives a prompt's last token alone, as lm_head does for both.
        first = len(prompt) - 1 if len(theirs) == len(completion) else 0
        ours = ours[first:] if len(ours) == len(tokens) else ours
        rows = min(len(ours), len(theirs))  # the sampler never runs the last token
        difference = _compare(ours[:rows], theirs[:rows])
        if difference is not None:
            row, values, largest = difference
            return Location(name, first + row, values, ours[row].numel(), largest)
    return None


def located(
    policy: Policy, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0
) -> str:
    """Return in words which operation differs first.

    Args:
        completion: Token ids, at least one.
    """
    location = locate(policy, prompt, completion, temperature)
    return str(
        location or "no operation differs when the sequence runs alone: it depends on the batch"
    )


class _Recorder:
    """A trace of the decoder that keeps every output."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = {}

    def __call__(self, name: str, value: Tensor) -> None:
        self._values.setdefault(name, []).append(value.detach().clone())

    def outputs(self) -> list[tuple[str, Tensor]]:
        return [(name, torch.cat(values)) for name, values in self._values.items()]

    def output(self, name: str) -> Tensor:
        return torch.cat(self._values[name])


def _replay(
    policy: Policy, prompt: Sequence[int], completion: Sequence[int], temperature: float
) -> tuple[Tensor, Tensor]:
    """Run the sampler's forwards of a sequence whose tokens are given."""
    params = SamplingParams(max_tokens=len(completion), temperature=temperature)
    rules = StopRules(len(completion))
    sequence = RunningSequence(0, tuple(prompt), 0, rules, params=params)
    allocator = PageAllocator(-(-sequence.max_cached_tokens // _PAGE_SIZE), _PAGE_SIZE)
    scheduler = Scheduler([[sequence]], allocator, 1, len(prompt))
    cache = PagedCache(policy.config, policy.plan, allocator.num_pages, _PAGE_SIZE, policy.device)
    prefill = Prefill(policy, cache)
    decode = DecodeBatch(policy, cache, 1, len(prompt) + len(completion))
    drawn: list[int] = []
    logprobs: list[float] = []
    for token in completion:
        step = scheduler.schedule()
        assert step is not None, "a sequence that is alone waits for nothing"
        if step.decodes:
            decode.begin()  # what it drew is not what comes next
            ((ids, values),) = decode.launch(step, scheduler.sequences).drawn()
        else:
            logits = prefill.forward(step, scheduler.sequences)
            ids, values = (x.tolist() for x in prefill.draw(logits, step, [sequence]))
        drawn += ids
        logprobs += values
        scheduler.complete(step, [([token], values)])
    device = policy.device
    tokens = torch.tensor(drawn, device=device).clamp(min=0)  # below 0: logits that are not finite
    return tokens, torch.tensor(logprobs, device=device)


def _compare(a: Tensor, b: Tensor) -> tuple[int, int, float] | None:
    """Return the first row that differs in any bit, how many of its values do, and by how much."""
    a, b = a.float().flatten(1), b.float().flatten(1)
    unequal = (a.view(torch.int32) != b.view(torch.int32)).cpu()
    rows = unequal.any(1).nonzero().flatten()
    if not len(rows):
        return None
    row = int(rows[0])
    return row, int(unequal[row].sum()), float((a[row] - b[row]).abs().max())
