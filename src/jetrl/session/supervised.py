"""Supervised updates: the warm-up before RL, reward-model training, DPO, and raw text.

They differ in trainer, examples and eval metric. Raw text (task `text`) continues the pre-training
of the policy of [model]. DPO (`jetrl sft --task dpo`) trains the policy of
[model] on the same pairs as a reward model. A reward model (`jetrl sft --task reward`) is the
decoder of [model] with a new head or its own, trained on pairs from `Task.preference` and written
as a Hugging Face ...ForSequenceClassification directory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetrl.errors import TimeLimitReached
from jetrl.models.policy import Policy
from jetrl.models.scalar_model import ScalarModel
from jetrl.runs.digest import as_metric
from jetrl.session.building import dpo_reference
from jetrl.session.examples import preference_examples, preference_pair
from jetrl.session.open import TrainingContext, open_pair_context, open_text_context
from jetrl.session.ranks import joined_in_script
from jetrl.session.sampling import EncodedPrompt
from jetrl.session.step import largest_of_ranks
from jetrl.session.training_run import RunResult, TrainingRun, settings_of_attempt
from jetrl.settings.loading import Settings
from jetrl.tasks import Task
from jetrl.training.micro_batches import MicroBatchSize
from jetrl.training.sft import DpoTrainer, Pair, RewardTrainer, SftTrainer, mean_loss, num_tokens_of


@dataclass(frozen=True)
class SupervisedUpdates:
    """The `sft.steps` supervised updates of a run, with early stopping at `sft.until`.

    `draw` returns the examples of an update, from 1. With `carries_place`, a checkpoint has its
    state; others are called again for earlier updates. `evaluate` returns the value compared with
    `sft.until`, after every `check_every` updates if above 0; None if there is nothing to evaluate.
    `eval_metric` is its metric name if the updates are the whole run, whose last update is
    checkpointed; None for a warm-up, after which the run writes a checkpoint itself.
    """

    run: TrainingRun
    trainer: SftTrainer | RewardTrainer | DpoTrainer
    draw: Callable[[int], Sequence[Any]]
    evaluate: Callable[[], float | None]
    check_every: int
    before_update: Callable[[int], None] = lambda update: None
    eval_metric: str | None = None
    carries_place: bool = False

    def train(self) -> float | None:
        """Run the updates from the last checkpoint on; return the last eval value, if any."""
        run, is_whole_run = self.run, self.eval_metric is not None
        update = self._resume()
        # A place in a text came with the checkpoint; prompts are functions of the update.
        for earlier in range(1, 1 if self.carries_place else update + 1):
            self.draw(earlier)  # a task may be stateful
        value = self._eval_value(update)
        while not self._is_over(update, value):
            update += 1
            # One update, its metrics line, and a checkpoint if due.
            run.phases.start_step(update if is_whole_run else 0)  # a warm-up precedes step 1
            # Tell guards which update they watch.
            self.before_update(update)
            with run.phases.phase("sft"):
                examples = self.draw(update)
                metrics = self.trainer.step(examples)
            metrics["timing/step_s"] = seconds = run.phases.timings["sft"]
            num_tokens = sum(map(num_tokens_of, examples))
            metrics["throughput/train_tokens_per_s"] = num_tokens / seconds
            metrics |= largest_of_ranks(run.memory_peaks.take_metrics())
            if self.eval_metric is not None:  # evaluated now, as part of the metrics line
                value = self._eval_value(update)
                if value is not None:
                    metrics[self.eval_metric] = value
            digest = run.digest.advance(("sft", update), [run.context.model], metrics)
            if digest is not None:
                metrics["digest/run"] = as_metric(digest)
            # Write metrics before the checkpoint: a resume drops lines after its checkpoint.
            run.write_line(update, metrics, phase="sft", digest=digest)
            # This may request a stop; all ranks decide together.
            run.stops.check_time(metrics["timing/step_s"], run.checkpoints.ending_s)
            self._save_or_stop(update, is_last=is_whole_run and self._is_over(update, value))
            if not is_whole_run:  # evaluated after saving: a run that stops does not wait
                value = self._eval_value(update)
        return value

    def _resume(self) -> int:
        """Load the last checkpoint, if any; return the number of completed updates."""
        run, trainer = self.run, self.trainer
        update, notes = run.checkpoints.load_supervised(run.context.model, trainer.optimizer)
        title = _TITLES.get(self.eval_metric or "", "sft")
        run.display.show_updates(title, run.settings.sft.steps, update)
        run.display.note(*notes)
        if update > 0:  # the micro-batch size comes from the checkpoint
            run.note_micro_batches(trainer.micro_batch_size.tokens)
        return update

    def _eval_value(self, update: int) -> float | None:
        """Return the eval value if it is due after an update, else None."""
        sft = self.run.settings.sft
        due = self.check_every > 0 and update > 0 and update % self.check_every == 0
        if self.eval_metric is not None:
            return self.evaluate() if due or update >= sft.steps else None
        if not due:
            return None
        value = self.evaluate()
        assert value is not None, "a warm-up has eval prompts"
        self.run.display.note(f"eval reward {value:.3f} after {update} supervised updates")
        return value

    def _is_over(self, update: int, value: float | None) -> bool:
        sft = self.run.settings.sft
        good_enough = sft.until is not None and value is not None and value >= sft.until
        return good_enough or update >= sft.steps

    def _save_or_stop(self, update: int, is_last: bool) -> None:
        """Write a checkpoint if due, and stop the run if requested."""
        run, checkpoints = self.run, self.run.checkpoints
        stops = run.stops.decide()
        if checkpoints.is_due(update) or stops or is_last:
            with run.phases.phase("checkpoint"):
                checkpoints.save_supervised(update, run.context.model, self.trainer.optimizer)
        # The update is saved; the exception tells how the run ended.
        if stops and not is_last:
            checkpoints.wait()
            run.stops.raise_signal()
            raise TimeLimitReached(f"{run.stops.reason}; continue with --resume")


_TITLES = {
    "reward_model/eval_accuracy": "reward model",
    "dpo/eval_accuracy": "dpo",
    "text/eval_loss": "raw text",
}


def drawn_examples(
    context: TrainingContext, example_of: Callable[[Task, Any, EncodedPrompt], Any]
) -> Callable[[int], list[Any]]:
    """Return a function from an update to its examples, one for each prompt."""
    # Use a separate prompt order, so that RL draws the same prompts with or without a warm-up.
    order, count = context.prompt_order("sft"), context.settings.sft.examples_per_step
    task, model = context.task, context.model
    return lambda update: [example_of(task, model, each) for each in order.draw(update, count)]


@dataclass(frozen=True)
class PairResult:
    """Outcome of training on pairs; `accuracy`: fraction of eval pairs ranked correctly."""

    run_path: Path
    model_path: Path
    accuracy: float
    pairs: int


def train_dpo(
    settings: Settings, out: str | Path | None = None, resume: bool = False
) -> PairResult:
    """Train a policy on pairs of completions by DPO, like `train_reward_model`."""
    with joined_in_script(settings, resume) as resumed:
        return _train(settings, out, resumed, dpo=True)


def train_reward_model(
    settings: Settings, out: str | Path | None = None, resume: bool = False
) -> PairResult:
    """Train a reward model; write it to the run directory, and to `out` if given.

    Runs `sft.steps` updates of `sft.examples_per_step` pairs, or fewer if the accuracy on eval
    pairs reaches `sft.until`. A resumed training has the bits of an uninterrupted one. Raises the
    errors of `loop.train`, and UserError for a task without pairs.
    """
    with joined_in_script(settings, resume) as resumed:
        return _train(settings, out, resumed, dpo=False)


def _train(settings: Settings, out: str | Path | None, resume: bool, dpo: bool) -> PairResult:
    """Train on pairs (see `train_reward_model`) once the ranks are joined."""
    began = time.monotonic()
    settings = settings_of_attempt(settings, resume)
    context = open_pair_context(settings, resume, dpo)
    model = context.model
    size = MicroBatchSize.of(settings.train, context.memory.tokens)
    trainer: RewardTrainer | DpoTrainer
    if isinstance(model, ScalarModel):
        trainer = RewardTrainer(model, settings, size)
    else:
        assert isinstance(model, Policy), "DPO trains a policy"
        reference = dpo_reference(settings, model, context.task.alphabet)
        trainer = DpoTrainer(model, reference, settings, size)
    with contextlib.ExitStack() as stack:
        run = TrainingRun(context, stack, resume, began)
        run.checkpoints.components.register("micro_batches", size)
        run.checkpoints.components.register("guard", trainer.guard)
        if not run.checkpoints.in_supervised_updates:
            run.display.note(*(run.checkpoints.start_over() if resume else []))
            run.note_micro_batches(size.tokens)

        def eval_accuracy() -> float:
            with run.phases.phase("eval"):
                if isinstance(trainer, DpoTrainer):
                    return trainer.accuracy(context.eval_pairs)
                return accuracy(trainer.model, context.eval_pairs, size.tokens)

        updates = SupervisedUpdates(
            run,
            trainer,
            draw=drawn_examples(context, preference_examples if dpo else preference_pair),
            evaluate=eval_accuracy,
            check_every=settings.sft.checks,
            eval_metric="dpo/eval_accuracy" if dpo else "reward_model/eval_accuracy",
        )
        value = updates.train()
        assert value is not None, "the accuracy is measured after the last update"
        # Keep a reward model in FP32: BF16 scores would misorder close completions.
        rounds = dpo and not model.plan.reads_masters
        model_path = run.export("bfloat16" if rounds else "float32", out)
        return PairResult(run.directory.path, model_path, value, len(context.eval_pairs))


def train_text(
    settings: Settings, out: str | Path | None = None, resume: bool = False
) -> RunResult:
    """Continue the pre-training of a policy on raw text, and write the model, also to `out`.

    Runs `sft.steps` updates of at most `sft.tokens_per_step` tokens. A resumed training continues
    at the same place in the text and has the bits of an uninterrupted one. Raises the errors of
    `loop.train`.
    """
    began = time.monotonic()
    settings = settings_of_attempt(settings, resume)
    context = open_text_context(settings, resume)
    policy, order = context.model, context.order
    size = MicroBatchSize.of(settings.train, context.memory.tokens)
    trainer = SftTrainer(policy, settings, size)
    with contextlib.ExitStack() as stack:
        run = TrainingRun(context, stack, resume, began)
        for name, component in (("micro_batches", size), ("guard", trainer.guard), ("text", order)):
            run.checkpoints.components.register(name, component)
        if not run.checkpoints.in_supervised_updates:
            run.display.note(*(run.checkpoints.start_over() if resume else []))
            run.note_micro_batches(size.tokens)

        def eval_loss() -> float | None:
            with run.phases.phase("eval"):
                return mean_loss(policy, context.eval_examples, size.tokens)

        SupervisedUpdates(
            run,
            trainer,
            draw=order.draw,
            evaluate=eval_loss,
            check_every=settings.eval.every,
            eval_metric="text/eval_loss",
            carries_place=True,
        ).train()
        # Under fp32, export without rounding, so that the exported model is the policy.
        model_path = run.export("float32" if policy.plan.reads_masters else "bfloat16", out)
        return run.result(model_path, settings.sft.steps)


def accuracy(model: ScalarModel, pairs: Sequence[Pair], tokens_at_once: int) -> float:
    """Return the fraction of pairs whose better sequence scores higher."""
    scores = model.scores([sequence for pair in pairs for sequence in pair], tokens_at_once)
    return float((scores[0::2] > scores[1::2]).double().mean())
