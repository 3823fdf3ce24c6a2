"""Log-probs over a 152k vocabulary, from hidden states, and sampling."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from benchmarks._bits import logprobs
from benchmarks._timing import Row, memory_row, report, seconds_eager
from torch import Tensor

from jetrl.kernels.logprob_hopper import chosen_logprobs, lm_head_logprobs
from jetrl.kernels.sampling_hopper import sample
from jetrl.precision.gradients import Gradients
from jetrl.precision.hopper.gemm import bf16_matmul_hopper

HIDDEN, VOCABULARY = 4096, 151936


def _head_rows(rows: int) -> list[Row]:
    hidden = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
    master = torch.randn(VOCABULARY, HIDDEN, device="cuda") * 0.02
    weight = master.bfloat16()
    chosen = torch.randint(0, VOCABULARY, (rows,), device="cuda")
    flops = 2 * rows * HIDDEN * VOCABULARY
    upstream = torch.ones(rows, device="cuda")

    def matmul() -> Tensor:
        return torch.mm(hidden[:4096], weight.t())

    def backward() -> Any:
        h, m = hidden.detach().requires_grad_(), master.detach().requires_grad_()
        logprobs, _ = lm_head_logprobs(h, m, weight, chosen, 1.0, gradients=Gradients())
        logprobs.backward(upstream)
        return h.grad, m.grad

    @torch.no_grad()
    def forward() -> Any:
        return lm_head_logprobs(hidden, master, weight, chosen, 1.0, gradients=Gradients())

    limit = 2 * 4096 * HIDDEN * VOCABULARY / seconds_eager(matmul)
    out = []
    for name, function, gemms in (("forward", forward, 1), ("forward and backward", backward, 3)):
        seconds = seconds_eager(function)
        out.append(
            {
                "name": f"head log-probs, {name}",
                "shape": f"{rows} x {HIDDEN} x {VOCABULARY}",
                "microseconds": round(seconds * 1e6),
                "teraflops": round(gemms * flops / seconds / 1e12),
                "share_of_bf16_matmul": round(gemms * flops / seconds / limit, 3),
            }
        )
    return out


def _row_kernels() -> list[Row]:
    out = []
    with torch.no_grad():
        for rows in (8, 64, 256, 2048):
            logits = [torch.randn(rows, VOCABULARY, device="cuda") * 3 for _ in range(2)]
            chosen = torch.randint(0, VOCABULARY, (rows,), device="cuda")
            shape, size = f"{rows} x {VOCABULARY}", 4 * rows * VOCABULARY
            calls = [partial(chosen_logprobs, x, chosen, 1.0) for x in logits]
            out.append(memory_row("log-probs of logits", shape, size, calls))
            if rows > 256:
                continue
            bits = torch.randint(0, 2**53, (rows,), device="cuda")
            one, none = torch.ones(rows, device="cuda"), torch.zeros_like(chosen)
            draws = [partial(sample, x, bits, one, one, none, False) for x in logits]
            out.append(memory_row("sample", shape, size, draws))
            hidden = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
            head = torch.randn(VOCABULARY, HIDDEN, device="cuda").bfloat16()
            call = [partial(bf16_matmul_hopper, hidden, head, torch.float32)]
            moved = 2 * VOCABULARY * HIDDEN + size
            out.append(memory_row("lm_head, fp32 logits", shape, moved, call))
    return out


def run(rows: int = 16384) -> list[Row]:
    """Return rows for the head over `rows` hidden states, and for row kernels at decode sizes."""
    return [*_row_kernels(), *_head_rows(rows)]


def main(argv: Sequence[str] | None = None) -> None:
    """Run `jetrl bench logprob`."""
    report("logprob", run, argv, logprobs)


if __name__ == "__main__":
    main()
