"""Bit-for-bit comparison of the sampling and the training policy.

`measure` compares log-probs token by token; `locate` names the first operation that differs.
`self_check` tests the properties that bitwise consistency rests on, `check_policy` a run's own
shapes.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from jetrl.errors import MismatchError
from jetrl.kernels.logprob import chosen_logprobs
from jetrl.kernels.norm import rms_norm
from jetrl.models.decoder import BLOCKS
from jetrl.models.families import FAMILIES
from jetrl.models.policy import Policy
from jetrl.precision import PrecisionPlan, quantize
from jetrl.precision.adapter import add_adapter
from jetrl.precision.adapter_weight import AdapterShape, AdapterWeight
from jetrl.precision.backend import Backend, backend_for, has_kernels, selected_backend
from jetrl.precision.formats import FP8, number_format
from jetrl.precision.gemm import bf16_matmul, fp8_matmul
from jetrl.precision.int8 import int8_matmul, int8_rows
from jetrl.precision.linear import Linear
from jetrl.randomness import derive_seed
from jetrl.rollout.decode import DecodeBatch
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.kv_cache import PagedCache
from jetrl.rollout.pages import PageAllocator
from jetrl.rollout.prefill import Prefill
from jetrl.rollout.scheduler import Scheduler
from jetrl.rollout.sequence import RunningSequence
from jetrl.rollout.stopping import StopRules
from jetrl.runs.console import announced_if_slow
from jetrl.settings.presets import DEFAULT_PRESET, PRESETS
from jetrl.training.micro_batches import batch_logprobs
from jetrl.training.mismatch import different, mismatch_metrics
from jetrl.training.packing import pack_examples
from jetrl.types import Example, PromptInputs, SamplingParams

_TOKENS_AT_ONCE = 2**16  # tokens per trainer forward


@dataclass(frozen=True)
class ParityResult:
    """Mismatch over sampled tokens; `different` counts tokens whose float32 log-prob bits differ.

    `k3_kl` is the K3 estimate of the KL divergence, in nats. `first_different` is the first
    sequence that differs, as (prompt ids, completion ids).
    """

    tokens: int
    different: int
    mean_abs: float
    max_abs: float
    k3_kl: float
    token_mult_prob_error: float
    first_different: tuple[list[int], list[int]] | None = field(default=None, repr=False)


def measure(
    policy: Policy,
    prompts: Sequence[Sequence[int]] | None = None,
    num_prompts: int = 8,
    samples: int = 2,
    max_tokens: int = 64,
    temperature: float = 1.0,
    seed: int = 0,
    max_batch_size: int = 256,
    gradients: bool = False,
) -> ParityResult:
    """Sample completions, and compare their log-probs with the trainer's in other batches.

    Without `prompts` (token ids), random ones of mixed lengths are used. Completions have exactly
    `max_tokens`: end-of-sequence tokens are ignored. With `gradients`, the trainer runs the kernels
    of a training step.
    """
    if prompts is None:
        prompts = random_prompts(policy, num_prompts, max_tokens, seed)
    params = SamplingParams(
        n=samples, max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=True
    )
    engine = RolloutEngine(policy, max_batch_size=max_batch_size)
    completions = engine.generate(prompts, params)
    pairs = [(list(prompts[i // samples]), list(c.token_ids)) for i, c in enumerate(completions)]
    rollout = [np.array(c.logprobs, dtype=np.float32) for c in completions]
    trainer = _trainer_logprobs(policy, pairs, temperature or 1.0, gradients)
    metrics = mismatch_metrics(np.concatenate(trainer), np.concatenate(rollout))
    differ = (p for p, a, b in zip(pairs, trainer, rollout, strict=True) if different(a, b).any())
    return ParityResult(
        tokens=int(metrics["mismatch/num_tokens"]),
        different=int(metrics["mismatch/num_different"]),
        mean_abs=metrics["mismatch/mean_abs_logprob_diff"],
        max_abs=metrics["mismatch/max_abs_logprob_diff"],
        k3_kl=metrics["mismatch/k3_kl"],
        token_mult_prob_error=metrics["mismatch/token_mult_prob_error"],
        first_different=next(differ, None),
    )


def random_prompts(policy: Policy, count: int, max_tokens: int, seed: int) -> list[list[int]]:
    """Return random-token prompts of 1 token to half of the context left by completions."""
    generator = np.random.Generator(np.random.Philox(derive_seed("parity", seed)))
    room = max(2, (policy.config.max_position_embeddings - max_tokens) // 2)
    lengths = generator.integers(1, min(room, 256), size=count)
    ids = np.setdiff1d(np.arange(policy.config.vocab_size), [*policy.config.place_tokens])
    return [ids[generator.integers(0, len(ids), n)].tolist() for n in lengths]


def _trainer_logprobs(
    policy: Policy,
    pairs: Sequence[tuple[list[int], list[int]]],
    temperature: float,
    gradients: bool,
) -> list[np.ndarray]:
    """Return the trainer's float32 log-probs of each completion, in forwards of bounded size."""
    whole: list[np.ndarray] = []
    batch: list[list[int]] = []
    for index, (prompt, answer) in enumerate(pairs):
        batch.append(prompt + answer)
        if index + 1 == len(pairs) or sum(map(len, batch)) >= _TOKENS_AT_ONCE:
            with torch.set_grad_enabled(gradients):
                rows = policy.logprobs(batch, temperature)
            whole += [row.detach().cpu().numpy() for row in rows]
            batch = []
    return [row[len(prompt) - 1 :] for (prompt, _), row in zip(pairs, whole, strict=True)]


