"""The sink that backward adds the gradients of master weights to.

A product of FP8 codes arrives in BF16 and is added to an FP32 sum; other products are summed in
FP32. The order of micro-batches and layers decides the bits of a sum. A matrix as large as the
vocabulary, which tied embeddings use twice, has one sum. Norms and biases are left to autograd.

`OrderedGradients` serves several processes, with the bits of one. Rank r trains every `size`-th
micro-batch. Each rank adds the products of a round to the rows that it owns, in the order of the
micro-batches:

    backward of this rank's micro-batch      product of a linear, complete
        exchange                             own rows of every rank's product arrive
        add_products                         sum of own rows + product of rank 0 + of rank 1 + ...

Ranks call collectives in the order of backward; a rank without a micro-batch takes part with
nothing. The embedding's gradient travels as tokens and BF16 rows. Vectors, and matrices of less
than one block of rows, are whole on every rank.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from jetrl.distributed.collectives import Work, exchange, gather_equal
from jetrl.distributed.shards import Shard
from jetrl.distributed.world import World
from jetrl.precision.backend import arithmetic_of
from jetrl.precision.quantize import QTensor, dequantize

Expected = tuple[Tensor, torch.dtype | None]  # a master weight; its products, None: embedding rows


class Gradients:
    """The FP32 gradient sums of one model's master weights, each in its parameter's `.grad`.

    Methods that add return what backward hands to autograd for the master weight: None, unless the
    weight has a hook, which then sees each gradient.
    """

    def __init__(self) -> None:
        self._in_chunks: Sequence[Tensor] = ()
        self._of_micro_batch: dict[Tensor, Tensor] = {}
        self._in_micro_batch = False

    def expect(self, products: Sequence[Expected], in_chunks: Sequence[Tensor]) -> None:
        """Announce the products of master weights in the order of forward.

        Those of the weights `in_chunks` are summed within each micro-batch before they are added.
        """
        self._in_chunks = in_chunks

    def begin_update(self) -> None:
        self._of_micro_batch.clear()
        self._in_micro_batch = False

    def begin_micro_batch(self, num_tokens: Sequence[int], own: bool = True) -> None:
        """Begin the backward of a micro-batch per process; `num_tokens` are those of each."""
        self._in_micro_batch = True

    def end_micro_batch(self, failed: bool = False) -> None:
        self._in_micro_batch = False
        for master in list(self._of_micro_batch):
            self._add_chunks(master)

    def end_update(self) -> None:
        """End the gradients of an update: `.grad` of every master weight is complete."""

    def add(self, master: Tensor, product: Tensor) -> Tensor | None:
        """Add a gradient [N, K] that is there in BF16."""
        return self._keep(master, _summed(self._sum(master), product[None]))

    def add_matmul(self, master: Tensor, dy: Tensor, x: QTensor | Tensor) -> Tensor | None:
        """Add dy^T x of bfloat16 dy [T, N] and x [T, K], or codes padded along T, in FP32."""
        return self._keep(master, matmul_product(dy, x, self._sum(master)))

    def add_rows(self, master: Tensor, rows: Tensor, values: Tensor) -> Tensor | None:
        """Add bfloat16 `values` [T, D] to rows int64 [T]; a GPU adds equal rows one by one."""
        self._add_chunks(master)  # of a head that is tied to the embedding
        if master._backward_hooks:
            return rows_added(None, rows, values, range(len(master)))
        master.grad = rows_added(master.grad, rows, values, range(len(master)))
        return None

    def buffer(self, master: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the float32 sum to add to in place (zeros with a hook), and autograd's part."""
        total = self._sum(master)
        if total is None:
            total = torch.zeros_like(master)
        return total, self._keep(master, total)

    def _sum(self, master: Tensor) -> Tensor | None:
        """Return the sum that a product is added to; None before the first product."""
        if master._backward_hooks:
            return None
        return self._of_micro_batch.get(master) if self._apart(master) else master.grad

    def _keep(self, master: Tensor, total: Tensor) -> Tensor | None:
        """Keep a sum, and return what autograd is handed."""
        if master._backward_hooks:
            return total
        if self._apart(master):
            self._of_micro_batch[master] = total
        else:
            master.grad = total
        return None

    def _apart(self, master: Tensor) -> bool:
        """Return whether the products of a master weight are summed within the micro-batch."""
        return self._in_micro_batch and any(master is other for other in self._in_chunks)

    def _add_chunks(self, master: Tensor) -> None:
        """Add what was summed within the micro-batch to the gradient of a master weight."""
        product = self._of_micro_batch.pop(master, None)
        if product is not None:
            master.grad = product if master.grad is None else master.grad.add_(product)


