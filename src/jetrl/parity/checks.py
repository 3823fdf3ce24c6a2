"""Proofs at start: the properties exactness rests on, and the promise for a run's own shapes."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from jetrl.errors import MismatchError
from jetrl.kernels.logprob import chosen_logprobs
from jetrl.kernels.norm import rms_norm
from jetrl.kernels.rotary import rotary_table
from jetrl.models.attention import PackedKeyValues
from jetrl.models.block import DenseShape
from jetrl.models.dense import DenseBlock
from jetrl.models.layer import Rotary
from jetrl.models.packed import token_positions
from jetrl.models.policy import Policy
from jetrl.parity.locating import located
from jetrl.parity.measuring import ParityResult, measure
from jetrl.precision import PrecisionPlan, quantize
from jetrl.precision.adapter import AdapterShape, AdapterWeight, add_adapter
from jetrl.precision.gemm import bf16_matmul, fp8_matmul
from jetrl.precision.linear import Linear
from jetrl.presets import PRESETS
from jetrl.randomness import derive_seed

# Rows of a batch that are computed alone and must have the bits of the whole batch.
_SLICES = (slice(0, 1), slice(3, 10), slice(5, 69))
_ROWS = 1000
_SILENT_S = 5.0
_COMPILING = (
    "proving on this GPU that sampling and training agree; kernels that are in no cache yet are "
    "compiled first, which takes about a minute once"
)


@dataclass(frozen=True)
class Check:
    """The result of testing one property that exactness rests on.

    Attributes:
        ok: True if the property holds.
    """

    operation: str
    ok: bool
    detail: str


def failures(checks: Sequence[Check]) -> list[str]:
    """Return the checks that failed, in words."""
    return [f"{check.operation}: {check.detail}" for check in checks if not check.ok]


def require_exact(policy: Policy) -> float | None:
    """Prove an exact plan's promise on this GPU before a run relies on it, by `check_policy`.

    On the CPU there is nothing to prove: its references are exact by construction.

    Returns:
        The seconds that the proof took; None where nothing is promised, or nothing to prove.

    Raises:
        MismatchError: The promise is broken; the message names the operations.
    """
    if not policy.plan.exact or policy.device.type != "cuda":
        return None
    began = time.monotonic()
    with said_when_slow():
        broken = failures(check_policy(policy))
    if broken:
        raise MismatchError(
            f"this GPU does not keep what the {policy.plan.name} plan promises for this model: "
            + "; ".join(broken)
            + ". Please report it with `jetrl doctor --json`; precision.preset=bf16 promises "
            "nothing and runs"
        )
    return time.monotonic() - began


@contextlib.contextmanager
def said_when_slow() -> Iterator[None]:
    """Print on stderr, after a while, what a proof on a GPU is waiting for."""
    timer = threading.Timer(_SILENT_S, print, [_COMPILING], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@torch.no_grad()
def check_policy(policy: Policy) -> list[Check]:
    """Test an exact plan's promise on the first two layers of a policy, with its own weights.

    Every linear has to give a row the same bits at any number of rows, and the log-probs of sampled
    tokens (short and long contexts, large and small batches) have to be those of the training
    forward, with gradients as in a step.
    """
    small = policy.first_layers(min(2, policy.config.num_layers))
    linears = [m for m in small.decoder.layers[0].modules() if isinstance(m, Linear)]
    checks = [_rows_check(linear, policy.device) for linear in [*linears, small.decoder.lm_head]]
    generator = np.random.Generator(np.random.Philox(derive_seed("check", 0)))
    room = policy.config.max_position_embeddings - 24
    lengths = [n for n in (1, 5, 63, 64, 65, 130, 300, 2100) if n < room]
    prompts = [generator.integers(0, policy.config.vocab_size, n).tolist() for n in lengths]
    for batch in (64, 3):
        result = measure(
            small, prompts, samples=2, max_tokens=24, max_batch_size=batch, gradients=True
        )
        checks.append(_flow_result(f"sampling, {batch} sequences at a time", small, result))
    return checks


def _rows_check(linear: Linear, device: torch.device) -> Check:
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(_ROWS, linear.weight.shape[1], generator=generator, device=device).bfloat16()
    whole = linear(x, "train")
    rows = (*_SLICES, slice(0, 256))
    return _batch_check(linear.name, lambda s: linear(x[s], "rollout"), whole, rows)


def _batch_check(
    name: str,
    operation: Callable[[slice], Tensor],
    whole: Tensor,
    rows: Sequence[slice] = _SLICES,
) -> Check:
    """Check that an operation gives rows alone the bits that they have in the whole batch."""
    bad = [s for s in rows if not torch.equal(operation(s), whole[s])]
    detail = f"rows {bad[0].start}-{bad[0].stop} differ" if bad else "same bits in any batch"
    return Check(name, not bad, detail)


def _flow_result(name: str, policy: Policy, result: ParityResult) -> Check:
    detail = f"{result.different} of {result.tokens} sampled tokens differ"
    if result.first_different is not None:
        detail += f"; {located(policy, *result.first_different)}"
    return Check(name, result.different == 0, detail)


def self_check(device: str | torch.device = "cpu") -> list[Check]:
    """Test each property that exactness rests on by itself.

    A row's bits do not depend on the batch, the quantizer divides as IEEE says, and the sampler of
    a tiny model gives the log-probs of its trainer.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().to(device)

    x, weight, bf16_weight = (
        normal(70, 256),
        quantize(normal(128, 256), (128, 128)),
        normal(96, 256),
    )
    cu = torch.tensor([0, 30, 70], device=device)
    qkv = normal(70, (4 + 2 + 2) * 64)
    logits, chosen = normal(70, 999).float() * 4, torch.arange(70, device=device)
    norm_weight, product = normal(256), normal(70, 96)
    shape = AdapterShape(8, 1.0, num_rows=96, num_columns=256, parts=((0, 96),))
    a, b = (nn.Parameter(normal(*size).float()) for size in (shape.a_shape, shape.b_shape))
    adapter = AdapterWeight("adapter", a, b, shape, torch.bfloat16)

    def of_rows(operation: Callable[[Tensor], Tensor]) -> Callable[[slice], Tensor]:
        return lambda s: operation(x[s])

    by_rows: dict[str, Callable[[slice], Tensor]] = {
        "FP8 GEMM": lambda s: fp8_matmul(quantize(x[s]), weight, torch.float32),
        "BF16 GEMM": lambda s: bf16_matmul(x[s], bf16_weight, torch.float32),
        "adapter": lambda s: add_adapter(product[s].clone(), x[s], adapter),
        "RMSNorm": lambda s: rms_norm(x[s], norm_weight, 1e-6),
        **{name: of_rows(operation) for name, operation in DenseBlock.self_checks.items()},
        "log-probs": lambda s: chosen_logprobs(logits[s], chosen[s], 0.7)[0],
    }
    checks = [_quantizer_check(device)]
    for name, operation in by_rows.items():
        checks.append(_batch_check(name, operation, operation(slice(None))))
    same = torch.equal(_attended(qkv, cu)[30:], _attended(qkv[30:], cu[1:] - 30))
    checks.append(Check("attention", same, "same bits in any batch" if same else "rows differ"))
    exact = (name for name in PRESETS if PrecisionPlan.preset(name).exact)
    return [*checks, *(_flow_check(name, device) for name in exact)]