_PAGE_SIZE = 64  # tokens


@dataclass(frozen=True)
class Location:
    """The first operation, such as `layers.3.attention`, whose output differs."""

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


@torch.no_grad()
def locate(
    policy: Policy, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0
) -> Location | None:
    """Run one sequence as sampler and as trainer; return the first operation that differs.

    The sampler runs prefill, then decodes token by token with the engine's classes. Returns None if
    no operation differs: the mismatch then depends on the batch. A prompt with images is a
    PromptInputs. A temperature of 0 is greedy, with log-probs at temperature 1.
    """
    inputs = prompt if isinstance(prompt, PromptInputs) else PromptInputs(tuple(prompt))
    length = len(inputs) + len(completion)
    example = Example(inputs.token_ids, completion, images=inputs.images)
    (batch,) = pack_examples([example], length)
    # With gradients, the kernels of a training step run.
    with _recorded(policy) as made, torch.enable_grad():
        batch_logprobs(policy, batch)
    trainer = {name: torch.cat(values) for name, values in made.items()}
    # Compare the log-probs of the tokens that the sampler drew.
    with _recorded(policy) as made:
        drawn, logprobs = _replay(policy, inputs, completion, temperature)
    rollout = {name: torch.cat(values) for name, values in made.items()}
    expected, _ = chosen_logprobs(trainer["lm_head"], drawn, temperature or 1.0)
    trainer["log-probs"], rollout["log-probs"] = expected[:, None], logprobs[:, None]
    for name, ours in trainer.items():
        theirs = rollout[name]
        # The sampler's last layer outputs only a prompt's last token, as does lm_head on both
        # sides.
        first = len(prompt) - 1 if len(theirs) == len(completion) else 0
        ours = ours[first:] if len(ours) == length else ours
        rows = min(len(ours), len(theirs))  # the sampler never runs the last token
        a, b = ours[:rows].float().flatten(1), theirs[:rows].float().flatten(1)
        unequal = (a.view(torch.int32) != b.view(torch.int32)).cpu()
        if unequal.any():
            row = int(unequal.any(1).nonzero()[0])
            largest = float((a[row] - b[row]).abs().max())
            return Location(name, first + row, int(unequal[row].sum()), ours[row].numel(), largest)
    return None


def located(
    policy: Policy, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0
) -> str:
    """Describe the first operation that differs; the completion has at least one token."""
    alone = "no operation differs for this sequence alone, so the mismatch depends on the batch"
    return str(locate(policy, prompt, completion, temperature) or alone)


@contextlib.contextmanager
def _recorded(policy: Policy) -> Iterator[dict[str, list[Tensor]]]:
    """Record every decoder output within the context, by operation name."""
    made: dict[str, list[Tensor]] = defaultdict(list)
    try:
        policy.decoder.trace = lambda name, value: made[name].append(value.detach().clone())
        yield made
    finally:
        policy.decoder.trace = None


