"""The supervised warm-up: updates on the task's worked answers before the first RL step."""

from __future__ import annotations

from collections.abc import Callable

from jetrl.errors import TimeLimitReached
from jetrl.session.checkpoints import RunCheckpoints
from jetrl.session.display import Display
from jetrl.session.memory_peaks import size_notes
from jetrl.session.open import RunContext
from jetrl.session.phases import Phases
from jetrl.session.prompt_order import PromptOrder
from jetrl.session.safeguards import Safeguards
from jetrl.session.stop_signals import StopSignals
from jetrl.session.worked_answers import worked_answer
from jetrl.settings.loading import Settings
from jetrl.training import SftTrainer
from jetrl.types import Example, StepStats


def warm_up(
    parts: RunContext,
    display: Display,
    phases: Phases,
    stops: StopSignals,
    saved: RunCheckpoints,
    safeguards: Safeguards,
    held_out: Callable[[], float],
) -> None:
    """`sft.steps` updates, or fewer when `held_out`, the held-out mean reward, reaches `sft.until`.
    A run that was cut in its warm-up goes on from its last checkpoint.

    Raises:
        UserError: the task has no worked answers.
        KeyboardInterrupt, Terminated: a signal; the update was finished, its checkpoint written.
        TimeLimitReached: run.max_hours; likewise.
    """
    settings = parts.settings
    sft, last = settings.sft, settings.sft.steps
    trainer = SftTrainer(parts.policy, settings, safeguards.micro_batch_size, safeguards.sft_guard)
    step, notes = saved.load_warm_up(parts.policy, trainer.optimizer)
    if notes:  # it goes on with the sizes that it had
        wanted = settings.train.tokens_per_micro_batch
        notes += size_notes(parts.memory, trainer.micro_batch_size.tokens, wanted)
    display.open_warm_up(last, step)
    for note in notes:
        display.note(note)
    drawing = PromptOrder(settings, parts.prompts, parts.task.weights, use="sft")

    def examples(update: int) -> list[Example]:
        chosen = drawing.draw(update, sft.examples_per_step)
        return [worked_answer(parts.task, parts.policy, encoded) for encoded in chosen]

    for update in range(1, step + 1):
        examples(update)  # a task may give another answer each time: it counts them from the start
    while not _is_enough(settings, step, display, held_out) and step < last:
        step += 1
        with phases.phase("sft"), safeguards.update(step):
            metrics = trainer.step(examples(step))
        metrics["timing/step_s"] = phases.timings["sft"]
        stats = StepStats(step, metrics)
        parts.run.write_step(stats, "sft")
        display.step(stats)
        stops.check_time(metrics["timing/step_s"], saved.ending_s)
        if saved.is_due(step) or stops.reason:
            saved.save_warm_up(step, parts.policy, trainer.optimizer)
        if stops.reason:
            saved.wait()
            stops.raise_signal()
            raise TimeLimitReached(f"{stops.reason}; go on with --resume")
    display.close()


def _is_enough(
    settings: Settings, step: int, display: Display, held_out: Callable[[], float]
) -> bool:
    """Whether the held-out mean reward has reached `sft.until`. Looked at before an update, so that
    a run resumed between an update and the look does not miss it."""
    sft = settings.sft
    if sft.until is None or step == 0 or step % sft.check_every:
        return False
    reached = held_out()
    display.note(f"held-out reward {reached:.3f} after {step} supervised updates")
    return reached >= sft.until
