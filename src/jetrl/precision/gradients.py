"""The sink that backward adds the gradients of master weights to.

A product of FP8 codes arrives as the BF16 that it is and is added to an FP32 sum; other products
are summed in FP32. Sums grow in the order of arrival, so the order of the micro-batches and layers
decides their bits. Of a matrix as large as the vocabulary, which tied embeddings use twice, there
is never more than the one sum: autograd would make a gradient of the same size for each use.

Norms and biases are vectors, and autograd's own sums serve them.

An update tells the sink where its micro-batches begin and end. Within one, the products of the
output head, of which there is one for every chunk of rows, are summed apart, so that a micro-batch
has one product of each matrix, whichever process makes that product: `OrderedGradients`
(ordered_gradients.py) is the sink of a run of several processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jetrl.precision.quantize import QTensor, dequantize


class Gradients:
    """The FP32 gradient sums of one model's master weights, each in its parameter's `.grad`.

    Every method that adds returns what the calling backward hands to autograd for the master
    weight. That is None, so `torch.autograd.grad` finds no gradient of a master weight. A master
    weight with a hook is the exception: autograd is handed each gradient, so that the hook sees it.
    """

    def __init__(self) -> None:
        self._in_chunks: list[Tensor] = []
        self._of_micro_batch: dict[Tensor, Tensor] = {}
        self._in_micro_batch = False

    def sum_chunks(self, master: Tensor) -> None:
        """Sum the products of a master weight within each micro-batch before they are added."""
        self._in_chunks.append(master)

    def expect(self, master: Tensor, dtype: torch.dtype | None) -> None:
        """Announce gradients of a master weight; called in the order of forward.

        Args:
            dtype: The dtype of a micro-batch's product; None for the rows of an embedding.
        """

    # What an update tells

    def begin_update(self) -> None:
        self._of_micro_batch.clear()
        self._in_micro_batch = False

    def begin_micro_batch(self, num_tokens: Sequence[int], own: bool = True) -> None:
        """Begin the backward of a micro-batch; of several processes each has one of its own.

        Args:
            num_tokens: The tokens of the micro-batch of each process that has one.
        """
        self._in_micro_batch = True

    def end_micro_batch(self, failed: bool = False) -> None:
        self._in_micro_batch = False
        for master in list(self._of_micro_batch):
            self._add_chunks(master)

    def end_update(self) -> None:
        """End the gradients of an update: `.grad` of every master weight is complete."""

    # What backward adds

    def add(self, master: Tensor, product: Tensor) -> Tensor | None:
        """Add a gradient that is there in BF16.

        Args:
            master: The master weight [N, K].
            product: bfloat16 [N, K].
        """
        total = self._sum(master)
        if product.is_cuda:
            from jetrl.precision.hopper.add import add_products

            return self._keep(master, add_products(product[None], total))
        return self._keep(master, product.float() if total is None else total.add_(product))

    def add_matmul(self, master: Tensor, dy: Tensor, x: QTensor | Tensor) -> Tensor | None:
        """Add dy^T x, with FP32 sums; on a GPU within the GEMM.

        Args:
            master: The master weight [N, K].
            dy: bfloat16 [T, N].
            x: bfloat16 [T, K], or codes, whose tokens may be padded up to whole groups.
        """
        return self._keep(master, matmul_product(dy, x, self._sum(master)))

    def add_rows(self, master: Tensor, rows: Tensor, values: Tensor) -> Tensor | None:
        """Add the gradients of some rows; on a GPU those of equal rows one after the other.

        Args:
            master: The master weight [V, D].
            rows: int64 [T], the row of each gradient.
            values: bfloat16 [T, D].
        """
        self._add_chunks(master)  # of a head that is tied to the embedding
        if master._backward_hooks:
            return rows_added(None, rows, values, range(len(master)))
        master.grad = rows_added(master.grad, rows, values, range(len(master)))
        return None

    def buffer(self, master: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return a float32 tensor like the master weight to add to in place, and autograd's part.

        The tensor is the sum itself, made of zeros where there is none, or with a hook a tensor of
        zeros, which is autograd's part as well.
        """
        total = self._sum(master)
        if total is None:
            total = torch.zeros_like(master)
        return total, self._keep(master, total)

    def _sum(self, master: Tensor) -> Tensor | None:
        """Return the sum that a product is added to, None where there is none yet."""
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


def matmul_product(dy: Tensor, x: QTensor | Tensor, total: Tensor | None) -> Tensor:
    """Return dy^T x [N, K] with FP32 sums, or total + dy^T x in the place of total.

    Args:
        dy: bfloat16 [T, N].
        x: bfloat16 [T, K], or codes, whose tokens may be padded up to whole groups.
        total: float32 [N, K], which a GPU adds to within the GEMM; or None.
    """
    values = dequantize(x)[: len(dy)] if isinstance(x, QTensor) else x
    if dy.is_cuda:
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

    Args:
        total: float32 [n, D], the sum of own rows so far; None: zeros.
        rows: int64 [T], the row of each gradient, which may be another process's.
        values: bfloat16 [T, D].
        own: The n rows of the whole matrix that `total` has.
    """
    if total is None:
        total = values.new_zeros((len(own), values.shape[1]), dtype=torch.float32)
    if not len(own):
        return total
    # Others' tokens are added as zeros, to rows here and there: the host need not wait for a count.
    inside = (rows >= own.start) & (rows < own.stop)
    places = torch.where(inside, rows - own.start, rows % len(own))
    added = torch.where(inside[:, None], values.float(), 0.0)
    if rows.is_cuda:
        return total.index_put_((places,), added, accumulate=True)
    dense = torch.ops.aten.embedding_dense_backward(added, places, len(own), -1, False)
    return total.add_(dense)