def _replay(
    policy: Policy, prompt: PromptInputs, completion: Sequence[int], temperature: float
) -> tuple[Tensor, Tensor]:
    """Run the sampler's forwards on a sequence with given tokens."""
    # The cache holds only this sequence; the scheduler runs nothing else.
    params = SamplingParams(max_tokens=len(completion), temperature=temperature)
    sequence = RunningSequence(0, prompt, 0, StopRules(len(completion)), params=params)
    allocator = PageAllocator(-(-sequence.max_cached_tokens // _PAGE_SIZE), _PAGE_SIZE)
    scheduler = Scheduler(allocator, 1, len(prompt))
    scheduler.add([sequence])
    cache = PagedCache(policy.config, policy.plan, allocator.num_pages, _PAGE_SIZE, policy.device)
    prefill = Prefill(policy, cache)
    decode = DecodeBatch(policy, cache, 1, len(prompt) + len(completion))
    drawn: list[int] = []
    logprobs: list[float] = []
    for token in completion:
        step = scheduler.schedule()
        assert step is not None, "a single sequence waits for nothing"
        if step.decodes:
            decode.begin()  # the sampled token is replaced below
            ((ids, values),) = decode.launch(step, scheduler.sequences).drawn()
        else:
            logits = prefill.forward(step, scheduler.sequences)
            ids, values = (x.tolist() for x in prefill.draw(logits, step, [sequence]))
        drawn += ids
        logprobs += values
        scheduler.complete(step, [([token], values)])
    device = policy.device
    tokens = torch.tensor(drawn, device=device).clamp(min=0)  # negative if logits were not finite
    return tokens, torch.tensor(logprobs, device=device)


# Slices of a batch whose results must equal those of the whole batch bit for bit.
_SLICES = (slice(0, 1), slice(3, 10), slice(5, 69))
_ROWS = 1000
PROVING = (
    "checking on this GPU that sampling and training agree; kernels that are not cached yet are "
    "compiled first, which takes about a minute once"
)


@dataclass(frozen=True)
class Check:
    """Result of testing one property that bitwise consistency rests on."""

    operation: str
    ok: bool
    detail: str


def failures(checks: Sequence[Check]) -> list[str]:
    """Return the failed checks as text."""
    return [f"{check.operation}: {check.detail}" for check in checks if not check.ok]


def require_exact(policy: Policy) -> float | None:
    """Check on this GPU that an exact plan is bitwise consistent for a policy (`check_policy`).

    Returns the duration in seconds; None on the CPU or if the plan is not exact.
    """
    if not policy.plan.exact or not has_kernels(policy.device):
        return None
    began = time.monotonic()
    with announced_if_slow(PROVING):
        broken = failures(check_policy(policy))
    if broken:
        raise MismatchError(
            f"on this GPU, plan {policy.plan.name} is not bitwise consistent for this model: "
            f"{'; '.join(broken)}. Please report it with `jetrl doctor --json`; "
            "precision.preset=bf16 is not exact, and runs"
        )
    return time.monotonic() - began


@torch.no_grad()
def check_policy(policy: Policy) -> list[Check]:
    """Check bitwise consistency on the first two layers of a policy, with its own weights.

    The bits of a linear layer's output row must not depend on the number of rows. Sampled tokens
    (short and long contexts, large and small batches) must have the log-probs of a training
    forward.
    """
    kinds = policy.config.layers_of_all_kinds
    small = policy.first_layers(min(max(2, kinds), policy.config.num_layers))
    linears = [m for m in small.decoder.layers[:kinds].modules() if isinstance(m, Linear)]
    checks = [_rows_check(linear, policy.device) for linear in [*linears, small.decoder.lm_head]]
    # Lengths around a page boundary; full and nearly empty batches.
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
    name: str, operation: Callable[[slice], Tensor], whole: Tensor, rows: Sequence[slice] = _SLICES
) -> Check:
    bad = [s for s in rows if not torch.equal(operation(s), whole[s])]
    detail = f"rows {bad[0].start}-{bad[0].stop} differ" if bad else "same bits in any batch"
    return Check(name, not bad, detail)


def _flow_result(name: str, policy: Policy, result: ParityResult) -> Check:
    detail = f"{result.different} of {result.tokens} sampled tokens differ"
    if result.first_different is not None:
        prompt, completion = result.first_different
        detail += f"; {located(policy, prompt, completion)}"
    return Check(name, result.different == 0, detail)


def self_check(device: str | torch.device = "cpu") -> list[Check]:
    """Test that a row's bits are batch-invariant, and that sampler and trainer agree."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().to(device)

    def of_rows(operation: Callable[[Tensor], Tensor]) -> Callable[[slice], Tensor]:
        return lambda s: operation(x[s])

    x, weight = normal(70, 256), quantize(normal(128, 256), (128, 128))
    bf16_weight = normal(96, 256)
    logits, chosen = normal(70, 999).float() * 4, torch.arange(70, device=device)
    norm_weight, product = normal(256), normal(70, 96)
    shape = AdapterShape(8, 1.0, num_rows=96, num_columns=256, parts=((0, 96),))
    a, b = (nn.Parameter(normal(*size).float()) for size in (shape.a_shape, shape.b_shape))
    adapter = AdapterWeight("adapter", a, b, shape, torch.bfloat16)
    integers = int8_rows(normal(96, 256))
    backend = backend_for(torch.device(device))
    by_rows: dict[str, Callable[[slice], Tensor]] = {
        "INT8 GEMM": lambda s: int8_matmul(int8_rows(x[s]), integers, torch.float32),
        "BF16 GEMM": lambda s: bf16_matmul(x[s], bf16_weight, torch.float32),
        "RMSNorm": lambda s: rms_norm(x[s], norm_weight, 1e-6),
        **{name: of_rows(f) for block in BLOCKS.values() for name, f in block.self_checks.items()},
        "log-probs": lambda s: chosen_logprobs(logits[s], chosen[s], 0.7)[0],
    }
    # What a GPU lacks is refused by name, so no run depends on it.
    if backend.takes(FP8.dtype):
        by_rows["FP8 GEMM"] = lambda s: fp8_matmul(quantize(x[s]), weight, torch.float32)
    if backend.adapters:
        by_rows["adapter"] = lambda s: add_adapter(product[s].clone(), x[s], adapter)
    checks = [_batch_check(name, f, f(slice(None))) for name, f in by_rows.items()]
    plans = dict.fromkeys(_fitting(PrecisionPlan.preset(name), backend) for name in PRESETS)
    return [*checks, *(_flow_check(plan, device) for plan in plans if plan and plan.exact)]


def default_plan(device: torch.device) -> PrecisionPlan:
    """Return the default plan, on a GPU without FP8 with output gradients in INT8."""
    plan = _fitting(PrecisionPlan.preset(DEFAULT_PRESET), backend_for(device))
    assert plan is not None, "every GPU with kernels multiplies INT8"
    return plan


def _fitting(plan: PrecisionPlan, backend: Backend) -> PrecisionPlan | None:
    """Return a plan, one of INT8 with INT8 gradients if a backend needs these, or None."""
    # Without E4M3, a GPU can still multiply INT8 weights by INT8 gradients.
    if backend.takes(number_format(plan.train_linear).dtype):
        fits = backend.takes(plan.backward_format.dtype)
        return plan if fits else plan.replace(grad_output="int8")
    return None


def _flow_check(plan: PrecisionPlan, device: str | torch.device) -> Check:
    shape = {
        "model_type": "qwen3", "hidden_size": 128, **FAMILIES["qwen3"].block.tiny(),
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "vocab_size": 256, "max_position_embeddings": 256, "tie_word_embeddings": True,
    }  # fmt: skip
    with selected_backend(None, defined=plan.defined):
        tested = plan.replace(first_layers_bf16=0, last_layers_bf16=0)
        policy = Policy.from_config(shape, tested, seed=0, device=device)
        result = measure(policy, num_prompts=6, samples=2, max_tokens=16)
        gradients = "" if plan == PrecisionPlan.preset(plan.name) else " with grad_output=int8"
        return _flow_result(f"flow {plan.name}{gradients}", policy, result)
