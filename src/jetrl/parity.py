"""Whether the policy that samples is the policy that trains: measured, located, proven at start.

`measure` samples and compares the sampler's log-probs with the trainer's, token by token.
`locate` runs one sequence both ways, operation by operation, and names the first that differs.
`self_check` tests the properties that the agreement rests on, each by itself, on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from jetrl.algorithm_settings import AlgorithmSettings
from jetrl.errors import UserError
from jetrl.kernels.attention import attend_packed
from jetrl.kernels.logprob import chosen_logprobs
from jetrl.kernels.norm import rms_norm
from jetrl.kernels.swiglu import swiglu
from jetrl.policy import Policy
from jetrl.precision import PrecisionPlan, quantize
from jetrl.precision.gemm import bf16_matmul, fp8_matmul
from jetrl.randomness import derive_seed
from jetrl.rollout.cache import PagedCache, Span
from jetrl.rollout.engine import ProgressCallback, RolloutEngine
from jetrl.training.mismatch import different, mismatch_metrics
from jetrl.types import SamplingParams

_PAGE_SIZE = 64
_TOKENS_AT_ONCE = 2**16


@dataclass(frozen=True)
class ParityResult:
    """The mismatch of sampled tokens.

    tokens: compared. different: whose float32 log-probs differ in any bit. mean_abs, max_abs: of
    the log-prob difference, nats. k3_kl: nats. token_mult_prob_error: mean of exp|difference|.
    first_different: the first sequence with a token that differs, as (prompt ids, completion ids);
    None if there is none."""

    tokens: int
    different: int
    mean_abs: float
    max_abs: float
    k3_kl: float
    token_mult_prob_error: float
    first_different: tuple[list[int], list[int]] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Location:
    """The first operation whose output differs.

    operation: as `layers.3.attention`. position: of the first token with a difference. values:
    elements of its output that differ, of how many; largest: the largest difference among them."""

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


@dataclass(frozen=True)
class Check:
    """One line of the self-check."""

    operation: str
    ok: bool
    detail: str


def measure(
    policy: Policy,
    prompts: Sequence[Sequence[int]] | None = None,
    num_prompts: int = 8,
    samples: int = 2,
    max_tokens: int = 64,
    temperature: float = 1.0,
    seed: int = 0,
    progress: ProgressCallback | None = None,
    max_batch_size: int = 256,
) -> ParityResult:
    """Sample completions, `max_batch_size` at a time, run the trainer's forward over all of them in
    other batches, and compare. Without prompts, random ones of mixed lengths are taken."""
    if prompts is None:
        prompts = random_prompts(policy, num_prompts, max_tokens, seed)
    params = SamplingParams(
        n=samples, max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=True
    )
    completions = RolloutEngine(policy, max_batch_size=max_batch_size).generate(
        prompts, params, progress
    )
    pairs = [
        (list(prompts[i // samples]), list(completion.token_ids))
        for i, completion in enumerate(completions)
    ]
    rollout = [np.array(c.logprobs, dtype=np.float32) for c in completions]
    trainer = _trainer_logprobs(policy, pairs, temperature or 1.0)
    metrics = mismatch_metrics(np.concatenate(trainer), np.concatenate(rollout))
    first = next(
        (p for p, a, b in zip(pairs, trainer, rollout, strict=True) if different(a, b).any()), None
    )
    return ParityResult(
        tokens=int(metrics["mismatch/num_tokens"]),
        different=int(metrics["mismatch/num_different"]),
        mean_abs=metrics["mismatch/mean_abs_logprob_diff"],
        max_abs=metrics["mismatch/max_abs_logprob_diff"],
        k3_kl=metrics["mismatch/k3_kl"],
        token_mult_prob_error=metrics["mismatch/token_mult_prob_error"],
        first_different=first,
    )


def check_correction(algorithm: AlgorithmSettings, policy: Policy) -> None:
    """Refuses a correction of a mismatch that is not there, with the mismatch as measured here.

    Raises:
        UserError: a correction under an exact plan that was not asked for by name.
    """
    wanted = algorithm.correction
    if wanted == "none" or not policy.plan.exact or algorithm.correction_under_exact_plan:
        return
    found = measure(policy, num_prompts=4, samples=2, max_tokens=16)
    raise UserError(
        f"algorithm.correction = {wanted} corrects nothing under the exact plan "
        f"{policy.plan.name!r}: {found.different} of {found.tokens} tokens sampled just now differ "
        f"from the trainer's (largest difference {found.max_abs:.3g} nats), so that every weight "
        "is 1, and each step checks all of its tokens. Leave it out, or set "
        "algorithm.correction_under_exact_plan=true"
    )


def random_prompts(policy: Policy, count: int, max_tokens: int, seed: int) -> list[list[int]]:
    """`count` prompts of random tokens, between 1 token and half of what the context leaves."""
    generator = np.random.Generator(np.random.Philox(derive_seed("parity", seed)))
    room = max(2, (policy.config.max_position_embeddings - max_tokens) // 2)
    lengths = generator.integers(1, min(room, 256), size=count)
    return [generator.integers(0, policy.config.vocab_size, n).tolist() for n in lengths]


@torch.no_grad()
def _trainer_logprobs(
    policy: Policy, pairs: Sequence[tuple[list[int], list[int]]], temperature: float
) -> list[np.ndarray]:
    """float32 of each completion's tokens, from packed forwards of bounded size."""
    found: list[np.ndarray] = []
    batch: list[list[int]] = []
    for index, (prompt, answer) in enumerate(pairs):
        batch.append(prompt + answer)
        if index + 1 == len(pairs) or sum(map(len, batch)) >= _TOKENS_AT_ONCE:
            found += [row.cpu().numpy() for row in policy.logprobs(batch, temperature)]
            batch = []
    return [row[len(prompt) - 1 :] for (prompt, _), row in zip(pairs, found, strict=True)]


