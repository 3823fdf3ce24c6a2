"""The verbs of the loop.

A session opens everything that a run needs (opening.py), goes on from the last good checkpoint if
asked to, and closes it all in any case, with a report. All randomness is counted: the prompts of a
step and the draws of a completion depend on the seed, the step and the prompt alone, so a resumed
run continues with the bits of an uncut one.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from jetrl.errors import MismatchError, RunStopped
from jetrl.parity import check_correction, located
from jetrl.randomness import derive_seed
from jetrl.rewards.evaluate import Evaluation, evaluate
from jetrl.rewards.sampling import EncodedPrompt, Scoring, sample_prompts
from jetrl.rollout.progress import Progress
from jetrl.runs import Learning
from jetrl.session.building import build_critic, build_reference
from jetrl.session.checkpoints import RunCheckpoints
from jetrl.session.display import Display
from jetrl.session.dynamic_sampling import Refilled, refill
from jetrl.session.finish import Ending, RunResult
from jetrl.session.hang_state import hang_state
from jetrl.session.measured import measured
from jetrl.session.memory_peaks import MemoryPeaks, size_notes, tell_plan
from jetrl.session.open import open_observers, open_parts
from jetrl.session.partial_rollouts import PartialRollouts
from jetrl.session.phases import Phases
from jetrl.session.prompt_order import PromptOrder
from jetrl.session.safeguards import Safeguards
from jetrl.session.step_metrics import eval_metrics, sample_metrics
from jetrl.session.stop_signals import StopSignals
from jetrl.session.warm_up import warm_up
from jetrl.settings.loading import Settings
from jetrl.training import Critic, StepMismatchError, Trainer
from jetrl.types import Completion, Sample, SamplingParams, StepStats

logger = logging.getLogger(__name__)


class Session:
    """One attempt at a run. Use it as a context; see `jetrl.loop.train` for the order of calls."""

    def __init__(self, settings: Settings, resume: bool = False) -> None:
        self.settings = settings
        self._resume = resume
        self._began = time.monotonic()
        self._stack = contextlib.ExitStack()
        self._step = 0
        self._rollout_tokens = 0
        self._trainer: Trainer | None = None
        self._scoring: Scoring | None = None  # of the completions that were sampled last

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def _open(self, stack: contextlib.ExitStack) -> None:
        settings = self.settings
        self.parts = open_parts(settings, self._resume, stack)
        check_correction(settings.algorithm, self.parts.policy)
        self.run = self.parts.run
        before = self.run.history().elapsed_s
        self.stops = StopSignals(settings.run.max_hours, before, self._began)
        self.display = Display(settings.loop.steps, lambda: self.stops.elapsed_s)
        self.phases = Phases()
        self.memory_peaks = MemoryPeaks(self.parts.policy.device)
        parts = self.parts
        state = lambda: hang_state(parts.engine, parts.policy)  # noqa: E731
        self.phases.observers += [self.display, self.memory_peaks]
        self.phases.observers += open_observers(settings, self.run, stack, state)
        self.saved = RunCheckpoints(self.run, settings)
        self.drawing = PromptOrder(settings, self.parts.prompts, self.parts.task.weights)
        self.saved.register("prompts", self.drawing)
        self.carrying = PartialRollouts(
            settings,
            self.parts.policy,
            self.parts.prompts,
            self.parts.max_turns,
            self.parts.objective.dynamic_sampling,
        )
        self.saved.register("partial rollouts", self.carrying)
        self.safeguards = Safeguards(self.parts, self.saved, self.display.note, self.phases.beat)
        stack.enter_context(self.stops.signals())
        stack.callback(self.display.close)
        self.ending = Ending(self.parts, self.saved, self.stops, self.phases, self.display)
        stack.push(lambda _, error, __: self.ending.cut(error, self._step, self._trainer))
        tell_plan(parts.memory, parts.opened, parts.policy.device, self.display.note)
        for note in self.run.notes:
            self.display.note(note)
        if self._resume:
            self._go_on()
        if not self.saved.in_warm_up:
            size = self.safeguards.micro_batch_size.tokens
            for note in size_notes(parts.memory, size, settings.train.tokens_per_micro_batch):
                self.display.note(note)
        self.learning = Learning(self.run.metrics("rl"))

    def _go_on(self) -> None:
        """From the last good checkpoint, if the run has one."""
        notes: list[str] = []
        if self.saved.last_step is not None:
            self._open_trainer(begun=True)
            self._step, notes = self.saved.load(self.trainer)
            self.display.first_step = self._step
            if self._step >= (steps := self.settings.loop.steps):
                notes.append(f"all steps of loop.steps={steps} are done; a larger one goes on")
        elif not (self.saved.in_warm_up and self.settings.sft.steps):
            notes = self.saved.begin_anew()
        for note in notes:
            self.display.note(note)

    @property
    def trainer(self) -> Trainer:
        assert self._trainer is not None, "the warm-up comes first"
        return self._trainer

    def _open_trainer(self, begun: bool = False) -> None:
        """After the warm-up: the optimizer of RL starts anew, and the reference is frozen here.
        begun: an earlier attempt did so."""
        policy = self.parts.policy
        reference = build_reference(self.settings, policy, self.run.path, begun)
        value_model = build_critic(self.settings, policy)
        safe = self.safeguards
        critic = None
        if value_model is not None:
            critic = Critic(value_model, self.settings, safe.critic_guard)
            self.saved.register_tensors("critic", critic)
        self._trainer = Trainer(
            policy, self.settings, reference, critic, safe.micro_batch_size, safe.guard
        )
        if self._trainer.calibration is not None:
            self.saved.register("clip", self._trainer.calibration)

    # The verbs of the loop

    def warm_up(self) -> None:
        """Supervised training on the task's worked answers, if the settings ask for it. A resumed
        run goes on in the middle of it, or has it behind it."""
        if self._trainer is not None:
            return
        if self.settings.sft.steps:

            def held_out() -> float:
                reached = self._held_out().mean
                self._free_cache()
                return reached

            warm_up(
                self.parts,
                self.display,
                self.phases,
                self.stops,
                self.saved,
                self.safeguards,
                held_out,
            )
        self._open_trainer()

    def evaluate_start(self) -> None:
        """Held-out evaluation before the first step, and the checkpoint that follows a warm-up."""
        if self._step > 0 or self.run.metrics("rl"):
            return
        metrics = self.evaluate(0)
        if self.settings.sft.steps:
            self._save_checkpoint(0, metrics)
        if metrics:
            self._show_step(StepStats(0, metrics))

    def steps(self) -> Iterator[int]:
        """The steps still to do, until one of them asked to stop."""
        while self._step < self.settings.loop.steps and not self.stops.reason:
            began = time.monotonic()
            yield self._step + 1
            self.stops.check_time(time.monotonic() - began, self.saved.ending_s)

    def draw_prompts(self, step: int) -> list[EncodedPrompt]:
        """The step's prompts, in the order that data.order names."""
        self.phases.start_step(step)
        self._rollout_tokens = 0
        prompts = self.drawing.draw(step, self.settings.rollout.prompts_per_step)
        more = self.carrying.start_step()
        if more > 0:
            prompts += self._other_order("oversample").draw(step, more)
        return prompts[: len(prompts) + min(more, 0)]

    def sample(self, prompts: list[EncodedPrompt], step: int, again: int = 0) -> list[Completion]:
        """samples_per_prompt completions of each prompt, with their log-probs, in order. Each
        begins to be scored when it is finished, while others are drawn. With partial rollouts it is
        those that are complete, of these prompts and of earlier ones, and scored later. again:
        which round of dynamic sampling, 0 for the step's own prompts."""
        rollout = self.settings.rollout
        params = SamplingParams(
            n=rollout.samples_per_prompt,
            max_tokens=rollout.max_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop=rollout.stop,
            seed=derive_seed(self.settings.run.seed, "rollout", step, *([again] if again else [])),
        )
        parts = self.parts
        with (
            self.stops.giving_up(self.carrying.on),
            self.phases.phase("rollout"),
            self.safeguards.sampling(step),
        ):
            if self.carrying.on:
                prompts, completions = self.carrying.sample(
                    parts.engine, prompts, params, step, self._progress
                )
                self._rollout_tokens += parts.engine.stats.tokens_drawn
                self._scoring = Scoring(parts.scorer, prompts, params.n)
            else:
                self._scoring = Scoring(parts.scorer, prompts, params.n, continues_step=again > 0)
                completions = sample_prompts(
                    parts.engine, self._scoring, params, parts.max_turns, self._progress
                )
                self._rollout_tokens += sum(c.num_sampled for c in completions)
        return completions

    def score(self, completions: Sequence[Completion]) -> list[Sample]:
        """Every completion's reward, those of the last `sample`.

        Raises:
            RunStopped: not one of them could be judged.
        """
        with self.stops.giving_up(self.carrying.on), self.phases.phase("reward"):
            assert self._scoring is not None, "nothing was sampled"
            samples = self._scoring.samples(completions)
            if self.parts.judge is not None:
                if self.parts.judge.has_model:
                    self._free_cache()
                samples = self.parts.judge(samples)
        failures = [s.failure for s in samples if s.failure]
        if failures:
            logger.warning("%d completions not judged; the first: %s", len(failures), failures[0])
        if len(failures) == len(samples):
            raise RunStopped(
                f"none of the step's {len(samples)} completions could be judged by task "
                f"{self.parts.task.label}; the first failure: {failures[0]}"
            )
        return samples

    def refill(self, step: int, samples: list[Sample]) -> list[Sample]:
        """Dynamic sampling, if the algorithm asks for it: more prompts are drawn, sampled and
        scored in place of groups whose rewards are all equal."""
        self._drawn = Refilled(samples, samples, rounds=1, dropped=0)
        if self.parts.objective.dynamic_sampling:
            self._drawn = refill(
                samples,
                wanted=self.settings.rollout.prompts_per_step,
                at_least=self.settings.train.updates_per_step,
                max_rounds=self.settings.algorithm.dynamic_sampling_rounds,
                draw=lambda again, count: self._draw_again(step, again, count),
            )
        return self._drawn.samples

    def update(self, step: int, samples: Sequence[Sample]) -> dict[str, float]:
        """Train on the samples: advantages, packing, updates, requantize. Returns metrics.

        Raises:
            MismatchError: sampler and trainer differ under an exact plan; names the operation.
            NonFiniteError, OutOfMemoryStop: as the trainer's step; what it was is kept.
        """
        self._free_cache()
        try:
            with self.phases.phase("update"), self.safeguards.update(step, samples):
                trained = self.trainer.step(samples, step)
        except StepMismatchError as error:
            self.run.write_rollouts(step, samples)
            raise MismatchError(f"step {step}: {error}; {self._locate(error)}") from None
        metrics = trained.metrics
        self.phases.timings |= trained.timings
        if self.parts.objective.dynamic_sampling:
            metrics["dynamic_sampling/rounds"] = float(self._drawn.rounds)
            metrics["dynamic_sampling/dropped_groups"] = float(self._drawn.dropped)
        if self.carrying.on:
            metrics["partial_rollout/unfinished"] = float(self.carrying.num_unfinished)
        compares_group = self.parts.objective.algorithm.compares_group
        metrics = sample_metrics(self._drawn.drawn, compares_group) | metrics
        return metrics | self.safeguards.take_in(step, metrics)

    def evaluate(self, step: int) -> dict[str, float]:
        """Held-out metrics of a step, if one is due: at the start, every eval.every, at the end."""
        settings = self.settings.eval
        due = settings.every and (step % settings.every == 0 or step == self.settings.loop.steps)
        if not due:
            return {}
        metrics = eval_metrics(self.parts.task.label, self._held_out())
        return metrics | {"timing/eval_s": self.phases.timings["eval"]}

    def record(self, step: int, samples: Sequence[Sample], metrics: dict[str, float]) -> None:
        """Write the step down: rollouts, checkpoint if due, metrics, console.

        Raises:
            StorageError: one of them, or the checkpoint before, could not be written.
        """
        last = step == self.settings.loop.steps or bool(self.stops.reason)
        if step % self.settings.rollout.keep_every == 0 or step == 1 or last:
            self.run.write_rollouts(step, samples)
        self.drawing.observe(self._drawn.drawn)
        self._step = step
        metrics |= measured(self.phases.timings, samples, self._rollout_tokens)
        metrics |= self.memory_peaks.take_metrics()
        self.saved.check()
        if self.saved.is_due(step) or last:
            self._save_checkpoint(step, metrics)
            metrics["timing/checkpoint_s"] = self.phases.timings["checkpoint"]
        metrics["timing/step_s"] = self.phases.step_s
        self._show_step(StepStats(step, metrics, samples))
        for warning in self.learning.see(metrics):
            logger.warning("step %d: %s", step, warning)
            self.display.note(f"warning: {warning}")

    def finish(self, out: str | Path | None = None) -> RunResult:
        """Export the model, say what is where, and end.

        Raises:
            KeyboardInterrupt, Terminated: a signal asked the run to stop.
        """
        if self.stops.reason:
            self.ending.stop(self._step, self._trainer)
            self.stops.raise_signal()
            self.parts.attempt.end("stopped", self.stops.reason)
        return self.ending.export(self._step, out)

    # What the verbs are made of

    def _draw_again(self, step: int, again: int, count: int) -> list[Sample]:
        """Samples of further prompts, of an order of their own; their times are added."""
        before = dict(self.phases.timings)
        prompts = self._other_order(f"prompts again {step} {again}").draw(1, count)
        samples = self.score(self.sample(prompts, step, again))
        for phase in ("rollout", "reward"):
            self.phases.timings[phase] += before[phase]
        return samples

    def _other_order(self, use: str) -> PromptOrder:
        return PromptOrder(self.settings, self.parts.prompts, self.parts.task.weights, use)

    def _held_out(self) -> Evaluation:
        settings = self.settings.eval
        params = SamplingParams(
            n=settings.samples,
            max_tokens=settings.max_tokens or self.settings.rollout.max_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            stop=self.settings.rollout.stop,
            seed=derive_seed(self.settings.run.seed, "eval"),
        )
        parts = self.parts
        with self.phases.phase("eval"), self.safeguards.sampling(self._step):
            return evaluate(
                parts.engine,
                parts.scorer,
                parts.eval_prompts,
                params,
                settings.threshold,
                parts.max_turns,
                self._progress,
            )

    def _save_checkpoint(self, step: int, metrics: dict[str, float]) -> None:
        with self.phases.phase("checkpoint"):
            self.saved.save(step, self.trainer, metrics)

    def _free_cache(self) -> None:
        """Gives back the KV pages, which took what was free of a GPU: other models need it now."""
        if self.parts.policy.device.type == "cuda":
            self.parts.engine.free_cache()

    def _show_step(self, stats: StepStats) -> None:
        self.run.write_step(stats)
        self.display.step(stats)
        self.parts.trackers.log(stats.step, stats.metrics)

    def _locate(self, error: StepMismatchError) -> str:
        sample = error.samples[error.sample_ids[0]]
        tokens = sample.prompt_token_ids, sample.completion.token_ids
        return located(self.parts.policy, *tokens, self.settings.rollout.temperature)

    def _progress(self, progress: Progress) -> None:
        self.phases.beat()
        self.display.progress(progress)
