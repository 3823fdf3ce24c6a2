"""A run as a context manager (`OpenRun`), and the operations of a training step (`Session`).

A session loads the models and data of a run, resumes from the last intact checkpoint if asked to,
and ends with a report. Randomness depends only on seed, step and prompt, so a resumed
run reproduces the bits of an uninterrupted one.

Each verb takes the step's record and returns one with more fields filled in (step.py).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from jetrl.distributed.agreement import ending_together
from jetrl.distributed.world import world
from jetrl.errors import MismatchError, RunStopped
from jetrl.runs.digest import as_metric
from jetrl.session.building import build_reference, build_teacher, value_model
from jetrl.session.evaluate import Evaluation, evaluate
from jetrl.session.examples import demonstration
from jetrl.session.nonfinite import NonFiniteReports
from jetrl.session.open import open_context
from jetrl.session.parity import located
from jetrl.session.partial_rollouts import PartialRollouts
from jetrl.session.ranks import compare_prompts, compare_samples, compare_weights
from jetrl.session.recorded import RecordedRollouts, ReplayBuffer
from jetrl.session.source import ContinuedPrompts, HarnessEpisodes, Source, WholePrompts
from jetrl.session.step import (
    Step,
    StepNotes,
    distributed_metrics,
    eval_metrics,
    eval_params,
    largest_of_ranks,
    refill,
    rollout_params,
    sample_metrics,
    throughput_metrics,
)
from jetrl.session.stop_signals import StepGivenUp
from jetrl.session.supervised import SupervisedUpdates, drawn_examples
from jetrl.session.training_run import RunResult, TrainingRun, settings_of_attempt
from jetrl.session.watchdog import hang_state
from jetrl.settings.loading import Settings
from jetrl.tasks.base import TrainerState
from jetrl.training.distillation import Distillation
from jetrl.training.extras import Extra
from jetrl.training.extras.calibration import ClipCalibration
from jetrl.training.extras.critic import Critic
from jetrl.training.extras.draft_head import DraftHeadTraining
from jetrl.training.micro_batches import MicroBatchSize
from jetrl.training.mismatch import StepMismatchError
from jetrl.training.sft import SftTrainer
from jetrl.training.trainer import Trainer
from jetrl.types import Sample, StepStats

logger = logging.getLogger(__name__)

StepCallback = Callable[[StepStats], object]
"""Called after each step is recorded, on every rank; a true result ends the run."""


class OpenRun:
    """Models, data and run directory of an attempt at a run, as a context manager.

    `last_step` is the last complete step, of this attempt or an earlier one. `callbacks` are called
    after each step.
    """

    def __init__(
        self, settings: Settings, resume: bool = False, callbacks: Sequence[StepCallback] = ()
    ) -> None:
        self.settings = settings
        self._callbacks = callbacks
        self.last_step = Step(0)
        self._resumes = resume
        self._began = time.monotonic()
        self._stack = contextlib.ExitStack()
        self._trainer: Trainer | None = None

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
        """Load everything, create or open the run directory, and resume if asked to."""
        # A resumed run uses its own settings. Open models first, then the run directory.
        settings = self.settings = settings_of_attempt(self.settings, self._resumes)
        self.context = context = open_context(settings, stack, self._resumes)
        settings = self.settings = context.settings

        self.run = run = TrainingRun(
            context,
            stack,
            resume=self._resumes,
            began=self._began,
            hang_state=lambda: hang_state(context.engine, context.policy),
        )

        # Register all state that persists across steps with the checkpoints.
        components = run.checkpoints.components
        # Pass rates determine which prompts are drawn.
        self._prompt_order = context.prompt_order()
        components.register("prompts", self._prompt_order)
        self._partial_rollouts = PartialRollouts(
            settings,
            context.policy,
            context.prompts,
            max_turns=context.max_turns,
            dynamic_sampling=context.objective.dynamic_sampling,
        )
        components.register("partial rollouts", self._partial_rollouts)
        self._replay_buffer = ReplayBuffer(settings)
        self._left_recorded = False  # other weights than this run's drew the recorded rollouts
        self._whole: Source = WholePrompts(context.engine, context.scorer, context.max_turns)
        if context.served is not None and context.plays:
            self._whole = HarnessEpisodes(context.served)
        self._continued = ContinuedPrompts(context.engine, context.scorer, self._partial_rollouts)
        # Micro-batch size: 128 tokens share a scale in WGrad, so the bits depend on it.
        self._micro_batch_size = MicroBatchSize.of(settings.train, context.memory.tokens)
        components.register("micro_batches", self._micro_batch_size)
        self._nonfinite = NonFiniteReports(run, context.policy)
        components.register("rollout_sizes", context.engine.sizes)

        # From here on, an interrupted run leaves a checkpoint; load an earlier one if any.
        stack.push(lambda _, error, __: self._save_given_up_step(error))
        if self._resumes:
            self._resume()
        # A run interrupted in its warm-up reports this once the warm-up has loaded its checkpoint.
        if not run.checkpoints.in_supervised_updates:
            run.note_micro_batches(self._micro_batch_size.tokens)
        self._step_notes = StepNotes(run, context.engine, self._micro_batch_size)

    def _resume(self) -> None:
        """Resume from the last intact checkpoint, if there is one."""
        checkpoints, num_steps = self.run.checkpoints, self.settings.loop.steps
        notes: list[str] = []
        if checkpoints.last_step is not None:
            # Create the trainer first: the checkpoint fills its optimizer and critic.
            self._open_trainer(begun=True)
            step, notes = checkpoints.load(self.trainer)
            self.last_step = Step(step)
            self._replay_buffer.load(self.run.directory, step, self.context.prompts)
            self.run.display.show_steps(num_steps, step)
            if step >= num_steps:
                notes.append(
                    f"Nothing to do: all {num_steps} steps are done. To train longer, raise "
                    "loop.steps."
                )
            if any(key.startswith("sft.") for key in self.run.directory.changed_settings):
                notes.append("the supervised updates are done: changes to [sft] have no effect")
        # No step is saved yet: continue the warm-up, or start over.
        elif not checkpoints.in_supervised_updates:
            notes = checkpoints.start_over()
        self.run.display.note(*notes)

    @property
    def trainer(self) -> Trainer:
        """The policy's trainer, created after the warm-up."""
        assert self._trainer is not None, "the warm-up comes first"
        return self._trainer

    def _open_trainer(self, begun: bool = False) -> None:
        """Create the RL trainer, with a new optimizer and the reference frozen at this point."""
        settings, policy, reports = self.settings, self.context.policy, self._nonfinite
        components = self.run.checkpoints.components
        # Freeze the reference: the KL is against the policy at the start of RL.
        reference = build_reference(settings, policy, self.run.directory.path, begun)
        # State of extras is saved next to the policy.
        calibration = ClipCalibration.from_settings(policy, self.context.objective, settings)
        if calibration is not None:
            components.register("clip", calibration)
        critic = draft_head = None
        if (model := value_model(settings, policy)) is not None:
            critic = Critic(model, settings, reports.critic_guard)
            components.learners["critic"] = critic
        if self.context.draft_head is not None:
            draft_head = DraftHeadTraining(self.context.draft_head, settings)
            components.learners["draft_head"] = draft_head
        # In the order in which a step calls them.
        parts: tuple[Extra | None, ...] = (calibration, draft_head, critic)
        distillation = None
        if settings.teacher.path is not None:
            distillation = Distillation(
                teacher=build_teacher(settings, policy),
                settings=settings.teacher,
                temperature=settings.rollout.temperature,
                prompts=self.context.teacher_prompts,
            )
        self._trainer = Trainer(
            policy,
            settings,
            reference,
            extras=[extra for extra in parts if extra is not None],
            micro_batch_size=self._micro_batch_size,
            guard=reports.guard,
            distillation=distillation,
        )

    def _save_given_up_step(self, error: BaseException | None) -> None:
        if isinstance(error, StepGivenUp):
            self.run.stops.decide()  # this rank may not have received the signal
            self._save_last_step()

    def _save_last_step(self) -> None:
        """Save the last complete step of a stopped run."""
        step = self.last_step
        self.run.save_stopped(step.number, self.trainer, step.metrics, step.samples)


