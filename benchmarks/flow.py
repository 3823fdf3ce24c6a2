"""A policy with its sampler and its trainer, at the shape of a real model.

The parts are those of a run: `RolloutEngine` and `Trainer`, with the KV cache freed before an
update. Trials find the largest micro-batch, in whole sequences and up to 16384 tokens: two
micro-batches (the second adds to existing gradients) must run next to the optimizer states, with
1 GiB to spare. If not even one sequence fits, layers are recomputed.

With several ranks, each samples its share of the prompts and all train together, as in a run. The
memory plan sizes the micro-batches then, without trials.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from benchmarks.harness import RolloutLines, Row, begins
from benchmarks.loads import Load, make_samples, random_rewards, with_images
from benchmarks.policies import TARGETS, make_policy, options_of
from benchmarks.rollout import capture_graphs, capture_largest

from jetrl.distributed.agreement import LARGEST_SIZE, agree
from jetrl.distributed.world import world
from jetrl.errors import OutOfMemoryStop, UserError
from jetrl.memory.device import free_bytes, peak_bytes, reset_peak
from jetrl.memory.out_of_memory import release
from jetrl.memory.plan import MemoryPlan, OtherModels, PlannedRun, Workload
from jetrl.models.policy import Policy
from jetrl.models.source import ModelSource
from jetrl.precision.backend import HOPPER, backend_for
from jetrl.precision.linear import Linear
from jetrl.precision.quantized_weight import operand_tensors
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.options import GenerateOptions
from jetrl.rollout.sequence import sequence_keys
from jetrl.settings.loading import Settings, load_config
from jetrl.training.distillation import Distillation
from jetrl.training.micro_batches import MicroBatchSize, batch_logprobs
from jetrl.training.packing import pack, shares_prompts
from jetrl.training.trainer import TrainedStep, Trainer
from jetrl.types import Completion, PromptInputs, Sample, SamplingParams

MOST_TOKENS = 16384  # of a micro-batch
_SPARE_BYTES = 2**30  # for graphs that are captured later, and holes
_WARM_TOKENS = 24  # of each completion of the rollout that warms up


@dataclass(frozen=True)
class Choices:
    """The choices common to all plans of a benchmark.

    Attributes:
        shape: A name of `benchmarks.shapes.SHAPES`.
        device: "cuda", or "cpu" to try the benchmark out.
        layers: Decoder layers; None: the shape's own.
        tokens_per_micro_batch: Tokens; None: the largest micro-batch that fits.
        max_batch_size: Sequences that a rank samples together; None: all.
        train: Further settings of [train].
        warm_micro_batches: Micro-batches of the warm-up's update; None: two per rank. The weights
            after it depend on their number.
        adapter_rank: The rank of adapters on a frozen base; 0: all parameters are trained.
        teacher: The `teacher.kl` of distillation from a frozen teacher of the same shape; "": none.
    """

    shape: str
    device: str
    layers: int | None
    learning_rate: float
    tokens_per_micro_batch: int | None
    max_batch_size: int | None
    train: dict[str, Any]
    warm_micro_batches: int | None = None
    adapter_rank: int = 0
    teacher: str = ""

    @property
    def distills(self) -> list[str]:
        """Settings of distillation; its teacher is not read from a path."""
        if not self.teacher:
            return []
        return ["algorithm.name=opd", "teacher.path=random", f"teacher.kl={self.teacher}"]


def policy_of(plan: str, choices: Choices) -> Policy:
    """Return a policy of a plan with random weights."""
    return make_policy(
        choices.shape, plan, choices.device, choices.layers, adapter_rank=choices.adapter_rank
    )


def distillation_of(policy: Policy, choices: Choices) -> Distillation | None:
    """Return the distillation from a teacher with other random weights; None without one."""
    if not choices.teacher:
        return None
    settings = load_config(None, choices.distills)
    source = ModelSource.from_seed(policy.config, 1)
    teacher = Policy(source, policy.plan, policy.device, frozen=True)
    return Distillation(teacher, settings.teacher, settings.rollout.temperature, prompts={})


class _Tried(MicroBatchSize):
    """A micro-batch size that is not halved while the benchmark tries whether it fits."""

    tried = True

    def halve(self, sizes: Sequence[tuple[int, int]], problem: str, unit: str = "sequence") -> None:
        if self.tried:
            raise OutOfMemoryStop(problem)
        super().halve(sizes, problem, unit)


class Flow:
    """A policy's sampler and trainer under a load.

    Attributes:
        captured: The number of graphs that the warm-up captured, and the seconds that it took.
    """

    def __init__(self, policy: Policy, load: Load, choices: Choices) -> None:
        self.policy, self.load, self._choices = policy, load, choices
        self.vocabulary = policy.config.vocab_size
        if load.prompts < world().size:
            raise UserError(f"{load.prompts} prompts for {world().size} ranks: give each one")
        self._own = world().share(range(load.prompts))
        batch_size = choices.max_batch_size or -(-load.prompts // world().size) * load.samples
        self._together = min(len(self._own) * load.samples, batch_size)
        self.engine = RolloutEngine(self.policy, max_batch_size=batch_size)
        self.peaks: dict[str, float] = {}
        self.captured = (0, 0.0)
        self.trainer: Trainer
        self._warm = choices.warm_micro_batches or 2 * world().size
        self._distillation = distillation_of(policy, choices)
        self.chosen: Row = {"max_batch_size": batch_size, **choices.train}
        free = free_bytes(policy.device)
        on_gpu = policy.device.type == "cuda"
        held = torch.cuda.memory_allocated(policy.device) if on_gpu else 0
        self._free = None if free is None or not on_gpu else agree(LARGEST_SIZE, free + held)

    # The phases of a step

    def sample(self, seed: int, response_length: int | None = None) -> list[Completion]:
        """Return full-length completions of this rank's random prompts.

        Args:
            response_length: The maximum tokens per completion; None: those of the load.
        """
        load, prompts = self.load, self._prompts(self.load, seed)
        most = response_length or load.response_length
        params = SamplingParams(n=load.samples, max_tokens=most, ignore_eos=True, seed=seed)
        keys = sequence_keys(prompts, load.samples)
        options = GenerateOptions(
            max_tokens=[min(most, length) for length in self._own_lengths()],
            keys=[keys[i] for i in self._own],
        )
        own = [prompts[i] for i in self._own]
        return self.engine.generate(own, params, progress=RolloutLines(), options=options)

    def _prompts(self, load: Load, seed: int) -> list[PromptInputs]:
        """Return random prompts, with the images of this flow's load."""
        prompts, tower = load.random_prompts(self.vocabulary, seed), self.policy.tower
        if not self.load.image_side:
            return [PromptInputs(tuple(prompt)) for prompt in prompts]
        if tower is None:
            raise UserError(f"--image-side: {self.policy.config.architecture} reads text only")
        return with_images(prompts, self.load.image_side, tower, seed)

    def _own_lengths(self) -> list[int]:
        """Return the tokens of each of this rank's completions, grouped by prompt."""
        lengths, each = self.load.response_lengths(), self.load.samples
        return [n for i in self._own for n in lengths[i * each : (i + 1) * each]]

    def gathered(self, completions: Sequence[Completion], seed: int) -> list[Sample]:
        """Return the samples of all ranks, with random rewards."""
        prompts, each = self._prompts(self.load, seed), self.load.samples
        whole = list(completions)
        if world().size > 1:
            packed = [
                (array("i", c.token_ids).tobytes(), array("f", c.logprobs).tobytes())
                for c in completions
            ]
            groups = [packed[i : i + each] for i in range(0, len(packed), each)]
            whole = [
                Completion(tuple(array("i", token_ids)), tuple(array("f", logprobs)), "length")
                for group in world().gather_in_order("completions", groups)
                for token_ids, logprobs in group
            ]
        return make_samples(prompts, whole, random_rewards(len(whole), seed))

    @torch.no_grad()
    def old_logprobs(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Return the trainer's log-probs of each completion, by a forward without gradients.

        Ranks share the work. A flow whose sampler and trainer differ needs this pass.
        """
        logprobs: list[list[float]] = [[] for _ in samples]
        batches = pack(samples, max(MOST_TOKENS, self.load.length))
        own = [batch_logprobs(self.policy, batch)[0].cpu() for batch in world().share(batches)]
        packed = world().gather_in_order("log-probs", [rows.numpy() for rows in own])
        for batch, rows in zip(batches, packed, strict=True):
            ends = np.cumsum([len(samples[i].completion.token_ids) for i in batch.sample_ids])
            for i, values in zip(batch.sample_ids, np.split(rows, ends[:-1]), strict=True):
                logprobs[i] = values.tolist()
        return logprobs

    def update(self, samples: Sequence[Sample]) -> TrainedStep:
        """Free the rollout's pages, then run the trainer's step."""
        self.give_pages_back()
        return self.trainer.step(samples)

    def give_pages_back(self) -> None:
        """Free the rollout's pages, as a run does before training, and reset the memory peak."""
        if self.policy.device.type == "cuda":
            self.engine.free_cache()
            reset_peak()

    # What comes before they are measured

    def warm_up(self, training: bool = True) -> None:
        """Run everything once: compile kernels, capture decode graphs, change the weights."""
        if training:
            # Micro-batches are tried next to the memory of the largest graph. The other graphs
            # are captured later, because the optimizer states may leave fewer pages: then there
            # is a new cache, without graphs.
            begins("the largest graph of decode")
            self._capture(largest=True)
            self.engine.free_cache()
            begins("updates that warm up, with the largest micro-batch that fits")
            self.fit()
        begins("all graphs of decode")
        self._capture()
        begins("sampling that warms up")
        self.sample(seed=0, response_length=min(_WARM_TOKENS, self.load.response_length))
        self.engine.free_cache()

    def _capture(self, largest: bool = False) -> None:
        """Capture the decode graphs of the load, in a cache with as many pages as it needs."""
        engine, load = self.engine, self.load
        if self.policy.device.type != "cuda":
            return
        count, own = self._together, len(self._own) * load.samples
        shared = 0 if count == own else engine.page_size  # with those that wait
        longest = load.length + shared
        if largest:
            graphs, seconds = capture_largest(engine, count, longest)
        else:
            known = load.mean_length > 0 and count == own
            totals = [load.prompt_length + n for n in self._own_lengths()] if known else None
            graphs, seconds = capture_graphs(engine, count, load.prompt_length, longest, totals)
        self.captured = (self.captured[0] + graphs, self.captured[1] + seconds)

    def synthetic(self, sequences: int, seed: int, each: int = 1) -> list[Sample]:
        """Return random samples of the load's lengths in one group, with log-probs of 0.

        Args:
            each: The number of samples per prompt.
        """
        load = self.load
        questions = self._prompts(Load(sequences, 1, load.prompt_length, 0), seed)
        answers = Load(sequences, 1, load.response_length, 0).random_prompts(
            self.vocabulary, seed + 1
        )
        prompts = [questions[i // each] for i in range(sequences)]
        zeros = (0.0,) * load.response_length
        completions = [Completion(tuple(answer), zeros, "length") for answer in answers]
        samples = make_samples(prompts, completions, random_rewards(len(completions), seed))
        return [replace(sample, group=0) for sample in samples]

    def _of_each_size(self, shared: bool) -> Iterator[list[Sample]]:
        """Yield the samples of the first micro-batches of each packed size."""
        samples_each = self.load.samples if shared else 1
        samples = self.synthetic(self.load.sequences, seed=2, each=samples_each)
        shares = shares_prompts(self.trainer.settings.train.share_prompts, samples)
        sizes = defaultdict[tuple[int, int], list[list[int]]](list)
        for batch in pack(samples, self.chosen["micro_batch_tokens"], share_prompts=shares):
            ids = batch.sample_ids.tolist()
            sizes[len(ids), len({i // samples_each for i in ids})].append(ids)
        for batches in sizes.values():
            yield [samples[i] for ids in batches[: self._warm] for i in ids]

    def fit(self, shared: bool = True) -> None:
        """Create the trainer with the largest micro-batch that fits, and run warm-up updates.

        The last updates have each micro-batch size of the step, since sizes may select kernels.

        Args:
            shared: Whether the samples of a prompt share it.
        """
        load = self.load
        given, length = self._choices.tokens_per_micro_batch, load.length
        most = max(1, (given or MOST_TOKENS) // length)
        counts = [most] if given else range(min(most, load.sequences), 0, -1)
        recomputed = self._choices.train.get("activation_checkpointing")
        for checkpointing in (False, True) if recomputed is None else (recomputed == "true",):
            for count in counts:
                if self._fits(count, checkpointing):
                    for samples in self._of_each_size(shared):
                        self._train_on(samples, self.trainer)
                    return
        raise OutOfMemoryStop(
            f"{self.policy.plan.name}: not even {counts[-1]} sequences of {length} tokens fit, "
            "with layers recomputed"
        )

    def planned(self) -> MemoryPlan:
        """Return the memory plan of the load with the chosen micro-batches."""
        load, chosen = self.load, self.chosen
        recomputed = bool(chosen["activation_checkpointing"])
        settings = self._settings(chosen["micro_batch_tokens"], recomputed, for_plan=True)
        workload = Workload(
            sequences=load.sequences,
            tokens=load.length,
            trained=load.sequences,
            prompts=load.prompts * load.prompt_length,
            most_held=load.most_held if self._together == load.sequences else None,
        )
        run = PlannedRun(
            settings=settings,
            config=self.policy.config,
            others=OtherModels(teacher=self.policy.config if self._distillation else None),
            load=workload,
            cards=world().size,
            device=self.policy.device.type,
            hopper=backend_for(self.policy.device) is HOPPER,
        )
        return MemoryPlan(run, self._free, run.tokens)

    def _fits(self, count: int, checkpointing: bool) -> bool:
        given = self._choices.tokens_per_micro_batch
        tokens = given if given and self.load.mean_length else count * self.load.length
        self.chosen |= {"micro_batch_tokens": tokens, "activation_checkpointing": checkpointing}
        planned = world().size > 1 and not given and self._free is not None
        if planned and self.planned().needed > (self._free or 0):
            return False
        settings = self._settings(tokens, checkpointing)
        size = _Tried(tokens)
        trainer = Trainer(
            self.policy, settings, micro_batch_size=size, distillation=self._distillation
        )
        spare = torch.empty(_SPARE_BYTES, dtype=torch.uint8, device=self.policy.device)
        samples = self.synthetic(self._warm * count, seed=1)
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

    def expected(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return the samples, for an exact plan with the log-probs that its trainer checks."""
        if not self.policy.plan.exact:
            return samples
        return with_logprobs(samples, self.old_logprobs(samples))

    def _train_on(self, samples: Sequence[Sample], trainer: Trainer) -> None:
        """Run a step on synthetic samples."""
        trainer.step(self.expected(samples))

    def _settings(self, tokens: int, checkpointing: bool, for_plan: bool = False) -> Settings:
        choices, load = self._choices, self.load
        train = {
            "lr": choices.learning_rate,
            "tokens_per_micro_batch": tokens,
            "activation_checkpointing": str(checkpointing).lower(),
            **choices.train,
        }
        words = [f"train.{key}={value}" for key, value in train.items()]
        words += ["rollout.speculation=off", *choices.distills]
        if for_plan:
            plan = self.policy.plan
            words += [
                f"precision.preset={plan.name}",
                *(f"precision.{key}={value}" for key, value in options_of(plan).items()),
                f"rollout.prompts_per_step={load.prompts}",
                f"rollout.samples_per_prompt={load.samples}",
                f"rollout.max_batch_size={self.engine.sizes.now.max_batch_size}",
            ]
        if for_plan and choices.adapter_rank:
            words += ["adapter.kind=lora", f"adapter.rank={choices.adapter_rank}"]
            words += [f'adapter.targets="{TARGETS}"']
        return load_config(None, [f"rollout.max_tokens={load.response_length}", *words])

    # Measuring

    def timed(self, phase: str, work: Callable[[], Any]) -> tuple[float, Any]:
        """Return the seconds and the result of a function, and record its memory peak.

        All ranks start together, and each returns its own seconds. They are printed at once, since
        a later phase may be interrupted.
        """
        world().barrier(phase)
        begins(phase)
        on_gpu = self.policy.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
            reset_peak()
        began = time.perf_counter()
        result = work()
        if on_gpu:
            torch.cuda.synchronize()
            self.peaks[phase] = round(peak_bytes() / 2**30, 1)
        seconds = time.perf_counter() - began
        if world().is_first:
            peak = self.peaks.get(phase, 0.0)
            print(f"{phase}: {seconds:.2f} s, peak {peak} GiB", file=sys.stderr, flush=True)
        return seconds, result


def with_logprobs(samples: Sequence[Sample], logprobs: Sequence[Sequence[float]]) -> list[Sample]:
    """Return the samples with the given log-probs of their completions."""
    return [
        replace(sample, completion=replace(sample.completion, logprobs=tuple(values)))
        for sample, values in zip(samples, logprobs, strict=True)
    ]


def codes_of(policy: Policy, every: int = 12) -> dict[str, torch.Tensor]:
    """Return CPU copies of the quantized weights of every twelfth layer, by name.

    8-bit codes are uint8, BF16 weights int16.
    """
    copies = {}
    for layer in list(policy.decoder.layers)[::every]:
        for linear in layer.modules():
            if isinstance(linear, Linear):
                codes = operand_tensors(linear.operand("train"))[0]
                codes = codes.view(torch.int16 if codes.dtype == torch.bfloat16 else torch.uint8)
                copies[linear.name] = codes.to("cpu", copy=True)
    return copies


def share_changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    """Return the fraction of elements that differ."""
    different = sum(int((after[name] != bits).sum()) for name, bits in before.items())
    return different / sum(bits.numel() for bits in before.values())
