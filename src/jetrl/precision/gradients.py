"""The sink that backward adds the gradients of master weights to.

A product of FP8 codes arrives as the BF16 that it is and is added to an FP32 sum; other products
are summed in FP32. Sums grow in the order of arrival, so the order of the micro-batches and layers
decides their bits. Of a matrix as large as the vocabulary, which tied embeddings use twice, there
is never more than the one sum: autograd would make a gradient of the same size for each use.

Norms and biases are vectors, and autograd's own sums serve them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.precision.quantize import QTensor, dequantize


class Gradients:
    """The FP32 gradient sums of one model's master weights, each in its parameter's `.grad`.

    Every method that adds returns what the calling backward hands to autograd for the master
    weight. That is None, so `torch.autograd.grad` finds no gradient of a master weight. A master
    weight with a hook is the exception: autograd is handed each gradient, so that the hook sees it.
    """

    def add(self, master: Tensor, product: Tensor) -> Tensor | None:
        """Add a gradient that is there in BF16.

        Args:
            master: The master weight [N, K].
            product: bfloat16 [N, K].
        """
        total = None if master._backward_hooks else master.grad
        if product.is_cuda:
            from jetrl.precision.hopper.add import add_product

            return self._keep(master, add_product(product, total))
        return self._keep(master, product.float() if total is None else total.add_(product))

    def add_matmul(self, master: Tensor, dy: Tensor, x: QTensor | Tensor) -> Tensor | None:
        """Add dy^T x, with FP32 sums; on a GPU within the GEMM.

        Args:
            master: The master weight [N, K].
            dy: bfloat16 [T, N].
            x: bfloat16 [T, K], or codes, whose tokens may be padded up to whole groups.
        """
        total = None if master._backward_hooks else master.grad
        values = dequantize(x)[: len(dy)] if isinstance(x, QTensor) else x
        if dy.is_cuda:
            values = values.bfloat16()  # dequantized codes are not exact in BF16
            if total is None:
                return self._keep(master, torch.mm(dy.mT, values, out_dtype=torch.float32))
            torch.ops.aten.addmm.dtype_out(total, dy.mT, values, torch.float32, out=total)
            return None
        product = dy.float().mT @ values.float()
        return self._keep(master, product if total is None else total.add_(product))

    def add_rows(self, master: Tensor, rows: Tensor, values: Tensor) -> Tensor | None:
        """Add the gradients of some rows; those of equal rows one after the other.

        Args:
            master: The master weight [V, D].
            rows: int64 [T], the row of each gradient.
            values: bfloat16 [T, D].
        """
        total, for_autograd = self.buffer(master)
        total.index_put_((rows,), values.float(), accumulate=True)
        return for_autograd

    def buffer(self, master: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return a float32 tensor like the master weight to add to in place, and autograd's part.

        The tensor is the sum itself, made of zeros where there is none, or with a hook a tensor of
        zeros, which is autograd's part as well.
        """
        if master._backward_hooks:
            zeros = torch.zeros_like(master)
            return zeros, zeros
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        return master.grad, None

    def _keep(self, master: Tensor, total: Tensor) -> Tensor | None:
        if master._backward_hooks:
            return total
        master.grad = total
        return None