@torch.no_grad()
def locate(policy: Policy, prompt: Sequence[int], completion: Sequence[int]) -> Location | None:
    """Run one sequence as the sampler did (prefill of the prompt, then token by token over a paged
    cache) and as the trainer does, and compare every operation's output in order.

    Returns None when none differs: what differed then depended on the rest of the batch.
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
        _replay(policy, tokens, len(prompt))
    finally:
        decoder.trace = None
    for name, ours in trainer.outputs():
        theirs = rollout.output(name)
        rows = min(len(ours), len(theirs))  # the sampler never runs the last token
        found = _compare(ours[:rows], theirs[:rows])
        if found is not None:
            row, values, largest = found
            position = row + (len(prompt) - 1 if name == "lm_head" else 0)
            return Location(name, position, values, ours[row].numel(), largest)
    return None


class _Recorder:
    """A trace of the decoder that keeps every output."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Tensor]] = {}

    def __call__(self, name: str, value: Tensor) -> None:
        self._parts.setdefault(name, []).append(value.detach().clone())

    def outputs(self) -> list[tuple[str, Tensor]]:
        return [(name, torch.cat(parts)) for name, parts in self._parts.items()]

    def output(self, name: str) -> Tensor:
        return torch.cat(self._parts[name])


def _replay(policy: Policy, tokens: Tensor, prompt_length: int) -> None:
    """The sampler's forwards of a sequence whose tokens are given."""
    pages = list(range(-(-len(tokens) // _PAGE_SIZE)))
    cache = PagedCache(policy.config, policy.plan, len(pages), _PAGE_SIZE, policy.device)
    starts = [0, *range(prompt_length, len(tokens) - 1)]
    for start, end in zip(starts, [*starts[1:], len(tokens) - 1], strict=True):
        positions = torch.arange(start, end, device=policy.device)
        kv = cache.key_values([Span(0, start, end - start, pages)])
        hidden = policy.rollout_forward(tokens[start:end], positions, kv)
        policy.rollout_logits(hidden[-1:])


def _compare(a: Tensor, b: Tensor) -> tuple[int, int, float] | None:
    """(first row that differs in any bit, values of it that do, largest difference) or None."""
    a, b = a.float().flatten(1), b.float().flatten(1)
    unequal = (a.view(torch.int32) != b.view(torch.int32)).cpu()
    rows = unequal.any(1).nonzero().flatten()
    if not len(rows):
        return None
    row = int(rows[0])
    return row, int(unequal[row].sum()), float((a[row] - b[row]).abs().max())


def self_check(device: str | torch.device = "cpu") -> list[Check]:
    """Each property that exactness rests on, tested by itself: a row's bits do not depend on the
    batch, the quantizer divides as IEEE says, and a tiny model samples what it trains."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().to(device)

    x, weight, bf16_weight = (
        normal(70, 256),
        quantize(normal(128, 256), (128, 128)),
        normal(96, 256),
    )
    cu = torch.tensor([0, 30, 70], device=device)
    q, k, v = normal(70, 4, 64), normal(70, 2, 64), normal(70, 2, 64)
    logits, chosen = normal(70, 999).float() * 4, torch.arange(70, device=device)
    norm_weight = normal(256)
    by_rows: dict[str, Callable[[slice], Tensor]] = {
        "FP8 GEMM": lambda s: fp8_matmul(quantize(x[s]), weight, torch.float32),
        "BF16 GEMM": lambda s: bf16_matmul(x[s], bf16_weight, torch.float32),
        "RMSNorm": lambda s: rms_norm(x[s], norm_weight, 1e-6),
        "SwiGLU": lambda s: swiglu(x[s]),
        "log-probs": lambda s: chosen_logprobs(logits[s], chosen[s], 0.7)[0],
    }
    checks = [_quantizer_check(device)]
    for name, operation in by_rows.items():
        whole = operation(slice(None))
        parts = [(s, operation(s)) for s in (slice(0, 1), slice(3, 10), slice(5, 69))]
        bad = [s for s, part in parts if not torch.equal(part, whole[s])]
        detail = f"rows {bad[0].start}-{bad[0].stop} differ" if bad else "same bits in any batch"
        checks.append(Check(name, not bad, detail))
    together = attend_packed(q, k, v, cu, "fp8")
    alone = attend_packed(q[30:], k[30:], v[30:], cu[1:] - 30, "fp8")
    same = torch.equal(together[30:], alone)
    checks.append(Check("attention", same, "same bits in any batch" if same else "rows differ"))
    return [*checks, *(_flow_check(name, device) for name in ("jet", "unified"))]


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
        "intermediate_size": 256,
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
    detail = f"{result.different} of {result.tokens} sampled tokens differ"
    if result.first_different is not None:
        detail += f"; {locate(policy, *result.first_different) or 'no operation differs alone'}"
    return Check(f"flow {preset}", result.different == 0, detail)
