"""The launches of a run: sampling and training, once through, with a stand-in for the GPU.

Every size by which kernels are compiled otherwise is gone through: the batches and contexts for
which graphs of decode are captured, prompts of few and of many rows, micro-batches with and without
recomputation and shared prompts. What is missing here is compiled when it is launched.

The order is that of a run: its weights, the proof at its start, sampling, an update. So the kernels
that are needed first are there first. And Triton's key of a kernel also names the constants of the
functions that it calls, but only of those that an earlier kernel called too: launched in another
order (decode before any prompt), four kernels of attention would have other keys.

tests/compiling holds this list to launches of other sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from jetrl.kernels.adamw import adamw_
from jetrl.kernels.adamw_scalars import adamw_scalars
from jetrl.kernels.norm import block_squares
from jetrl.kernels.sampling import sample
from jetrl.models.adapter import Adapter, LoRA
from jetrl.models.families import ModelConfig, parameter_shapes
from jetrl.models.policy import Policy
from jetrl.models.stems import Stems
from jetrl.precision import PrecisionPlan
from jetrl.precision.linear import Linear
from jetrl.rollout.decode import MAX_REPEATS
from jetrl.rollout.decode_forward import DecodeBuffers, ForwardSize, GraphForwards
from jetrl.rollout.draft_widths import Width, choices
from jetrl.rollout.kv_cache import PagedCache
from jetrl.rollout.paged_attention import Span
from jetrl.rollout.sizes import padded_batch
from jetrl.rollout.speculation import Speculation

CUDA = torch.device("cuda")
_PAGE = 64  # Tokens of a KV page.
_PAGES = 4096
_CONTEXTS = (
    1024,
    2048,
)  # Longest contexts of a forward of decode: one split of the keys, and more.
_ROWS = (1, 7, 64, 256, 1000)  # Rows of a linear layer, those of the proof among them.
_DRAWS = (1, 2, 16)  # Sequences that draw after their prompts.
_TOKENS = ((1, 2), (300, 1001), (1000, 4096))  # Ends of the two sequences of a micro-batch.


@dataclass(frozen=True)
class Work:
    """The model and the sizes that decide which kernels a run compiles.

    Attributes:
        lora: The kind of the adapter, or None.
    """

    config: ModelConfig
    plan: PrecisionPlan
    lora: LoRA | None
    max_batch_size: int
    multiprocessors: int
    speculation: bool = False


def go_through(work: Work) -> None:
    """Launch what a run launches, within a stand-in."""
    policy = stand_in_policy(work)
    linears(policy)
    prefill(policy)
    decode(policy, work.max_batch_size, [64])
    update(policy)
    optimizer()
    decode(policy, work.max_batch_size, graph_rows(work.max_batch_size))
    if work.speculation:
        verify(policy, work.max_batch_size)


def stand_in_policy(work: Work) -> Policy:
    """Return a policy of as few layers as have all kinds of layers."""
    plan, layers = work.plan, work.config.num_layers
    kinds = [
        (tuple(plan.linear_formats(layer, layers).items()), layer in (0, layers - 1))
        for layer in range(layers)
    ]
    needed = sum(1 for kind, _ in itertools.groupby(kinds)) + 1
    config = replace(work.config, num_layers=min(layers, needed))
    weights = {
        name: torch.empty(shape, device=CUDA) for name, shape in parameter_shapes(config).items()
    }
    adapter = None if work.lora is None else Adapter.new(config, work.lora, 0)
    return Policy(config, plan, weights, CUDA, adapter=adapter)


def graph_rows(max_batch_size: int) -> Iterator[int]:
    """Yield the batch sizes of graphs of decode, up to that of the largest batch."""
    rows = 0
    while rows < max_batch_size:
        rows = padded_batch(rows + 1)
        yield rows


def linears(policy: Policy) -> None:
    """Launch every linear of the first layer and the output head, at few and at many rows."""
    layers = [m for m in policy.decoder.layers[0].modules() if isinstance(m, Linear)]
    with torch.no_grad():
        for linear in (*layers, policy.decoder.lm_head):
            for rows in _ROWS:
                x = torch.empty(rows, linear.weight.shape[1], dtype=torch.bfloat16, device=CUDA)
                for side in ("train", "rollout"):
                    linear(x, side)


def prefill(policy: Policy) -> None:
    """Launch forwards over prompts, with and without earlier pages, and the draws after them."""
    cache = PagedCache(policy.config, policy.plan, _PAGES, _PAGE, CUDA)
    spans = [Span(0, 0, 300, list(range(5))), Span(300, 64, 401, list(range(8)))]
    tokens = torch.zeros(701, dtype=torch.int64, device=CUDA)
    for ends in (True, False):
        hidden = policy.rollout_forward(tokens, tokens, cache.key_values(spans, ends=ends))
    for count, filtered in itertools.product(_DRAWS, (False, True)):
        logits = policy.rollout_logits(hidden[:count])
        ones = torch.ones(count, device=CUDA)
        whole = torch.ones(count, dtype=torch.int64, device=CUDA)
        sample(logits, whole, ones, ones, whole, filtered)


def decode(policy: Policy, slots: int, batches: Iterable[int]) -> None:
    """Launch forwards of decode."""
    forwards = decode_forwards(policy, slots, None)
    for rows in batches:
        for longest, filtered in itertools.product(_CONTEXTS, (False, True)):
            forwards.forward(ForwardSize(rows, longest, filtered))


def verify(policy: Policy, slots: int) -> None:
    """Launch forwards of decode that look drafts up and verify them."""
    # How many tokens of text there are is in no kernel, as little as the longest context is.
    forwards = decode_forwards(policy, slots, Speculation("auto", slots, _PAGE, CUDA))
    for rows in graph_rows(slots):
        for most, several in ((1, rows), *choices(rows)):
            verified = Width(most, several, drafts=True)
            forwards.forward(ForwardSize(rows, _CONTEXTS[-1], False, verified))


def decode_forwards(policy: Policy, slots: int, speculation: Speculation | None) -> GraphForwards:
    """Return forwards of decode without graphs and without memory for them.

    Args:
        speculation: The drafts; None for forwards of one token a sequence.
    """
    width = -(-policy.config.max_position_embeddings // _PAGE)
    forwards = object.__new__(GraphForwards)
    forwards._policy, forwards.page_size, forwards._speculation = policy, _PAGE, speculation
    forwards._cache = PagedCache(policy.config, policy.plan, _PAGES, _PAGE, CUDA)
    drafts = speculation is not None
    forwards._buffers = DecodeBuffers.empty(slots, MAX_REPEATS, width, CUDA, drafts)
    return forwards


def update(policy: Policy) -> None:
    """Launch forward and backward of micro-batches, and the rounding of the weights."""
    for (first, end), recomputed in itertools.product(_TOKENS, (False, True)):
        ends, targets = torch.tensor([0, first, end]), torch.arange(first + 1, end)
        _forward_and_backward(policy, ends, targets, recomputed, None)
    _forward_and_backward(
        policy, torch.tensor([0, 300, 600]), torch.arange(1, 100), False, _stems()
    )
    policy.requantize()


def _stems() -> Stems:
    """Return the stems of two sequences of 300 tokens, of which they share the first 128."""
    whole, branch = torch.arange(300), torch.arange(128, 300)
    return Stems(
        rows=torch.cat((whole, 300 + branch)),
        row_of=torch.cat((whole, whole[:128], 172 + branch)),
        positions=torch.cat((whole, branch)),
        run_starts=[0, 128, 300, 472],
        stem_of=[-1, 0, 0],
    )


def _forward_and_backward(
    policy: Policy, ends: torch.Tensor, targets: torch.Tensor, recomputed: bool, stems: Stems | None
) -> None:
    """Launch forward and backward of a micro-batch."""
    tokens = torch.zeros(int(ends[-1]), dtype=torch.int64)
    with torch.enable_grad():
        logprobs, _ = policy.train_logprobs(tokens, ends, targets, 1.0, recomputed, stems)
        logprobs.backward(torch.empty(len(targets), device=CUDA))


def optimizer() -> None:
    """Launch what the optimizer launches: AdamW with compact moments, and the gradient's norm."""
    master = torch.empty(512, 512, device=CUDA)
    ratio, root = (torch.empty_like(master, dtype=kind) for kind in (torch.uint8, torch.int16))
    scalars = adamw_scalars(1, lambda _: 0.1, (0.9, 0.95), 1e-8, 0.1)
    adamw_(master, master, ratio, root, torch.empty((), device=CUDA), scalars)
    block_squares(master)
