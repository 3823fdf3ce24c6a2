"""A reward model from pairs of completions: `jetrl sft --task reward`.

The pairs are the task's (`Task.preference`); the model is [model]'s decoder with a new head, or its
own head where it has one. It is trained in the flow of [precision], and written as a Hugging Face
...ForSequenceClassification directory.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jetrl.building import build_scalar_model
from jetrl.config import Settings
from jetrl.errors import TimeLimitReached, UserError
from jetrl.evaluate import EncodedPrompt, encode_prompts
from jetrl.models.chat import encode_turns
from jetrl.out_of_memory import explained
from jetrl.precision import PrecisionPlan
from jetrl.runs import Console, RunDirectory
from jetrl.scalar_model import ScalarModel
from jetrl.session.drawing import Drawing
from jetrl.session.opening import Reporting, open_observers
from jetrl.session.phases import Phases
from jetrl.session.saved import Saved
from jetrl.session.stops import Stops
from jetrl.tasks import Task, build_task
from jetrl.training.reward import Pair, RewardTrainer
from jetrl.types import StepStats, Turn


@dataclass(frozen=True)
class RewardResult:
    """What a training left. accuracy: held-out pairs whose better completion scores higher, as
    share; pairs: how many there are."""

    run_path: Path
    model_path: Path
    accuracy: float
    pairs: int


def train_reward_model(
    settings: Settings, out: str | Path | None = None, resume: bool = False
) -> RewardResult:
    """`sft.steps` updates of `sft.examples_per_step` pairs, or fewer when the accuracy on held-out
    pairs reaches `sft.until`, looked at every `sft.check_every`. Writes RUN/model, and `out`.

    resume: goes on from the last checkpoint, with the bits of an uncut training.

    Raises:
        UserError: settings, data or a model that cannot be used; a task without pairs.
        NonFiniteError: the loss or gradient is not finite (train.on_nonfinite).
        OutOfMemoryStop: memory ran out with one pair in a micro-batch.
        KeyboardInterrupt, Terminated: a signal; the update was finished, its checkpoint written.
        TimeLimitReached: run.max_hours; likewise.
    """
    RunDirectory.check_name(settings, resume=resume)
    plan = PrecisionPlan.from_settings(settings.precision)
    wanted, sft = settings.task, settings.sft
    task = build_task(wanted)
    with explained("loading the model", "use a smaller one, or a device with more memory"):
        model = build_scalar_model(settings, plan, task)
    system = wanted.system_prompt
    prompts = encode_prompts(model, task, wanted.split, system_prompt=system)
    limit = settings.eval.prompts
    held_out = [
        _pair(model, task, encoded)
        for encoded in encode_prompts(model, task, wanted.eval_split, limit, system)
    ]
    trainer = RewardTrainer(model, settings)
    drawing = Drawing(settings, prompts, task.weights, use="sft")

    def pairs(update: int) -> list[Pair]:
        chosen = drawing.draw(update, sft.examples_per_step)
        return [_pair(model, task, encoded) for encoded in chosen]

    def held_out_accuracy() -> float:
        return accuracy(model, held_out, trainer.micro_batch_size.tokens)

    with contextlib.ExitStack() as stack:
        run = RunDirectory.create(settings, plan.to_dict(), resume=resume)
        if settings.report.enabled:
            stack.push(Reporting(run.path))  # last, when the run's end is recorded
        stack.enter_context(run)
        notes = {"plan": plan.name, "device": str(model.device)}
        stack.enter_context(run.attempt(sys.argv, notes))
        phases = Phases()
        training = _Training(settings, run, trainer, pairs, held_out_accuracy, phases)
        reached = _train(training, resume, stack)
        target = run.path / "model"
        with phases.phase("export"):
            model.save_pretrained(target, dtype="float32", overwrite=True)
            if out is not None:
                model.save_pretrained(out, dtype="float32")
        return RewardResult(run.path, target, reached, len(held_out))


@dataclass(frozen=True)
class _Training:
    """What the updates are made of. pairs: of an update, from 1. accuracy: on held-out pairs."""

    settings: Settings
    run: RunDirectory
    trainer: RewardTrainer
    pairs: Callable[[int], list[Pair]]
    accuracy: Callable[[], float]
    phases: Phases


def _train(training: _Training, resume: bool, stack: contextlib.ExitStack) -> float:
    """The updates that are still to do, with their lines and checkpoints. Returns the accuracy."""
    settings, run, trainer = training.settings, training.run, training.trainer
    sft, phases = settings.sft, training.phases
    stops = Stops(settings.run.max_hours, run.history().elapsed_s)
    stack.enter_context(stops.signals())
    saved = Saved(run, settings)

    def cut(kind: object, error: BaseException | None, trace: object) -> None:
        """After an error the checkpoint on its way is still written."""
        if error is not None and not stops.at_once:
            saved.settle()

    stack.push(cut)
    saved.register("micro_batches", trainer.micro_batch_size)
    saved.register("guard", trainer.guard)
    step, notes = saved.load_warm_up(trainer.model, trainer.optimizer)
    if resume and step == 0:
        notes = saved.begin_anew()
    console = Console(
        sft.steps, first_step=step, title="reward model", samples_every=0, lines_every=25
    )
    stack.callback(console.close)
    for note in (*run.notes, *notes):
        console.note(note)
    phases.observers += open_observers(settings, run, stack)

    def look(step: int) -> float | None:
        """The accuracy, where it is to be looked at."""
        due = sft.until is not None and step and step % sft.check_every == 0
        if not due and step < sft.steps:
            return None
        with phases.phase("eval"):
            return training.accuracy()

    def is_over(step: int, reached: float | None) -> bool:
        enough = sft.until is not None and reached is not None and reached >= sft.until
        return enough or step >= sft.steps

    for update in range(1, step + 1):
        training.pairs(update)  # a task may give others each time: it counts them from the start
    reached = look(step)
    while not is_over(step, reached):
        step += 1
        phases.start_step(step)
        with phases.phase("sft"):
            metrics = trainer.step(training.pairs(step))
        metrics["timing/step_s"] = phases.timings["sft"]
        reached = look(step)
        if reached is not None:
            metrics["reward_model/eval_accuracy"] = reached
        stats = StepStats(step, metrics)
        run.write_step(stats, "sft")
        console.step(stats)
        stops.check_time(metrics["timing/step_s"])
        over = is_over(step, reached)
        if saved.is_due(step) or stops.reason or over:
            with phases.phase("checkpoint"):
                saved.save_warm_up(step, trainer.model, trainer.optimizer)
        if stops.reason and not over:
            saved.wait()
            stops.raise_signal()
            raise TimeLimitReached(f"{stops.reason}; go on with --resume")
    saved.wait()
    assert reached is not None, "what ends it is looked at"
    return reached


def accuracy(model: ScalarModel, pairs: Sequence[Pair], tokens_at_once: int) -> float:
    """Share of the pairs whose better sequence scores higher."""
    scores = model.scores([sequence for pair in pairs for sequence in pair], tokens_at_once)
    return float((scores[0::2] > scores[1::2]).double().mean())


def _pair(model: ScalarModel, task: Task, encoded: EncodedPrompt) -> Pair:
    """The task's two completions of a prompt as whole sequences, each with its end."""
    found = task.preference(encoded.prompt)
    if found is None or model.tokenizer is None:
        raise UserError(
            f"a reward model learns from pairs of completions, and task {task.label} has none for "
            f"prompt {encoded.prompt.id!r}; give the task a preference method, or the data set's "
            "fields in task.options.chosen and task.options.rejected"
        )
    where = f"prompt {encoded.prompt.id!r}"
    examples = [
        encode_turns(model.tokenizer, encoded.token_ids, [Turn(text)], where) for text in found
    ]
    better, worse = ((*example.prompt, *example.completion) for example in examples)
    return better, worse