def matmul_product(dy: Tensor, x: QTensor | Tensor, total: Tensor | None = None) -> Tensor:
    """Return dy^T x [N, K] with FP32 sums, or add it to `total` float32 [N, K] in place."""
    values = dequantize(x)[: len(dy)] if isinstance(x, QTensor) else x
    if arithmetic_of(dy) is not None:
        values = values.bfloat16()  # dequantized codes are not exact in BF16
        if total is None:
            return torch.mm(dy.mT, values, out_dtype=torch.float32)
        torch.ops.aten.addmm.dtype_out(total, dy.mT, values, torch.float32, out=total)
        return total
    product = dy.float().mT @ values.float()
    return product if total is None else total.add_(product)


def rows_added(total: Tensor | None, rows: Tensor, values: Tensor, own: range) -> Tensor:
    """Return the gradient of a matrix's own rows after those of some tokens were added, in place.

    A GPU adds to the sum one token after the other; the CPU adds the tokens' sum, as autograd does.
    `total`, float32 [n, D], is the sum of the n own rows so far; None: zeros. `rows`, int64 [T], is
    the row of each gradient, which may be another process's.
    """
    if total is None:
        total = values.new_zeros((len(own), values.shape[1]), dtype=torch.float32)
    if not len(own):
        return total
    # Others' tokens are added as zeros, to rows here and there: the host need not wait for a count.
    inside = (rows >= own.start) & (rows < own.stop)
    places = torch.where(inside, rows - own.start, rows % len(own))
    added = torch.where(inside[:, None], values.float(), 0.0)
    if arithmetic_of(rows) is not None:
        return total.index_put_((places,), added, accumulate=True)
    dense = torch.ops.aten.embedding_dense_backward(added, places, len(own), -1, False)
    return total.add_(dense)


_AT_ONCE = 2**29  # bytes of a product that travel at one time
_IN_FLIGHT = 3  # products that travel, or are added, while backward makes the next ones