def _attended(qkv: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return what the trainer's attention gives for a packed batch with FP8 keys and values."""
    table = rotary_table(1e4 ** (-np.arange(32) / 32), len(qkv)).to(qkv.device)
    rope = Rotary(token_positions(cu_seqlens), table, None, num_heads=4, num_kv_heads=2)
    kv = PackedKeyValues(cu_seqlens, PrecisionPlan.preset("unified"))
    return kv.attend(0, qkv, rope, last=False)


def _quantizer_check(device: str | torch.device) -> Check:
    x = (torch.randn(64, 128, generator=torch.Generator().manual_seed(1)) * 1e-3).to(device)
    q, values = quantize(x), x.cpu().numpy()
    scales = np.abs(values).max(1, keepdims=True) / np.float32(torch.finfo(q.codes.dtype).max)
    ok = bool(np.array_equal(q.scales.cpu().numpy(), scales))
    return Check("quantizer", ok, "IEEE division" if ok else "scales are not the IEEE quotient")


def _flow_check(preset: str, device: str | torch.device) -> Check:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 256,
        "hidden_size": 128,
        **DenseShape(256).to_hf(),
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }
    policy = Policy.from_config(config, PrecisionPlan.preset(preset), seed=0, device=device)
    result = measure(policy, num_prompts=6, samples=2, max_tokens=16)
    return _flow_result(f"flow {preset}", policy, result)
