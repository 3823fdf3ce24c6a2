"""FP32 gradient sums of master weights, to which backward adds its products.

A product of FP8 codes is BF16 and is added to an FP32 sum; other products are summed in FP32. The
bits of a sum depend on the order of micro-batches and layers. A tied embedding and head share one
sum. Autograd computes the gradients of norms and biases.

`OrderedGradients` gives several processes the bits of one. Rank r trains every `size`-th
micro-batch. In each round, a rank adds the products to the rows that it owns, in the order of the
micro-batches:

    backward of this rank's micro-batch      product of a linear, complete
        exchange                             own rows of every rank's product arrive
        add_products                         sum of own rows + product of rank 0 + of rank 1 + ...

All ranks call collectives in backward order, including ranks without a micro-batch. The
embedding's gradient is exchanged as tokens and BF16 rows. Vectors, and matrices of less than one
block of rows, are whole on every rank.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from jetrl.distributed.collectives import Work, exchange, gather_equal
from jetrl.distributed.shards import Shard
from jetrl.distributed.world import World
from jetrl.precision.backend import arithmetic_of
from jetrl.precision.exact import exact_matmul
from jetrl.precision.quantize import QTensor, dequantize

# A master weight, and the dtype of its products; None for rows of an embedding.
Expected = tuple[Tensor, torch.dtype | None]


class Gradients:
    """The FP32 gradient sums of one model's master weights, in `.grad` of each parameter.

    Methods that add return the gradient that backward returns to autograd for the master weight:
    None, unless the weight has a hook, which then gets each gradient.

    Attributes:
        expected: The products of master weights in the order of forward.
        in_chunks: The weights whose products come in chunks, summed per micro-batch before they
            are added.
        draws: The name of the micro-batch's draws for stochastic rounding: seed, kind of training,
            number of the update, number of the micro-batch.
        of_images: The master weights of an image tower, which only micro-batches with images have
            gradients of.
        estimated: How to multiply the sum of a master weight, in place, by the derivative of its
            quantizer, which is the same for all micro-batches of an update (`Format.estimate`).
    """

    def __init__(self) -> None:
        self.expected: list[Expected] = []
        self.estimated: dict[Tensor, Callable[[Tensor, Tensor], None]] = {}
        self.in_chunks: list[Tensor] = []
        self.of_images: list[Tensor] = []
        self.draws: tuple[int | str, ...] = ()
        self._of_micro_batch: dict[Tensor, Tensor] = {}
        self._in_micro_batch = False

    def begin_update(self) -> None:
        self._of_micro_batch.clear()
        self._in_micro_batch = False

    def begin_micro_batch(self, num_tokens: Sequence[int], own: bool = True) -> None:
        """Begin the backward of one micro-batch per process, with `num_tokens` each.

        `own` is False on a process that has none.
        """
        self._in_micro_batch = True

    def end_micro_batch(self, failed: bool = False) -> None:
        self._in_micro_batch = False
        for master in list(self._of_micro_batch):
            self._add_chunks(master)

    def end_update(self) -> None:
        """Complete `.grad` of every master weight."""
        for master, estimate in self.estimated.items():
            if master.grad is not None:
                estimate(master.grad, master.detach())

    def draw_key(self, master: Tensor) -> tuple[int | str, ...]:
        """Return the name of the draws for a weight's dY: weights are counted as in forward."""
        known = (n for n, (expected, _) in enumerate(self.expected) if expected is master)
        return *self.draws, next(known, -1)

    def add(self, master: Tensor, product: Tensor) -> Tensor | None:
        """Add a BF16 gradient [N, K]."""
        return self._keep(master, _summed(self._sum(master), product[None]))

    def add_in_place(self, master: Tensor, adds: Callable[[Tensor, bool], None]) -> Tensor | None:
        """Add a BF16 gradient [N, K] that `adds(total, begun)` adds to a float32 sum in place.

        If the sum is not `begun`, `adds` stores the gradient; `total` may then be bfloat16.
        """
        total = self._sum(master)
        begun = total is not None
        if total is None:
            total = torch.empty_like(master, dtype=torch.float32)
        adds(total, begun)
        return self._keep(master, total)

    def add_matmul(self, master: Tensor, dy: Tensor, x: QTensor | Tensor) -> Tensor | None:
        """Add dy^T x in FP32, of bfloat16 dy [T, N] and x [T, K] (or codes, padded along T)."""
        return self._keep(master, matmul_product(dy, x, self._sum(master)))

    def add_rows(self, master: Tensor, rows: Tensor, values: Tensor) -> Tensor | None:
        """Add bfloat16 `values` [T, D] to rows int64 [T] of an embedding."""
        self._add_chunks(master)  # of a head that is tied to the embedding
        if master._backward_hooks:
            return rows_added(None, rows, values, range(len(master)))
        master.grad = rows_added(master.grad, rows, values, range(len(master)))
        return None

    def buffer(self, master: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the float32 sum [N, K] to add to in place, and the gradient for autograd.

        If the weight has a hook, the sum starts from zeros and is that gradient.
        """
        total = self._sum(master)
        if total is None:
            total = torch.zeros_like(master)
        return total, self._keep(master, total)

    def add_of_images(self, gradients: Sequence[Tensor]) -> None:
        """Add the gradients of `of_images`, float32, of one micro-batch."""
        for master, gradient in zip(self.of_images, gradients, strict=True):
            _call_hooks(master, gradient)
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)

    def _sum(self, master: Tensor) -> Tensor | None:
        """Return the sum to add a product to; None before the first product."""
        if master._backward_hooks:
            return None
        return self._of_micro_batch.get(master) if self._apart(master) else master.grad

    def _keep(self, master: Tensor, total: Tensor) -> Tensor | None:
        """Store a sum, and return the gradient for autograd."""
        if master._backward_hooks:
            return total
        if self._apart(master):
            self._of_micro_batch[master] = total
        else:
            master.grad = total
        return None

    def _apart(self, master: Tensor) -> bool:
        """Return whether a master weight's products are summed per micro-batch first."""
        return self._in_micro_batch and any(master is other for other in self.in_chunks)

    def _add_chunks(self, master: Tensor) -> None:
        """Add a micro-batch's sum of chunks to the gradient of a master weight."""
        product = self._of_micro_batch.pop(master, None)
        if product is not None:
            master.grad = product if master.grad is None else master.grad.add_(product)


def _call_hooks(master: Tensor, gradient: Tensor) -> None:
    for hook in (master._backward_hooks or {}).values():
        hook(gradient)


def matmul_product(dy: Tensor, x: QTensor | Tensor, total: Tensor | None = None) -> Tensor:
    """Return dy^T x [N, K] with FP32 sums, or add it to `total` float32 [N, K] in place.

    On a CPU the product is exact_matmul(dy^T, x), rounded to float32 before it is added.
    """
    values = dequantize(x)[: len(dy)] if isinstance(x, QTensor) else x
    if arithmetic_of(dy) is not None:
        values = values.bfloat16()  # dequantized codes are not exact in BF16
        if total is None:
            return torch.mm(dy.mT, values, out_dtype=torch.float32)
        torch.ops.aten.addmm.dtype_out(total, dy.mT, values, torch.float32, out=total)
        return total
    product = exact_matmul(dy.mT, values).float()
    return product if total is None else total.add_(product)


def rows_added(total: Tensor | None, rows: Tensor, values: Tensor, own: range) -> Tensor:
    """Add the gradients of tokens to the sum of a matrix's own rows, in place, and return the sum.

    Rows are added token by token, each addition rounded to float32.

    Args:
        total: The sum of the n own rows, float32 [n, D]; None for zeros.
        rows: The row of each gradient in the whole matrix, int64 [T]; others' rows are ignored.
        values: The gradients, bfloat16 [T, D].
    """
    if total is None:
        total = values.new_zeros((len(own), values.shape[1]), dtype=torch.float32)
    if not len(own):
        return total
    # Others' rows are added as zeros to arbitrary own rows: selecting rows would need their
    # number on the host, and so a synchronization.
    inside = (rows >= own.start) & (rows < own.stop)
    places = torch.where(inside, rows - own.start, rows % len(own))
    added = torch.where(inside[:, None], values.float(), 0.0)
    if not rows.is_cpu:  # a GPU sorts the tokens by row
        return total.index_put_((places,), added, accumulate=True)
    # This function adds to zeros, row by row in the order of tokens, whatever the number of
    # threads. So the sums enter as the first tokens of their rows.
    used, numbers = places.unique(return_inverse=True)
    first = torch.arange(len(used))
    total[used] = torch.ops.aten.embedding_dense_backward(
        torch.cat([total[used], added]), torch.cat([first, numbers]), len(used), -1, False
    )
    return total


_AT_ONCE = 2**29  # bytes of a product that are exchanged at once
_IN_FLIGHT = 3  # products that are exchanged or added while backward computes the next ones


@dataclass
class _Stage:
    """A collective of every round, for the products of a linear layer or the embedding's rows.

    Attributes:
        master: The master weight; its own rows if it is divided.
        dtype: The dtype of products; None for embedding rows.
        before: The stage of the same master weight (a tied head) whose products are added first.
        made: A product, or rows and values, of this rank's micro-batch.
        received: Own rows of all ranks' products, kept until the embedding's rows are added.
    """

    master: Tensor
    shard: Shard | None
    dtype: torch.dtype | None
    before: _Stage | None = None
    made: tuple[Tensor, ...] | None = None
    received: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        rows = len(self.master) if self.shard is None else self.shard.num_rows
        return (rows, *self.master.shape[1:])

    @property
    def own(self) -> range:
        """The rows of the whole matrix that this rank sums."""
        if self.shard is None:
            return range(len(self.master))
        return range(self.shard.own_rows.start, self.shard.own_rows.stop)


class _OwnSums:
    """FP32 gradient sums of this rank's rows; ranks exchange products and add them in order.

    On a GPU, products of divided weights are added on a separate stream, overlapping backward.
    """

    def __init__(self, own: int) -> None:
        self._rank = own
        self._totals: dict[Tensor, Tensor] = {}
        self._begun: set[tuple[Tensor, int]] = set()  # master weight and first row of sums
        # Tensors that the separate stream still uses, and the event that it records afterwards.
        self._in_flight: deque[tuple[list[Tensor], torch.cuda.Event]] = deque()
        self._stream: torch.cuda.Stream | None = None

    def clear(self) -> None:
        self._totals.clear()
        self._begun.clear()
        self._in_flight.clear()

    def finish(self) -> None:
        """Store the sums as gradients; the optimizer frees them before the next rollout."""
        while self._in_flight:
            self._await_oldest()
        for master, total in self._totals.items():
            master.grad = total
        self._totals.clear()

    def add(self, master: Tensor, products: Tensor) -> None:
        """Add P products [P, n, K] in order."""
        self._totals[master] = _summed(self._totals.get(master), products)

    def add_rows(self, stage: _Stage, rows: Tensor, values: Tensor) -> None:
        """Add embedding rows of one micro-batch, as `rows_added` does."""
        total = self._totals.get(stage.master)
        self._totals[stage.master] = rows_added(total, rows, values, stage.own)

    def exchange(
        self, stage: _Stage, product: Tensor | None, rows: Sequence[slice], num_products: int
    ) -> tuple[Tensor, Work | None]:
        """Send some rows of a product to their owners; return own rows of all products.

        With a `Work`, the rows are valid after its `wait()`.
        """
        own = rows[self._rank]
        shape = (num_products, own.stop - own.start, *stage.shape[1:])
        received = torch.empty(shape, dtype=stage.dtype, device=stage.master.device)
        pieces = None if product is None else [product[piece] for piece in rows]
        return received, exchange(pieces, received)

    def exchange_and_add(
        self, stage: _Stage, product: Tensor | None, rows: Sequence[slice], num_products: int
    ) -> None:
        """Exchange some rows of a product as `exchange` does, and add them to the sum."""
        assert stage.shard is not None, "the rows of a matrix that is divided"
        received, work = self.exchange(stage, product, rows, num_products)
        own, first = rows[self._rank], stage.shard.first_row
        begun = stage.master in self._totals and (stage.master, own.start) in self._begun
        if stage.master not in self._totals:
            # Allocated on the current stream, so that other phases can reuse its memory.
            self._totals[stage.master] = torch.empty_like(stage.master, dtype=torch.float32)
        self._begun.add((stage.master, own.start))
        total = self._totals[stage.master][own.start - first : own.stop - first]
        if work is None:
            _summed(total, received, begun)
            return
        self._stream = self._stream or torch.cuda.Stream(stage.master.device)
        with torch.cuda.stream(self._stream):
            work.wait()
            _summed(total, received, begun)
            added = torch.cuda.Event()
            added.record()
        sent = [] if product is None else [product]
        self._in_flight.append(([received, total, *sent], added))
        while len(self._in_flight) > _IN_FLIGHT:
            self._await_oldest()

    def _await_oldest(self) -> None:
        """Make the current stream wait for the oldest sum, after which its tensors can be freed."""
        _, added = self._in_flight.popleft()
        torch.cuda.current_stream().wait_event(added)


class _AutogradSums:
    """The sums of gradients that autograd computes, of norms and biases: never divided."""

    def __init__(self, masters: Sequence[nn.Parameter]) -> None:
        self._masters = masters
        self._total: Tensor | None = None  # of all master weights, concatenated

    def add_round(self, num_products: int) -> None:
        """Add the gradients of a round of `num_products` micro-batches."""
        if not self._masters:
            return
        sizes = sum(master.numel() for master in self._masters)
        flat = torch.zeros(sizes, device=self._masters[0].device)
        gradients = [master.grad for master in self._masters if master.grad is not None]
        if len(gradients) == len(self._masters):
            torch.cat([gradient.flatten() for gradient in gradients], out=flat)
        for master in self._masters:
            master.grad = None
        self._total = _summed(self._total, gather_equal(flat)[:num_products])

    def finish(self) -> None:
        """Store the sums as gradients."""
        if self._total is None:
            return
        parts = self._total.split([master.numel() for master in self._masters])
        for master, part in zip(self._masters, parts, strict=True):
            master.grad = part.view_as(master)


class OrderedGradients(Gradients):
    """The gradient sums of own rows, over the micro-batches of all ranks in order.

    `masters` holds master weights by name, own rows if divided; `shards` has the divisions.
    """

    def __init__(
        self, world: World, masters: Mapping[str, nn.Parameter], shards: Mapping[str, Shard]
    ) -> None:
        super().__init__()
        self._masters = masters
        self._shards: dict[Tensor, Shard] = {masters[name]: shard for name, shard in shards.items()}
        self._stages: deque[_Stage] = deque()  # in backward order
        self._sums = _OwnSums(world.rank)
        self._autograd_sums = _AutogradSums([])
        self._num_tokens: Sequence[int] = ()  # of the micro-batch of each rank that has one
        self._own = False  # whether this rank has one
        self._sent = 0  # number of stages of the round that were sent
        self._filling: _Stage | None = None  # to whose product backward may still add
        self._from_images: Sequence[Tensor] = []  # gradients of `of_images`

    def begin_update(self) -> None:
        self._sums.clear()
        expected = {*self.of_images, *(master for master, _ in self.expected)}
        trained = (master for master in self._masters.values() if master.requires_grad)
        by_autograd = [master for master in trained if master not in expected]
        self._autograd_sums = _AutogradSums(by_autograd)
        self._stages.clear()
        for master, dtype in self.expected:
            stage = _Stage(master, self._shards.get(master), dtype)
            for other in self._stages:
                if other.master is master and other.dtype is None:
                    other.before = stage
            self._stages.appendleft(stage)

    def begin_micro_batch(self, num_tokens: Sequence[int], own: bool = True) -> None:
        """Begin a round: the backward of a micro-batch on each rank."""
        self._num_tokens, self._own = num_tokens, own
        self._sent, self._filling, self._from_images = 0, None, []

    def end_micro_batch(self, failed: bool = False) -> None:
        """End a round: send all stages that were not sent before."""
        self._filling = None
        rest = list(self._stages)[self._sent :]
        complete = not self._own or all(stage.made is not None for stage in rest)
        assert failed or complete, "backward gave no gradient of a master weight"
        self._send_ready(all_stages=True)
        self._autograd_sums.add_round(len(self._num_tokens))
        self._send_of_images()

    def end_update(self) -> None:
        self._sums.finish()
        self._autograd_sums.finish()
        super().end_update()

    def add(self, master: Tensor, product: Tensor) -> None:
        """Add a BF16 gradient [N, K]; chunks of one product are summed in FP32."""
        stage, chunks = self._begun(master)
        if stage.dtype == torch.float32:
            product = product.float() if chunks is None else chunks.add_(product)
        self._made(stage, product)

    def add_in_place(self, master: Tensor, adds: Callable[[Tensor, bool], None]) -> None:
        """Add a BF16 gradient, which is sent in BF16 unless it is a chunk of an FP32 product."""
        stage, chunks = self._begun(master)
        product = chunks
        if product is None:
            product = torch.empty(stage.shape, dtype=stage.dtype, device=master.device)
        adds(product, chunks is not None)
        self._made(stage, product)

    def add_matmul(self, master: Tensor, dy: Tensor, x: QTensor | Tensor) -> None:
        stage, chunks = self._begun(master)
        self._made(stage, matmul_product(dy, x, chunks))

    def add_rows(self, master: Tensor, rows: Tensor, values: Tensor) -> None:
        embedding = (stage for stage in self._stages if stage.dtype is None)
        self._made(next(stage for stage in embedding if stage.master is master), rows, values)

    def buffer(self, master: Tensor) -> tuple[Tensor, None]:
        """Return the float32 product [N, K] of the whole master weight, to add to in place."""
        stage, product = self._begun(master)
        if product is None:
            product = torch.zeros(stage.shape, dtype=torch.float32, device=master.device)
        self._made(stage, product)
        return product, None

    def add_of_images(self, gradients: Sequence[Tensor]) -> None:
        for master, gradient in zip(self.of_images, gradients, strict=True):
            _call_hooks(master, gradient)
        self._from_images = gradients

    def _send_of_images(self) -> None:
        """Add the gradients of `of_images` of the round, in the order of micro-batches."""
        if not self.of_images:
            return
        own, self._from_images = self._from_images, []
        device, count = self.of_images[0].device, len(self._num_tokens)
        # Micro-batches without images add nothing, not zeros: that has the bits of one process.
        have = gather_equal(torch.tensor([len(own)], device=device))[:count, 0] > 0
        if not bool(have.any()):
            return
        for number, master in enumerate(self.of_images):
            stage = _Stage(master, self._shards.get(master), torch.float32)
            product = own[number] if own else None
            if product is None and (self._own or stage.shard is None):
                product = torch.zeros(stage.shape, device=device)
            if stage.shard is None:
                assert product is not None
                received = gather_equal(product)[:count]
            else:
                (rows,) = stage.shard.slices(stage.shard.size * stage.shard.num_rows)
                received, work = self._sums.exchange(stage, product, rows, count)
                if work is not None:
                    work.wait()
            self._sums.add(master, received[have])

    def _begun(self, master: Tensor) -> tuple[_Stage, Tensor | None]:
        """Return the stage of a master weight's products, and the product that backward adds to."""
        products = (stage for stage in self._stages if stage.dtype is not None)
        stage = next(stage for stage in products if stage.master is master)
        filled = stage.made if self._filling is stage else None
        return stage, None if filled is None else filled[0]

    def _made(self, stage: _Stage, *tensors: Tensor) -> None:
        """Keep a product of backward for sending; an FP32 product waits for further chunks."""
        _call_hooks(stage.master, tensors[-1])
        stage.made = tensors
        self._filling = stage if stage.dtype == torch.float32 else None
        self._send_ready()

    def _send_ready(self, all_stages: bool = False) -> None:
        """Send stages in order up to the first that is not ready, or all that are left."""
        while self._sent < len(self._stages):
            stage = self._stages[self._sent]
            if not all_stages and (stage.made is None or stage is self._filling):
                return
            self._sent += 1
            self._send(stage)

    def _send(self, stage: _Stage) -> None:
        """Exchange the products of one stage, and add those of own rows."""
        made, stage.made = stage.made, None
        if stage.dtype is None:
            self._send_rows(stage, made)
            return
        product = None if made is None else made[0].contiguous()
        if product is None and (self._own or stage.shard is None):
            # Others still expect a product after a failed backward; of a whole matrix all send one.
            product = torch.zeros(stage.shape, dtype=stage.dtype, device=stage.master.device)
        count = len(self._num_tokens)
        # Products of a tied head are added together with the embedding's rows, which come later.
        waits = any(other.before is stage for other in self._stages)
        if stage.shard is None:
            assert product is not None
            received = gather_equal(product)[:count]
            if waits:
                stage.received = received
            else:
                self._sums.add(stage.master, received)
        elif waits:
            (rows,) = stage.shard.slices(stage.shard.size * stage.shard.num_rows)
            stage.received, work = self._sums.exchange(stage, product, rows, count)
            if work is not None:
                work.wait()
        else:
            row_bytes = math.prod(stage.shape[1:]) * stage.dtype.itemsize
            for pieces in stage.shard.slices(max(1, _AT_ONCE // row_bytes)):
                self._sums.exchange_and_add(stage, product, pieces, count)

    def _send_rows(self, stage: _Stage, made: tuple[Tensor, ...] | None) -> None:
        """Gather the embedding's rows of all ranks, and add those that this rank owns."""
        counts, device = self._num_tokens, stage.master.device
        rows = torch.zeros(max(counts), dtype=torch.int64, device=device)
        values = torch.zeros((max(counts), stage.shape[1]), dtype=torch.bfloat16, device=device)
        if made is not None:
            rows[: len(made[0])], values[: len(made[1])] = made
        all_rows, all_values = gather_equal(rows), gather_equal(values)
        received = None
        if stage.before is not None:
            received, stage.before.received = stage.before.received, None
        for rank, count in enumerate(counts):
            if received is not None:
                self._sums.add(stage.master, received[rank : rank + 1])
            self._sums.add_rows(stage, all_rows[rank, :count], all_values[rank, :count])


def _summed(total: Tensor | None, products: Tensor, begun: bool = True) -> Tensor:
    """Return total + products[0] + products[1] + ..., each sum rounded to float32."""
    if (arithmetic := arithmetic_of(products)) is not None:
        return arithmetic.add_products(products, total, begun)
    begun = begun and total is not None
    if total is None:
        total = torch.empty_like(products[0], dtype=torch.float32)
    for product in products:
        total = total.add_(product) if begun else total.copy_(product)
        begun = True
    return total
