"""Memory of a GPU that is taken away, so that a benchmark runs as on a card that has less.

The memory is allocated by the driver, beside torch's allocator and jetrl's own counts: neither can
use it, and no peak contains it.
"""

from __future__ import annotations

import torch

from jetrl.errors import UserError

_GIB = 2**30


def leave_free(gib: float | None) -> None:
    """Take memory of this process's GPU until so much is free, for as long as the process lives.

    Args:
        gib: What stays free, in GiB; None: everything.

    Raises:
        UserError: Less than that is free, or there is no GPU.
    """
    if gib is None:
        return
    if not torch.cuda.is_available():
        raise UserError(f"--leave-free {gib:g}: there is no GPU")
    torch.cuda.synchronize()  # creates the context, which takes memory itself
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    taken = free - int(gib * _GIB)
    if not gib > 0 or taken < 0:
        raise UserError(
            f"--leave-free {gib:g}: {free / _GIB:.1f} GiB are free; give a number above 0 and "
            "below that"
        )
    from cuda.bindings import driver

    status, _ = driver.cuMemAlloc(taken)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise UserError(f"--leave-free {gib:g}: the driver refused {taken} bytes: {status.name}")