class Session(OpenRun):
    """The verbs of the training loop on an open run; `jetrl.loop.train` shows their order."""

    def warm_up(self) -> None:
        """Train on the task's demonstrations if sft.steps > 0, and create the RL trainer."""
        if self._trainer is not None:
            return
        settings, context = self.settings, self.context

        def eval_reward() -> float:
            mean = self._evaluate_policy(0).mean
            context.free_kv_pages()
            return mean

        # The warm-up has its own optimizer, which is then freed.
        if settings.sft.steps or self.run.checkpoints.in_supervised_updates:
            size, reports = self._micro_batch_size, self._nonfinite
            trainer = SftTrainer(context.policy, settings, size, reports.sft_guard)
            updates = SupervisedUpdates(
                self.run,
                trainer,
                draw=drawn_examples(context, demonstration),
                evaluate=eval_reward,
                check_every=settings.sft.checks,
                before_update=reports.expect_updates,
            )
            updates.train()
            self.run.display.show_steps(settings.loop.steps)
        self._open_trainer()

    def evaluate_start(self) -> None:
        """Evaluate before the first step, and write the checkpoint after the warm-up."""
        begun = world().from_first("the metrics", lambda: bool(self.run.directory.metrics("rl")))
        if self.last_step.number > 0 or begun:
            return
        self.run.phases.start_step(0)
        # Step 0 is the model before RL, the baseline for the first steps.
        step = self.evaluate(Step(0))
        if self.settings.sft.steps:
            # This checkpoint replaces those of the warm-up.
            self.run.save(step.number, self.trainer, step.metrics)
        if step.metrics:
            self.run.write_line(step.number, step.metrics)

    # The verbs of a step

    def steps(self) -> Iterator[int]:
        """Yield the number of each remaining step, until the run stops after a step."""
        stops, total = self.run.stops, self.settings.loop.steps
        while self.last_step.number < total and not stops.decide():
            began = time.monotonic()
            yield self.last_step.number + 1
            if self.last_step.number < total:  # a run with all steps done is complete
                stops.check_time(time.monotonic() - began, self.run.checkpoints.ending_s)

    def draw_prompts(self, number: int) -> Step:
        """Begin a step: draw its prompts in the order of data.order.

        With partial rollouts, a step may begin more or fewer prompts than it trains on.
        """
        self.run.phases.start_step(number)
        if self.context.recorded is not None:
            return Step(number, metrics=self.context.noise.begin_step(number))
        # The draw depends only on seed and step, so a resumed run draws the same prompts.
        prompts = self._prompt_order.draw(number, self.settings.rollout.prompts_per_step)
        more = self._partial_rollouts.start_step()
        if more > 0:
            prompts += self.context.prompt_order("oversample").draw(number, more)
        prompts = prompts[: len(prompts) + min(more, 0)]  # negative if too many groups wait
        compare_prompts(number, prompts)
        self.context.scorer.state = TrainerState(number - 1, self.settings.loop.steps)
        return Step(number, prompts=prompts, metrics=self.context.noise.begin_step(number))

    def sample(self, step: Step) -> Step:
        """Sample rollout.samples_per_prompt completions per prompt, with log-probs.

        With partial rollouts, these are the complete ones from this step and earlier steps. With
        data.rollouts, the step gets the samples of the recorded run, which have their scores.
        """
        if self.context.recorded is not None:
            return self._recorded(step, self.context.recorded)
        source, params = self._source, rollout_params(self.settings, step.number, step.round)
        own_part = self._rollout(step.number, can_give_up=source.can_give_up)
        drawn = source.draw(step, params, own_part, self.run.show_progress)
        num_tokens = sum(world().gather("drawn tokens", drawn.rollout_tokens))
        return replace(drawn, rollout_tokens=num_tokens)

    def _recorded(self, step: Step, recorded: RecordedRollouts) -> Step:
        """Return a step with its recorded samples; note the first that other weights drew."""
        number, digest = step.number, self.run.digest.last
        with self.run.phases.phase("rollout"):
            samples, followed = recorded.samples(number, digest, self.context.policy)
        if not followed and not self._left_recorded:
            self._left_recorded = True
            self.run.display.note(
                f"step {number}: other weights than this run's drew the rollouts of "
                f"{recorded.run.path}; from here on it trains off-policy, with exact ratios"
            )
        return replace(step, samples=samples, drawn_samples=samples)

    @property
    def _source(self) -> Source:
        """Source of completions; unfinished ones of an earlier attempt are continued first."""
        return self._continued if self._partial_rollouts.on else self._whole

    def score(self, step: Step) -> Step:
        """Set the reward of every completion; raise RunStopped if none could be scored."""
        if self.context.recorded is not None:
            return step
        assert step.scoring is not None, "nothing was sampled"
        reward, stops = self.context.reward, self.run.stops
        possible = self._source.can_give_up
        with self.run.phases.phase("reward"):
            scores = f"the scores of step {step.number}"
            with ending_together(scores, StepGivenUp), stops.giving_up(possible):
                own_samples = step.scoring.own_samples(step.completions)
            samples = step.scoring.gathered(own_samples)
            if reward is not None:
                if reward.has_model:
                    self.context.free_kv_pages()
                # Ranks share the reward model's forwards, so a failure must end all of them.
                with stops.giving_up(possible and world().size == 1):
                    samples = reward(samples)
        # A failure sets one completion's reward to 0; if all fail, the task is broken.
        failures = [sample.failure for sample in samples if sample.failure]
        if failures:
            logger.warning("%d completions not scored; the first: %s", len(failures), failures[0])
        unusable = any(sample.completion.unusable_reply for sample in samples)
        if len(failures) == len(samples) and not unusable:
            raise RunStopped(
                f"none of the step's {len(samples)} completions could be scored by task "
                f"{self.context.task.label}; the first failure: {failures[0]}"
            )
        # As in TRL, a completion without any reward has no advantage; a step needs some with one.
        # An episode of a harness that failed has none either, and was counted above.
        left_out = [s for s in samples if s.score.reward is None and not s.failure]
        if left_out:
            logger.warning(
                "%d of %d completions have no reward: every reward function returned None, as for "
                "prompt %r",
                len(left_out),
                len(samples),
                left_out[0].prompt.id,
            )
        if len(left_out) == len(samples) and step.round == 1:
            raise RunStopped(
                f"every reward function returned None for all {len(samples)} completions of the "
                f"step, so there is nothing to learn; the first prompt: {left_out[0].prompt.id!r}"
            )
        return replace(step, samples=samples, drawn_samples=samples)

    def sample_dynamically(self, step: Step) -> Step:
        """Replace zero-advantage groups in further sampling rounds (dynamic sampling)."""
        if not self.context.objective.dynamic_sampling or self.context.recorded is not None:
            return step

        # Each round has its own prompt order, so that a resume draws the same prompts.
        def next_round(number: int, num_prompts: int) -> Sequence[Sample]:
            order = self.context.prompt_order(f"prompts again {step.number} {number}")
            prompts = order.draw(1, num_prompts)
            return self.score(self.sample(Step(step.number, number, prompts))).samples

        # Keep groups with an advantage and replace the others, until there are enough or rounds
        # end.
        settings, rounds = self.settings, self.settings.algorithm.dynamic_sampling_rounds
        num_groups, at_least = settings.rollout.prompts_per_step, settings.train.updates_per_step
        samples, drawn, counts = refill(step.samples, num_groups, at_least, rounds, next_round)
        metrics = {f"dynamic_sampling/{name}": float(count) for name, count in counts.items()}
        return replace(
            step,
            round=counts["rounds"],
            samples=samples,
            drawn_samples=drawn,
            rollout_tokens=sum(s.completion.num_sampled for s in drawn),
            metrics={**step.metrics, **metrics},
        )

    def update(self, step: Step) -> Step:
        """Train on the samples: packing, advantages, forward, backward, AdamW, requantization.

        Raises MismatchError with the name of the operation that differs, and the trainer's errors.
        """
        number, phases = step.number, self.run.phases
        # Free KV pages for activations and gradients.
        self.context.free_kv_pages()
        self._nonfinite.expect_updates(number, step.samples)
        # Rollouts and metrics are of the step's own samples; earlier ones are only trained on.
        samples = self._replay_buffer.with_earlier(step.samples)
        compare_samples(number, samples)
        try:
            with phases.phase("update"):
                trained = self.trainer.step(samples, number)
        except StepMismatchError as error:
            # Under an exact plan, a mismatch is a bug: keep the samples and name the operation.
            with ending_together(f"the search for the operation that differs in step {number}"):
                self.run.directory.write_rollouts(number, step.samples)
                sample = error.samples[error.sample_ids[0]]
                where = located(
                    self.context.policy,
                    prompt=sample.inputs,
                    completion=sample.completion.token_ids,
                    temperature=self.settings.rollout.temperature,
                )
                raise MismatchError(f"step {number}: {error}; {where}") from None
        # All ranks applied the same update, so different weights are a fault.
        trainer = self.trainer
        compare_weights(f"after step {number}", *trainer.models, beside=trainer.equal_tensors)
        phases.timings |= trained.timings
        compares_group = self.context.objective.algorithm.compares_group
        # Rewards and lengths cover all samples, including dropped groups.
        drawn = sample_metrics(step.drawn_samples, compares_group)
        metrics = {**drawn, **trained.metrics, **step.metrics}
        metrics |= self._step_notes.on_update(number, metrics)
        return replace(step, trained_samples=samples, metrics=metrics)

    def evaluate(self, step: Step) -> Step:
        """Evaluate on the eval set if due: every eval.every steps, and at the start and end."""
        # Evaluate at the end even if the run has only one or two steps.
        every, last = self.settings.eval.every, self.settings.loop.steps
        if not every or (step.number % every and step.number != last):
            return step
        task = self.context.task
        metrics = eval_metrics(task.label, self._evaluate_policy(step.number), task.partial_credit)
        metrics["timing/eval_s"] = self.run.phases.timings["eval"]
        return replace(step, metrics={**step.metrics, **metrics})

    def record(self, step: Step) -> None:
        """Write the step's rollouts, a checkpoint if due, metrics and console line.

        Raises StorageError if any of them, or the previous checkpoint, could not be written.
        """
        number, run = step.number, self.run
        # The first and last step always keep their rollouts.
        is_last = number == self.settings.loop.steps
        if number % self.settings.rollout.keep_every == 0 or number == 1 or is_last:
            run.directory.write_rollouts(number, step.samples)
        self._replay_buffer.add(number, step.samples)
        # Pass rates count every completion, including dropped groups.
        self._prompt_order.observe(step.drawn_samples)
        metrics = {
            **step.metrics,
            **throughput_metrics(run.phases.timings, step.trained_samples, step.rollout_tokens),
            **largest_of_ranks(run.memory_peaks.take_metrics()),
        }
        # Before the checkpoint, from which a resumed run continues the digest.
        digest = run.digest.advance(
            ("rl", number), models=self.trainer.models, metrics=metrics, samples=step.samples
        )
        if digest is not None:
            metrics["digest/run"] = as_metric(digest)
        run.checkpoints.check()  # raises if the background one has failed
        # Write the checkpoint first: if interrupted in between, a resume writes the metrics line.
        if run.checkpoints.is_due(number) or is_last:
            run.save(number, self.trainer, metrics)
            metrics["timing/checkpoint_s"] = run.phases.timings["checkpoint"]
        metrics["timing/step_s"] = run.phases.step_s
        metrics |= distributed_metrics(metrics, run.phases.waited_s)
        self.last_step = replace(step, metrics=metrics)
        # Write the metrics line last: a step without one is repeated by a resume.
        run.write_line(number, metrics, step.samples, digest=digest)
        self._step_notes.on_record(number, metrics)
        # All are called, also after one that ends the run.
        asked = [callback(StepStats(number, metrics, step.samples)) for callback in self._callbacks]
        if any(asked) and not run.stops.reason:
            run.stops.reason = f"a callback ended the run after step {number}"

    def finish(self, out: str | Path | None = None) -> RunResult:
        """Export the model, also to `out` if given, and end the run.

        Raises KeyboardInterrupt or Terminated if a signal stops the run; its state is saved.
        """
        run, served = self.run, self.context.served
        if served is not None:
            served.answer_held(self.last_step.number)
        # A stopped run saves its last complete step, then raises the signal that stopped it.
        if stopped := run.stops.reason if run.stops.decide() else "":
            self._save_last_step()
            run.stops.raise_signal()
            run.attempt.end("stopped", stopped)
        run.checkpoints.wait()  # the last one may be the best
        best_path = run.checkpoints.best_path
        if self.settings.checkpoint.export == "best":
            run.display.note(run.checkpoints.load_best(self.trainer))
        # Under fp32, export without rounding, so that the exported model is the policy.
        is_fp32 = self.context.policy.plan.reads_masters
        model_path = run.export("float32" if is_fp32 else "bfloat16", out)
        return run.result(
            model_path,
            self.last_step.number,
            stopped=stopped,
            chats=any(encoded.prompt.messages is not None for encoded in self.context.prompts),
            best_path=best_path,
        )

    # Parts of the verbs

    @contextlib.contextmanager
    def _rollout(self, step: int, can_give_up: bool) -> Iterator[None]:
        """Wrap sampling: phase timing, NaN reports, errors of other ranks, and SIGTERM."""
        with (
            self.run.phases.phase("rollout"),
            self._nonfinite.sampling(step),
            ending_together(f"the rollout of step {step}", StepGivenUp),
            self.run.stops.giving_up(can_give_up),
        ):
            if self.context.served is not None:
                self.context.served.answer_held(step - 1)
            yield

    def _evaluate_policy(self, step: int) -> Evaluation:
        """Evaluate the policy on the eval set after a step."""
        context = self.context
        context.scorer.state = TrainerState(step, self.settings.loop.steps)
        with self.run.phases.phase("eval"), self._nonfinite.sampling(step), context.noise.off():
            return evaluate(
                context.engine,
                context.scorer,
                context.eval_prompts,
                params=eval_params(self.settings),
                threshold=self.settings.eval.threshold,
                max_turns=context.max_turns,
                progress=self.run.show_progress,
                play=context.play(step),
            )
