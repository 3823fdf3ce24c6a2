"""A policy with what samples from it and what trains it, at the shape of a real model.

The parts are those of a run: `RolloutEngine`, `Trainer`, and between them the cache that is given
back before an update. Memory decides how large a micro-batch may be: the most whole sequences, up
to 16384 tokens, with which two micro-batches (the second adds to gradients that are there) run
beside the optimizer's states and 256 MiB that stay free. Where not even one sequence fits, layers
are recomputed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from jetrl.bench._load import Load, make_samples, random_rewards
from jetrl.bench._timing import Row
from jetrl.bench.parity import make_policy
from jetrl.bench.rollout import capture_graphs
from jetrl.errors import OutOfMemoryStop
from jetrl.memory.device import peak_bytes, reset_peak
from jetrl.memory.out_of_memory import release
from jetrl.models.policy import Policy
from jetrl.precision.linear import Linear
from jetrl.precision.quantized_weight import FP8Weight
from jetrl.rollout.engine import RolloutEngine
from jetrl.settings.loading import Settings, load_config
from jetrl.training import Trainer, pack
from jetrl.training.forward import batch_logprobs
from jetrl.training.micro_batches import MicroBatchSize
from jetrl.training.trainer import TrainedStep
from jetrl.types import Completion, Sample, SamplingParams

MOST_TOKENS = 16384  # of a micro-batch
_SPARE_BYTES = 2**28  # for what a longer update holds beside what was tried
_WARM_TOKENS = 24  # of each completion of the rollout that warms up


@dataclass(frozen=True)
class Choices:
    """The choices that are the same for all plans of a benchmark.

    Attributes:
        shape: A name of `jetrl.bench.shapes`.
        device: "cuda", or "cpu" to try the benchmark out.
        layers: Decoder layers; None: the shape's own.
        learning_rate: Large enough that FP8 codes change.
        tokens_per_micro_batch: Tokens; None: the largest micro-batch that fits.
        max_batch_size: Sequences sampled together; None: all.
        train: Further settings of [train].
    """

    shape: str
    device: str
    layers: int | None
    learning_rate: float
    tokens_per_micro_batch: int | None
    max_batch_size: int | None
    train: dict[str, Any]


def policy_of(plan: str, choices: Choices) -> Policy:
    """Return a policy of a plan with random weights."""
    return make_policy(choices.shape, plan, choices.device, choices.layers)


class _Tried(MicroBatchSize):
    """A size of micro-batches that is not halved while the benchmark tries whether it fits."""

    tried = True

    def halve(self, sizes: Sequence[tuple[int, int]], problem: str, unit: str = "sequence") -> None:
        if self.tried:
            raise OutOfMemoryStop(problem)
        super().halve(sizes, problem, unit)


class Flow:
    """A policy's sampler and trainer under a load.

    Args:
        policy: The policy that samples and trains.
        load: The prompts and completions of a step.
        choices: The choices that are the same for all plans.

    Attributes:
        chosen: The settings that fit, for a table.
        peaks: The peak of memory in GiB, by phase.
        captured: How many graphs the warm-up captured, and the seconds that this took.
    """

    def __init__(self, policy: Policy, load: Load, choices: Choices) -> None:
        self.policy, self.load, self._choices = policy, load, choices
        self.vocabulary = policy.config.vocab_size
        batch_size = choices.max_batch_size or load.sequences
        self.engine = RolloutEngine(self.policy, max_batch_size=batch_size)
        self.peaks: dict[str, float] = {}
        self.captured = (0, 0.0)
        self.trainer: Trainer
        self.chosen: Row = {"max_batch_size": batch_size, **choices.train}

    # The phases of a step

    def sample(self, seed: int, response_length: int | None = None) -> list[Sample]:
        """Return completions of random prompts, drawn to full length, with random rewards."""
        prompts = self.load.random_prompts(self.vocabulary, seed)
        params = SamplingParams(
            n=self.load.samples,
            max_tokens=response_length or self.load.response_length,
            ignore_eos=True,
            seed=seed,
        )
        completions = self.engine.generate(prompts, params)
        return make_samples(prompts, completions, random_rewards(len(completions), seed))

    @torch.no_grad()
    def old_logprobs(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Return the trainer's log-probs of each completion, by a forward without gradients.

        A flow whose sampler's log-probs are not its trainer's needs this pass.
        """
        logprobs: list[list[float]] = [[] for _ in samples]
        batches = pack(samples, max(MOST_TOKENS, self.load.length))
        packed = [batch_logprobs(self.policy, batch)[0] for batch in batches]
        for batch, rows in zip(batches, packed, strict=True):
            lengths = [len(samples[i].completion.token_ids) for i in batch.sample_ids]
            for i, values in zip(batch.sample_ids, rows.cpu().split(lengths), strict=True):
                logprobs[i] = values.tolist()
        return logprobs

    def update(self, samples: Sequence[Sample]) -> TrainedStep:
        """Make the trainer's step."""
        if self.policy.device.type == "cuda":
            self.engine.free_cache()
        return self.trainer.step(samples)

    # What comes before they are measured

    def warm_up(self) -> None:
        """Run everything once, and leave sampler and trainer as after the update of a step.

        Kernels are compiled, decode's graphs are captured, and the weights have moved.
        """
        self._capture()
        self.sample(seed=0, response_length=min(_WARM_TOKENS, self.load.response_length))
        self.engine.free_cache()
        self.fit()
        self._capture()  # again, where the optimizer's states leave fewer pages
        self.engine.free_cache()

    def _capture(self) -> None:
        """Capture the decode graphs of the load, in a cache of as many pages as the load takes."""
        engine, load = self.engine, self.load
        count = min(load.sequences, engine.max_batch_size)
        shared = engine.page_size if count < load.sequences else 0  # with those that wait
        graphs, seconds = capture_graphs(engine, count, load.prompt_length, load.length + shared)
        self.captured = (self.captured[0] + graphs, self.captured[1] + seconds)

    def synthetic(self, sequences: int, seed: int) -> list[Sample]:
        """Return samples of the load's lengths that nobody drew, without log-probs: one group."""
        load = self.load
        sizes = (load.prompt_length, load.response_length)
        prompts, answers = (
            Load(sequences, 1, size, 0).random_prompts(self.vocabulary, seed + place)
            for place, size in enumerate(sizes)
        )
        zeros = (0.0,) * load.response_length
        completions = [Completion(tuple(answer), zeros, "length") for answer in answers]
        samples = make_samples(prompts, completions, random_rewards(len(completions), seed))
        return [replace(sample, group=0) for sample in samples]

    def fit(self) -> None:
        """Make the trainer with the largest micro-batch that fits, and have it make updates.

        One of them is with the load's last, smaller micro-batch, which may have its own kernels.
        """
        given, length = self._choices.tokens_per_micro_batch, self.load.length
        most = max(1, (given or MOST_TOKENS) // length)
        counts = [most] if given else range(min(most, self.load.sequences), 0, -1)
        for checkpointing in (False, True):
            for count in counts:
                if self._fits(count, checkpointing):
                    if rest := self.load.sequences % count:
                        self._train_on(self.synthetic(rest, seed=2), self.trainer)
                    return
        raise OutOfMemoryStop(
            f"{self.policy.plan.name}: not even {counts[-1]} sequences of {length} tokens fit, "
            "with layers recomputed"
        )

    def _fits(self, count: int, checkpointing: bool) -> bool:
        tokens = count * self.load.length
        self.chosen |= {"micro_batch_tokens": tokens, "activation_checkpointing": checkpointing}
        settings = self._settings(tokens, checkpointing)
        size = _Tried(tokens)
        trainer = Trainer(self.policy, settings, micro_batch_size=size)
        spare = torch.empty(_SPARE_BYTES, dtype=torch.uint8, device=self.policy.device)
        samples = self.synthetic(2 * count, seed=1)
        try:
            for tried in (samples[:1], samples):
                self._train_on(tried, trainer)
        except OutOfMemoryStop:
            fits = False
        else:
            fits, self.trainer, size.tried = True, trainer, False
        del spare
        if not fits:
            for master in self.policy.master_weights().values():
                master.grad = None
            del trainer
            release()
        return fits

    def _train_on(self, samples: Sequence[Sample], trainer: Trainer) -> None:
        """Make a step on samples that nobody drew.

        Of an exact plan's sampler the trainer expects its own log-probs.
        """
        if self.policy.plan.exact:
            samples = with_logprobs(samples, self.old_logprobs(samples))
        trainer.step(samples)

    def _settings(self, tokens: int, checkpointing: bool) -> Settings:
        choices = self._choices
        train = {
            "lr": choices.learning_rate,
            "tokens_per_micro_batch": tokens,
            "activation_checkpointing": str(checkpointing).lower(),
            **choices.train,
        }
        words = [f"train.{key}={value}" for key, value in train.items()]
        return load_config(None, [f"rollout.max_tokens={self.load.response_length}", *words])

    # Measuring

    def timed(self, phase: str, work: Callable[[], Any]) -> tuple[float, Any]:
        """Return the seconds and the result of a function; keep its peak in `peaks`."""
        on_gpu = self.policy.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
            reset_peak()
        began = time.perf_counter()
        result = work()
        if on_gpu:
            torch.cuda.synchronize()
            self.peaks[phase] = round(peak_bytes() / 2**30, 1)
        return time.perf_counter() - began, result


def with_logprobs(samples: Sequence[Sample], logprobs: Sequence[Sequence[float]]) -> list[Sample]:
    """Return the samples with the given log-probs of their completions."""
    return [
        replace(sample, completion=replace(sample.completion, logprobs=tuple(values)))
        for sample, values in zip(samples, logprobs, strict=True)
    ]


def codes_of(policy: Policy, every: int = 12) -> dict[str, torch.Tensor]:
    """Return copies, in CPU memory, of the quantized weights of every twelfth layer.

    They are uint8 for FP8 codes and int16 for BF16, by the name of the linear layer.
    """
    copies = {}
    for layer in list(policy.decoder.layers)[::every]:
        for linear in layer.modules():
            if isinstance(linear, Linear):
                operand = linear.operand("train")
                if isinstance(operand, FP8Weight):
                    codes = operand.direct.codes.view(torch.uint8)
                else:
                    codes = operand.view(torch.int16)
                copies[linear.name] = codes.to("cpu", copy=True)
    return copies


def share_changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    """Return the share of the elements that differ."""
    different = sum(int((after[name] != bits).sum()) for name, bits in before.items())
    return different / sum(bits.numel() for bits in before.values())
