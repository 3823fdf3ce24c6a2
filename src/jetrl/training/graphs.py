"""CUDA graphs of an update, for models so small that the host's launches take longer than kernels.

    forward     segment 0 | attention 0 | segment 1 | attention 1 | ... | segment L | head, loss
    backward    the same in reverse order
    optimizer   gradient norm | AdamW | requantize

A segment (`Decoder.segment`) holds the operations between two attentions, which are per token but
for the gradients of weights. Segments are graphs; attention, embedding, head and loss run as
without graphs. So no graph depends on the sequences of a micro-batch, only on its number of tokens,
rounded up to a multiple of 512.

The rows that fill up a micro-batch change no bit:

    forward     they are zeros in the embedding and in each attention, and so in all of a segment: a
                norm of zeros is zeros, and no product of a segment has a bias
    WGrad       groups of 128 tokens have the maximum of the real rows; groups of zeros add zeros
    norms       512 terms at most, of as many rows each (`GRADIENT_TERMS`); the terms of the real
                rows are added outside of the graph

Only products of codes promise these bits: BF16 products of a library depend on the number of rows.
So `auto` captures plans whose linears multiply codes in forward and backward.

A number of tokens is captured when it occurs for the second time, which takes about two updates'
time, and all share one memory pool. Gradients of master weights keep their addresses. They begin as
-0, to which adding is exact: -0 + x has the bits of x.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from jetrl.distributed.world import world
from jetrl.errors import UserError
from jetrl.memory.graphs import GraphCapture, Replay, captures_updates
from jetrl.models.attention import KeyValues
from jetrl.models.decoder import Decoder, embed
from jetrl.models.model import Model
from jetrl.models.packed import ForwardInputs
from jetrl.precision.backend import HOPPER, backend_for
from jetrl.precision.exact import GRADIENT_TERMS
from jetrl.settings.sections import TrainSettings

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Work = Callable[[], object]

_ALIGNED = 64  # elements between gradients: kernels load vectors


class Captures(Protocol):
    """Captures work; `memory.graphs.GraphCapture` on a GPU."""

    def begin(self) -> None: ...
    def end(self) -> None: ...
    def close(self) -> None: ...
    def warm_up(self, work: Callable[[], Result]) -> Result: ...
    def capture(self, work: Work) -> Replay: ...
    def alias(self, tensor: Tensor) -> Tensor: ...


def training_graphs(model: Model, train: TrainSettings) -> UpdateGraphs | None:
    """Return the graphs of a model's updates, or None if they run eagerly.

    Raises UserError if train.graphs is "on" and the updates cannot be captured.
    """
    if train.graphs == "off":
        return None
    if model.device.type != "cuda" or backend_for(model.device) is not HOPPER:
        if train.graphs == "on":
            raise UserError(
                f"train.graphs = on: only {HOPPER.gpus} capture updates; use train.graphs=auto, "
                "or off"
            )
        return None
    frozen = model.lora is not None
    captured = captures_updates(train, model.config, model.plan, world().size, frozen)
    return UpdateGraphs(model, GraphCapture(model.device)) if captured else None


class UpdateGraphs:
    """The graphs of one model's updates, and the gradients that they add to.

    The first update runs eagerly: it shows which master weights have gradients, and compiles.
    """

    def __init__(self, model: Model, captures: Captures) -> None:
        self._model, self._captures = model, captures
        self._decoder = DecoderGraphs(model.decoder, captures)
        self._trained: list[Tensor] = []  # master weights that have gradients
        self._gradients: StaticGradients | None = None
        self._norm: tuple[Replay, Tensor] | None = None
        self._requantize: Replay | None = None
        self._closed = False

    def close(self) -> None:
        """Free all graphs and their memory; updates run eagerly from now on."""
        self._decoder.close()
        self._norm = self._requantize = self._gradients = None
        self._closed = True
        self._captures.close()

    def give_up(self, problem: str) -> bool:
        """Free all graphs after memory ran out; return False if there was none."""
        if self._closed or self._gradients is None:
            return False
        logger.warning(
            "out of memory in training (%s): train.graphs is off from now on, which frees the "
            "memory of captured graphs; no bit changes",
            problem,
        )
        self.close()
        return True

    def begin_update(self) -> None:
        """Attach the gradients, which are -0, to the master weights, from the second update on."""
        # The optimizer has dropped them at the end of the update before.
        if self._gradients is None and self._trained and not self._closed:
            self._gradients = StaticGradients(self._model, self._trained)
        if self._gradients is not None:
            self._gradients.attach()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the forward and backward of a micro-batch as graphs."""
        if self._gradients is not None:
            self._decoder.restore = self._gradients.kept
            self._model.captured = self._decoder
        try:
            yield
        finally:
            self._model.captured = None

    def gradient_norm(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return the gradient norm that `compute` launches, a scalar on the device."""
        if self._closed:
            return compute()
        if self._gradients is None:
            # Buffers and unused weights have no gradient, and AdamW skips them.
            masters = self._model.master_weights().values()
            self._trained = [master for master in masters if master.grad is not None]
            return compute()
        # The first update has compiled, and its gradients have shown which addresses are needed.
        if self._norm is None:
            self._norm = self._captured(compute)
        replay, norm = self._norm
        self._gradients.check()
        replay()
        return norm.clone()

    def requantize(self) -> None:
        """Round the master weights into the quantized weights."""
        if self._closed or self._gradients is None:
            self._model.requantize()
            return
        # Rounding the same weights once more, as a capture's first run does, changes nothing.
        if self._requantize is None:
            self._requantize, _ = self._captured(self._model.requantize)
        self._requantize()

    def _captured(self, work: Callable[[], Result]) -> tuple[Replay, Result]:
        """Return the replay of work, which may run twice, and what it returns."""
        # The first run compiles kernels; what the second one returns is written by replays.
        self._captures.begin()
        self._captures.warm_up(work)
        made: list[Result] = []
        replay = self._captures.capture(lambda: made.append(work()))
        self._captures.end()
        return replay, made[0]


class StaticGradients:
    """Gradients of master weights at fixed addresses, in one buffer."""

    def __init__(self, model: Model, masters: Sequence[Tensor]) -> None:
        sizes = [-(-m.numel() // _ALIGNED) * _ALIGNED for m in masters]
        self._flat = torch.zeros(sum(sizes), device=model.device)
        parts = self._flat.split(sizes)
        self._of = [
            (m, part[: m.numel()].view_as(m)) for m, part in zip(masters, parts, strict=True)
        ]
        # An embedding that is not the head adds tokens to zeros: rows of no token stay +0.
        embedding, tied = model.decoder.embed, model.config.tie_word_embeddings
        self._zero = [g for m, g in self._of if m is embedding and not tied]

    def attach(self) -> None:
        self._flat.fill_(-0.0)
        for gradient in self._zero:
            gradient.zero_()
        for master, gradient in self._of:
            master.grad = gradient

    def check(self) -> None:
        """Check that the master weights still have these gradients, whose addresses graphs have."""
        moved = [tuple(g.shape) for master, g in self._of if master.grad is not g]
        assert not moved, f"gradients of master weights have moved: {moved}"

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the gradients after work that adds to them."""
        before = self._flat.clone()
        yield
        self._flat.copy_(before)


@dataclass
class _Tape:
    """A segment between its forward and its backward; `terms` are those of its norms' gradients."""

    entered: Tensor
    total: Tensor | None
    new_total: Tensor | None
    left: Tensor
    terms: list[Tensor]


@dataclass
class SegmentGraph:
    """The graphs of one segment for T rows, and the tensors that they read and write.

    Attributes:
        entered: [T, K], read by forward and backward.
        left: [T, N], written by forward.
        dleft: [T, N], read by backward.
        dentered: [T, K], written by backward.
        dnorms: Gradients of the segment's norms, [D], or their terms, [512, D]; from backward.
    """

    entered: Tensor
    forward: Replay
    left: Tensor
    dleft: Tensor = field(init=False)
    backward: Replay = field(init=False)
    dentered: Tensor = field(init=False)
    dnorms: list[Tensor] = field(init=False)


class DecoderGraphs:
    """Runs a decoder's segments as graphs, and its attention eagerly.

    `restore` is a context around work that adds to gradients it should not change.
    """

    def __init__(self, decoder: Decoder, captures: Captures) -> None:
        self._decoder, self._captures = decoder, captures
        self._uses: Counter[int] = Counter()
        self._graphs: dict[int, list[SegmentGraph]] = {}
        self.restore: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def close(self) -> None:
        self._graphs.clear()

    def __call__(self, inputs: ForwardInputs, kv: KeyValues) -> Tensor:
        """Return the final norm's output [T, D], differentiable, as `Decoder.forward` does.

        Backward must be called before the next forward: its graphs use the same memory.
        """
        decoder, rows = self._decoder, -(-len(inputs) // GRADIENT_TERMS) * GRADIENT_TERMS
        self._uses[rows] += 1
        # Traces call Python, and a replay does not. Segments have no place for further features.
        width, images = decoder.config.hidden_size, inputs.images
        deep = images is not None and images.features.shape[-1] > width
        if decoder.trace is not None or deep or self._uses[rows] < 2:
            return decoder(inputs, kv, "train")
        if rows not in self._graphs:
            self._graphs[rows] = self._capture(rows)
        graphs = self._graphs[rows]
        # Attention runs eagerly on the real rows, so its work lists are as without graphs.
        x = embed(inputs.token_ids, decoder.embedding, decoder.weights.gradients)
        x = inputs.embedded(x)
        count = len(decoder.layers)
        for index, rotation in enumerate(decoder.rotations(inputs)):
            mixer = decoder.layer(index).mixer
            qkv = mixer.qkv.with_bias(self._segment(graphs, index, x))
            x = mixer.attend(qkv, rotation, kv, None, index == count - 1)
        return self._segment(graphs, count, x)

    def _segment(self, graphs: list[SegmentGraph], index: int, entered: Tensor) -> Tensor:
        norm, *others = (norm.weight for norm in self._decoder.segment_norms(index))
        other = others[0] if others else None
        return _Segment.apply(entered, graphs[index], norm, other)

    def _capture(self, rows: int) -> list[SegmentGraph]:
        """Return the graphs of all segments for a number of rows."""
        captures = self._captures
        captures.begin()
        with self.restore(), torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            # Kernels compile and memory is allocated in a run on zeros.
            captures.warm_up(lambda: self._record(rows, Immediate()))
            graphs = self._record(rows, captures)
        captures.end()
        return graphs

    def _record(self, rows: int, captures: Captures) -> list[SegmentGraph]:
        """Record the forwards of all segments in order, then the backwards in reverse order.

        Memory is reused along this order, which is that of replays.
        """
        decoder = self._decoder
        layers = map(decoder.layer, range(len(decoder.layers)))
        widths = [decoder.config.hidden_size, *(x.mixer.o.quantized.shape[1] for x in layers)]
        # The embeddings, and attention's output of each layer.
        entered = captures.warm_up(self._inputs(rows, widths))
        tapes: list[_Tape] = []
        graphs: list[SegmentGraph] = []
        for index, values in enumerate(entered):
            total = tapes[-1].new_total if tapes else None
            forward = captures.capture(self._forward(tapes, index, total, values))
            left = captures.alias(tapes[-1].left.detach())
            graphs.append(SegmentGraph(captures.alias(values), forward, left))
        # All segments of a width can read their dY from one place: it is copied there just before.
        of_widths: dict[int, Tensor] = {}
        dtotal: Tensor | None = None
        for index in reversed(range(len(entered))):
            tape, graph = tapes.pop(), graphs[index]
            # The gradient of the residual stream stays in the pool: only segments read it.
            width = tape.left.shape[1]
            if width not in of_widths:
                (of_widths[width],) = captures.warm_up(self._inputs(rows, [width]))
            found: list[Tensor] = []
            backward = self._backward(found, index, tape, dtotal, of_widths[width])
            graph.backward = captures.capture(backward)
            # The first segment has no residual stream before it: `entered` is its start.
            dentered, *dnorms = found if tape.total is None else (found[0], *found[2:])
            dtotal = None if tape.total is None else found[1]
            graph.dleft, graph.dentered = captures.alias(of_widths[width]), captures.alias(dentered)
            # Backward goes through the norms in reverse order.
            graph.dnorms = [captures.alias(d) for d in (tape.terms[::-1] or dnorms)]
            del tape, found, backward, dentered, dnorms  # frees memory for the next segment
        return graphs

    def _inputs(self, rows: int, widths: Sequence[int]) -> Callable[[], list[Tensor]]:
        """Return the work that allocates inputs of graphs, zeros [T, width] each."""
        dtype, device = self._decoder.weights.dtype, self._decoder.weights.device
        return lambda: [torch.zeros(rows, width, dtype=dtype, device=device) for width in widths]

    def _forward(
        self, tapes: list[_Tape], index: int, total: Tensor | None, values: Tensor
    ) -> Work:
        """Return the work that runs the forward of a segment and appends its tape."""

        def work() -> None:
            entered = values.detach().requires_grad_()
            before = None if total is None else total.detach().requires_grad_()
            norms, terms = self._decoder.segment_norms(index), list[Tensor]()
            # Backward leaves the terms of these norms' gradients here.
            for norm in norms:
                norm.sums = terms
            try:
                after, left = self._decoder.segment(index, before, entered)
            finally:
                for norm in norms:
                    norm.sums = None
            tapes.append(_Tape(entered, before, after, left, terms))

        return work

    def _backward(
        self, found: list[Tensor], index: int, tape: _Tape, dtotal: Tensor | None, dleft: Tensor
    ) -> Work:
        """Return the work that appends the gradients of a segment's inputs and norms to `found`."""

        def work() -> None:
            outputs, gradients = [tape.left], [dleft]
            # The last segment ends with the final norm, which has no residual stream.
            if tape.new_total is not None and dtotal is not None:
                outputs.append(tape.new_total)
                gradients.append(dtotal)
            inputs = [tape.entered] if tape.total is None else [tape.entered, tape.total]
            norms = [norm.weight for norm in self._decoder.segment_norms(index)]
            found.extend(torch.autograd.grad(outputs, [*inputs, *norms], gradients))

        return work


class Immediate:
    """In place of captures: work runs at once, and its replay does nothing."""

    def begin(self) -> None: ...
    def end(self) -> None: ...
    def close(self) -> None: ...

    def warm_up(self, work: Callable[[], Result]) -> Result:
        return work()

    def capture(self, work: Work) -> Replay:
        work()
        return lambda: None

    def alias(self, tensor: Tensor) -> Tensor:
        return tensor


class _Segment(torch.autograd.Function):
    """A segment's graphs; its one or two norms' weights are inputs only for their gradients."""

    @staticmethod
    def forward(
        ctx: Any, entered: Tensor, graph: SegmentGraph, norm: Tensor, other: Tensor | None
    ) -> Tensor:
        ctx.graph, ctx.num_tokens = graph, len(entered)
        # Each layer has its own input: WGrad of `o` reads it again in backward.
        _fill(graph.entered, entered)
        graph.forward()
        return graph.left[: len(entered)]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        graph, count = ctx.graph, ctx.num_tokens
        _fill(graph.dleft, grads[0])
        graph.backward()
        # As many terms as a backward of these rows has.
        terms = -(-count // (len(graph.entered) // GRADIENT_TERMS))
        # An alias is read before the next segment's graph writes to the same memory.
        dnorms = [d[:terms].sum(0) if d.dim() > 1 else d.clone() for d in graph.dnorms]
        return graph.dentered[:count], None, *dnorms, *[None] * (2 - len(dnorms))


def _fill(rows: Tensor, values: Tensor) -> None:
    """Copy values to the first rows, and set the others to zero."""
    rows[: len(values)].copy_(values)
    if len(values) < len(rows):
        rows[len(values) :].zero_()
