"""Supervised updates: the warm-up before the first step, and the training of a reward model.

Both draw examples, make an update of them, write its line and its checkpoint, and look at held-out
data now and then. What differs is the trainer, its examples and what is held out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jetrl.errors import TimeLimitReached
from jetrl.rewards.sampling import EncodedPrompt
from jetrl.session.prompt_order import PromptOrder
from jetrl.session.training_run import TrainingRun
from jetrl.tasks import Task
from jetrl.training import SftTrainer
from jetrl.training.sft import RewardTrainer
from jetrl.types import StepStats


@dataclass(frozen=True)
class SupervisedUpdates:
    """The `sft.steps` supervised updates of a run, or fewer once the held-out value is good enough.

    Attributes:
        held_out: Returns the held-out value that `sft.until` is compared with.
        held_out_metric: The metric of the held-out value. With a metric the updates are the whole
            run: the value is in their lines and known at the end, and the last update is saved.
            None: the updates come before the steps of a run, which saves itself.
    """

    run: TrainingRun
    trainer: SftTrainer | RewardTrainer
    example_of: Callable[[Task, Any, EncodedPrompt], Any]
    held_out: Callable[[], float]
    title: str = "sft"
    held_out_metric: str | None = None
    before_update: Callable[[int], None] = lambda update: None

    def train(self) -> float | None:
        """Make the updates, from the last checkpoint on.

        Returns:
            The held-out value after the last update, None if it was not looked at.

        Raises:
            UserError: The task has no example for a prompt.
            KeyboardInterrupt, Terminated: A signal; the update was finished and saved.
            TimeLimitReached: The time limit; the update was finished and saved.
        """
        run, is_whole_run = self.run, self.held_out_metric is not None
        prompts, weights = run.context.prompts, run.context.task.weights
        order = PromptOrder(run.settings, prompts, weights, use="sft")
        update = self._resume()
        for earlier in range(1, update + 1):
            self._examples(order, earlier)  # a task may count how often it was asked
        value = self._held_out_value(update)
        while not self._is_over(update, value):
            update += 1
            run.phases.start_step(update if is_whole_run else 0)  # a warm-up is before step 1
            self.before_update(update)
            with run.phases.phase("sft"):
                metrics = self.trainer.step(self._examples(order, update))
            metrics["timing/step_s"] = run.phases.timings["sft"]
            if self.held_out_metric is not None:  # looked at now, since it is part of the line
                value = self._held_out_value(update)
                if value is not None:
                    metrics[self.held_out_metric] = value
            stats = StepStats(update, metrics)
            run.directory.write_step(stats, "sft")
            run.display.step(stats)
            run.stops.check_time(metrics["timing/step_s"], run.checkpoints.ending_s)
            self._save_or_stop(update, is_last=is_whole_run and self._is_over(update, value))
            if not is_whole_run:  # looked at when all is saved: a run that stops does not wait
                value = self._held_out_value(update)
        return value

    def _resume(self) -> int:
        """Load the last checkpoint, if the run has one; return the number of updates done."""
        run, trainer = self.run, self.trainer
        update, notes = run.checkpoints.load_supervised(run.context.model, trainer.optimizer)
        run.display.show_updates(self.title, run.settings.sft.steps, update)
        run.display.note(*notes)
        if update > 0:  # the size of micro-batches is the checkpoint's
            run.note_micro_batches(trainer.micro_batch_size.tokens)
        return update

    def _examples(self, order: PromptOrder, update: int) -> list[Any]:
        """Return the examples of an update, counted from 1."""
        context = self.run.context
        prompts = order.draw(update, self.run.settings.sft.examples_per_step)
        return [self.example_of(context.task, context.model, encoded) for encoded in prompts]

    def _held_out_value(self, update: int) -> float | None:
        """Return the held-out value if it is to be looked at after an update, else None.

        A resumed run looks again, since it may have been cut between the update and the look.
        """
        sft = self.run.settings.sft
        due = sft.until is not None and update > 0 and update % sft.check_every == 0
        if self.held_out_metric is not None:
            return self.held_out() if due or update >= sft.steps else None
        if not due:
            return None
        value = self.held_out()
        self.run.display.note(f"held-out reward {value:.3f} after {update} supervised updates")
        return value

    def _is_over(self, update: int, value: float | None) -> bool:
        """Return whether an update was the last one."""
        sft = self.run.settings.sft
        good_enough = sft.until is not None and value is not None and value >= sft.until
        return good_enough or update >= sft.steps

    def _save_or_stop(self, update: int, is_last: bool) -> None:
        """Write the checkpoint after an update if one is due, and stop the run if it is to stop."""
        run, checkpoints = self.run, self.run.checkpoints
        stops = run.stops.decide()
        if checkpoints.is_due(update) or stops or is_last:
            with run.phases.phase("checkpoint"):
                checkpoints.save_supervised(update, run.context.model, self.trainer.optimizer)
        if stops and not is_last:
            checkpoints.wait()
            run.stops.raise_signal()
            raise TimeLimitReached(f"{run.stops.reason}; go on with --resume")