@dataclass
class _Stage:
    """A collective of every round, for the products of a linear layer or the embedding's rows.

    `master` has own rows if it is divided. `dtype` is that of products; None of embedding rows.
    `before`: the products of the same master weight, added before the rows (a tied head). `made`: a
    product, or rows and values, of this rank's micro-batch. `received`: the own rows of all ranks'
    products, which wait for the embedding's rows.
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


class OrderedGradients(Gradients):
    """The gradient sums of own rows, over all micro-batches of all ranks in order.

    `masters` are by name, of own rows if they are divided; `shards` has the division of those.
    """

    def __init__(
        self, world: World, masters: Mapping[str, nn.Parameter], shards: Mapping[str, Shard]
    ) -> None:
        super().__init__()
        self._world, self._masters = world, masters
        self._shards: dict[Tensor, Shard] = {masters[name]: shard for name, shard in shards.items()}
        self._stages: deque[_Stage] = deque()  # in the order of backward
        self._totals: dict[Tensor, Tensor] = {}
        self._begun: set[tuple[Tensor, int]] = set()  # master weight and first row of sums
        self._whole: list[nn.Parameter] = []  # whose gradients autograd makes
        self._whole_total: Tensor | None = None  # of all of these, end to end
        self._num_tokens: Sequence[int] = ()  # of the micro-batch of each rank that has one
        self._own = False  # whether this rank has one
        self._sent = 0  # how many stages of the round have travelled
        self._filling: _Stage | None = None  # whose product backward may add to
        # Tensors that another stream still reads, and the event after which it does not.
        self._travelling: deque[tuple[list[Tensor], torch.cuda.Event]] = deque()
        self._stream: torch.cuda.Stream | None = None

    def expect(self, products: Sequence[Expected], in_chunks: Sequence[Tensor]) -> None:
        """Announce products; all are summed within a micro-batch here."""
        for master, dtype in products:
            stage = _Stage(master, self._shards.get(master), dtype)
            for other in self._stages:
                if other.master is master and other.dtype is None:
                    other.before = stage
            self._stages.appendleft(stage)

    def begin_update(self) -> None:
        self._totals.clear()
        self._begun.clear()
        self._travelling.clear()
        self._whole_total = None
        expected = {stage.master for stage in self._stages}
        self._whole = [master for master in self._masters.values() if master not in expected]
        for stage in self._stages:
            stage.made = stage.received = None

    def begin_micro_batch(self, num_tokens: Sequence[int], own: bool = True) -> None:
        """Begin a round: the backward of a micro-batch of each rank."""
        self._num_tokens, self._own, self._sent, self._filling = num_tokens, own, 0, None

    def end_micro_batch(self, failed: bool = False) -> None:
        """End a round: what has not travelled so far does now."""
        self._filling = None
        rest = list(self._stages)[self._sent :]
        whole = not self._own or all(stage.made is not None for stage in rest)
        assert failed or whole, "backward gave no gradient of a master weight"
        self._send_ready(all_stages=True)
        self._add_whole()

    def end_update(self) -> None:
        while self._travelling:
            self._await_oldest()
        for master, total in self._totals.items():
            master.grad = total
        self._totals.clear()  # the optimizer's to keep, and to forget before the next rollout
        if self._whole_total is not None:
            sizes = [master.numel() for master in self._whole]
            for master, part in zip(self._whole, self._whole_total.split(sizes), strict=True):
                master.grad = part.view_as(master)

    def add(self, master: Tensor, product: Tensor) -> None:
        """Add a gradient that is there in BF16; chunks of one product are summed in FP32."""
        stage = self._stage(master)
        chunks = self._chunks(stage)
        if stage.dtype == torch.float32:
            product = product.float() if chunks is None else chunks.add_(product)
        self._made(stage, product)

    def add_matmul(self, master: Tensor, dy: Tensor, x: QTensor | Tensor) -> None:
        stage = self._stage(master)
        self._made(stage, matmul_product(dy, x, self._chunks(stage)))

    def add_rows(self, master: Tensor, rows: Tensor, values: Tensor) -> None:
        self._made(self._stage(master, rows=True), rows, values)

    def buffer(self, master: Tensor) -> tuple[Tensor, None]:
        """Return float32 zeros of the whole master weight's shape to add to in place."""
        stage = self._stage(master)
        product = self._chunks(stage)
        if product is None:
            product = torch.zeros(stage.shape, dtype=torch.float32, device=master.device)
        self._made(stage, product)
        return product, None

    def _stage(self, master: Tensor, rows: bool = False) -> _Stage:
        """Return the stage that gathers a master weight's products, or the rows added to it."""
        return next(s for s in self._stages if s.master is master and (s.dtype is None) == rows)

    def _chunks(self, stage: _Stage) -> Tensor | None:
        """Return the product that backward has begun of a stage, None if this is the first."""
        return stage.made[0] if self._filling is stage and stage.made is not None else None

    def _made(self, stage: _Stage, *tensors: Tensor) -> None:
        """Take what backward has made; an FP32 product waits, since more chunks may come."""
        for hook in (stage.master._backward_hooks or {}).values():
            hook(tensors[-1])
        stage.made = tensors
        self._filling = stage if stage.dtype == torch.float32 else None
        self._send_ready()

    def _send_ready(self, all_stages: bool = False) -> None:
        """Send what is ready, in the order of the stages; or all that is left of the round."""
        while self._sent < len(self._stages):
            stage = self._stages[self._sent]
            if not all_stages and (stage.made is None or stage is self._filling):
                return
            self._sent += 1
            self._send(stage)

    def _send(self, stage: _Stage) -> None:
        """Exchange the products of one stage, and add what arrives to own rows."""
        made, stage.made = stage.made, None
        if stage.dtype is None:
            self._send_rows(stage, made)
            return
        product = None if made is None else made[0].contiguous()
        if product is None and (self._own or stage.shard is None):
            # Others wait for what a failed backward did not make; of a whole matrix all send.
            product = torch.zeros(stage.shape, dtype=stage.dtype, device=stage.master.device)
        # The embedding's rows are added in between, when they have come too.
        waits = any(other.before is stage for other in self._stages)
        if stage.shard is None:
            assert product is not None
            received = gather_equal(product)[: len(self._num_tokens)]
            if waits:
                stage.received = received
            else:
                self._totals[stage.master] = _summed(self._totals.get(stage.master), received)
        elif waits:
            (rows,) = stage.shard.slices(stage.shard.size * stage.shard.num_rows)
            stage.received, work = self._exchange(stage, product, rows)
            if work is not None:
                work.wait()
        else:
            row_bytes = math.prod(stage.shape[1:]) * stage.dtype.itemsize
            for pieces in stage.shard.slices(max(1, _AT_ONCE // row_bytes)):
                self._exchange_and_add(stage, product, pieces)

    def _exchange(
        self, stage: _Stage, product: Tensor | None, rows: Sequence[slice]
    ) -> tuple[Tensor, Work | None]:
        """Send some rows of a product to their owners."""
        own = rows[self._world.rank]
        shape = (len(self._num_tokens), own.stop - own.start, *stage.shape[1:])
        received = torch.empty(shape, dtype=stage.dtype, device=stage.master.device)
        pieces = None if product is None else [product[piece] for piece in rows]
        return received, exchange(pieces, received)

    def _exchange_and_add(
        self, stage: _Stage, product: Tensor | None, rows: Sequence[slice]
    ) -> None:
        """Exchange some rows of a product as `_exchange` does, and add them to the sum."""
        assert stage.shard is not None, "the rows of a matrix that is divided"
        received, work = self._exchange(stage, product, rows)
        own, first = rows[self._world.rank], stage.shard.first_row
        begun = stage.master in self._totals and (stage.master, own.start) in self._begun
        if stage.master not in self._totals:
            # Made on this stream, so that its memory serves other phases too.
            self._totals[stage.master] = torch.empty_like(stage.master, dtype=torch.float32)
        self._begun.add((stage.master, own.start))
        total = self._totals[stage.master][own.start - first : own.stop - first]
        if work is None:
            _summed(total, received, begun)
            return
        # The sums are made on a stream of their own, next to the backward of the next layers.
        self._stream = self._stream or torch.cuda.Stream(stage.master.device)
        with torch.cuda.stream(self._stream):
            work.wait()
            _summed(total, received, begun)
            added = torch.cuda.Event()
            added.record()
        sent = [] if product is None else [product]
        self._travelling.append(([received, total, *sent], added))
        while len(self._travelling) > _IN_FLIGHT:
            self._await_oldest()

    def _send_rows(self, stage: _Stage, made: tuple[Tensor, ...] | None) -> None:
        """Give every rank the embedding's rows of all, and add those that this rank owns."""
        counts, device = self._num_tokens, stage.master.device
        rows = torch.zeros(max(counts), dtype=torch.int64, device=device)
        values = torch.zeros((max(counts), stage.shape[1]), dtype=torch.bfloat16, device=device)
        if made is not None:
            rows[: len(made[0])], values[: len(made[1])] = made
        all_rows, all_values = gather_equal(rows), gather_equal(values)
        before, received = stage.before, None
        if before is not None:
            received, before.received = before.received, None
        total = self._totals.get(stage.master)
        for rank, count in enumerate(counts):
            if received is not None:
                total = _summed(total, received[rank : rank + 1])
            total = rows_added(total, all_rows[rank, :count], all_values[rank, :count], stage.own)
        assert total is not None, "a round has a micro-batch"
        self._totals[stage.master] = total

    def _add_whole(self) -> None:
        """Add autograd's gradients of this round: of vectors, whole on every rank."""
        if not self._whole:
            return
        flat = torch.zeros(sum(p.numel() for p in self._whole), device=self._whole[0].device)
        gradients = [p.grad for p in self._whole if p.grad is not None]
        if len(gradients) == len(self._whole):
            torch.cat([gradient.flatten() for gradient in gradients], out=flat)
        for master in self._whole:
            master.grad = None
        gathered = gather_equal(flat)[: len(self._num_tokens)]
        self._whole_total = _summed(self._whole_total, gathered)

    def _await_oldest(self) -> None:
        """Let the current stream wait for the oldest sum, so that its tensors can be used again."""
        _, added = self._travelling.popleft()
        torch.cuda.current_stream().wait_event(added)


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
