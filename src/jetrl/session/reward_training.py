"""A reward model from pairs of completions: `jetrl sft --task reward`.

The pairs are the task's (`Task.preference`); the model is [model]'s decoder with a new head, or its
own head where it has one. It is trained in the flow of [precision], and written as a Hugging Face
...ForSequenceClassification directory.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jetrl.errors import TimeLimitReached
from jetrl.memory.device import free_bytes
from jetrl.memory.fitting import Fitted, check_fits
from jetrl.memory.out_of_memory import explained
from jetrl.memory.plan import OtherModels, Workload
from jetrl.models.chat import decode
from jetrl.models.scalar_model import ScalarModel
from jetrl.precision import PrecisionPlan
from jetrl.rewards.sampling import EncodedPrompt, encode_prompts
from jetrl.runs import Console, RunDirectory
from jetrl.session.building import build_scalar_model, choose_device, model_config
from jetrl.session.checkpoints import RunCheckpoints
from jetrl.session.memory_peaks import size_notes, tell_plan
from jetrl.session.open import Reporting, open_observers
from jetrl.session.phases import Phases
from jetrl.session.preference_pairs import PairFacts, look_at_pairs, preference_pair
from jetrl.session.prompt_order import PromptOrder
from jetrl.session.stop_signals import StopSignals
from jetrl.settings.loading import Settings
from jetrl.tasks import Task, build_task
from jetrl.training.extras.reward_model import Pair, RewardTrainer
from jetrl.training.micro_batches import MicroBatchSize
from jetrl.types import Prompt, StepStats

PROMPTS = 4  # of which a preflight shows the pairs


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
    began = time.monotonic()
    RunDirectory.check_name(settings, resume=resume)
    parts = _open(settings)
    task, model, sft = parts.task, parts.model, settings.sft
    size = MicroBatchSize.of(settings.train, parts.memory.tokens)
    trainer = RewardTrainer(model, settings, size)
    drawing = PromptOrder(settings, parts.prompts, task.weights, use="sft")

    def pairs(update: int) -> list[Pair]:
        chosen = drawing.draw(update, sft.examples_per_step)
        return [preference_pair(task, model, encoded) for encoded in chosen]

    def held_out_accuracy() -> float:
        return accuracy(model, parts.held_out, trainer.micro_batch_size.tokens)

    with contextlib.ExitStack() as stack:
        run = RunDirectory.create(settings, model.plan.to_dict(), resume=resume)
        if settings.report.enabled:
            stack.push(Reporting(run.path))  # last, when the run's end is recorded
        stack.enter_context(run)
        notes = {"plan": model.plan.name, "device": str(model.device)}
        stack.enter_context(run.attempt(sys.argv, notes))
        phases = Phases()
        training = _Training(settings, run, trainer, parts, began, pairs, held_out_accuracy, phases)
        reached = _train(training, resume, stack)
        target = run.path / "model"
        with phases.phase("export"):
            model.save_pretrained(target, dtype="float32", overwrite=True)
            if out is not None:
                model.save_pretrained(out, dtype="float32")
        return RewardResult(run.path, target, reached, len(parts.held_out))


@dataclass(frozen=True)
class _Parts:
    """What a training is made of. prompts: to be trained on, encoded. held_out: pairs. facts: of
    the pairs that are trained on. memory: what it will hold. opened: how long it took to load the
    model."""

    task: Task
    model: ScalarModel
    prompts: list[EncodedPrompt]
    held_out: list[Pair]
    facts: PairFacts
    memory: Fitted
    opened: str


def _open(settings: Settings) -> _Parts:
    """All that can be wrong with settings, data and model is found here, before anything is
    written."""
    plan, wanted = PrecisionPlan.from_settings(settings.precision), settings.task
    device = choose_device(settings.run.device)
    free = free_bytes(device)
    planned_memory(settings, 1, device, free)  # what does not fit so fits with no pairs
    task = build_task(wanted)
    began = time.monotonic()
    with explained("loading the model", "`jetrl sft --task reward --dry-run` prints what it holds"):
        model = build_scalar_model(settings, plan, task)
    opened = f"models loaded in {time.monotonic() - began:.1f} s"
    system = wanted.system_prompt
    prompts = encode_prompts(model, task, wanted.split, system_prompt=system)
    held_out = [
        preference_pair(task, model, encoded)
        for encoded in encode_prompts(model, task, wanted.eval_split, settings.eval.prompts, system)
    ]
    facts = look_at_pairs(build_task(wanted), model, prompts)
    longest = max(facts.longest, *(len(sequence) for pair in held_out for sequence in pair))
    memory = planned_memory(settings, longest, device, free)
    return _Parts(task, model, prompts, held_out, facts, memory, opened)


def planned_memory(settings: Settings, longest: int, device: str, free: int | None) -> Fitted:
    """The memory plan of a training on sequences of at most `longest` tokens.

    Raises:
        UserError: as `memory.check_fits`.
    """
    config, load = model_config(settings).with_scalar_head(), Workload.of_pairs(settings, longest)
    return check_fits(settings, config, OtherModels(), load, device, free)


@dataclass(frozen=True)
class ShownCompletion:
    """A completion as the model reads it, its tokens, and its score before training."""

    text: str
    tokens: int
    score: float


@dataclass(frozen=True)
class ShownPair:
    """A prompt and its two completions, the better one first."""

    prompt: Prompt
    completions: tuple[ShownCompletion, ...]


@dataclass(frozen=True)
class Preflight:
    """pairs: the first of the first update. facts: of all. warnings: what would keep a model from
    learning, in words."""

    pairs: tuple[ShownPair, ...]
    facts: PairFacts
    warnings: tuple[str, ...]


def preflight(settings: Settings) -> Preflight:
    """A look at a training before it begins. Nothing is written and nothing is trained.

    Raises:
        UserError: as `train_reward_model`.
    """
    parts = _open(settings)
    model, facts, tokenizer = parts.model, parts.facts, parts.model.tokenizer
    assert tokenizer is not None, "pairs were encoded"
    drawing = PromptOrder(settings, parts.prompts, parts.task.weights, use="sft")
    shown: list[ShownPair] = []
    for encoded in drawing.draw(1, min(PROMPTS, settings.sft.examples_per_step)):
        pair = preference_pair(parts.task, model, encoded)
        answers = [sequence[len(encoded.token_ids) :] for sequence in pair]
        scores = model.scores(pair, parts.memory.tokens).tolist()
        completions = tuple(
            ShownCompletion(decode(tokenizer, answer), len(answer), score)
            for answer, score in zip(answers, scores, strict=True)
        )
        shown.append(ShownPair(encoded.prompt, completions))
    warnings = []
    if facts.equal:
        warnings.append(
            f"{facts.equal} of {facts.count} pairs are the same completion twice: nothing is "
            "learnt from them"
        )
    return Preflight(tuple(shown), facts, tuple(warnings))


@dataclass(frozen=True)
class _Training:
    """What the updates are made of. began: the attempt, by time.monotonic. pairs: of an update,
    from 1. accuracy: on held-out pairs."""

    settings: Settings
    run: RunDirectory
    trainer: RewardTrainer
    parts: _Parts
    began: float
    pairs: Callable[[int], list[Pair]]
    accuracy: Callable[[], float]
    phases: Phases


def _train(training: _Training, resume: bool, stack: contextlib.ExitStack) -> float:
    """The updates that are still to do, with their lines and checkpoints. Returns the accuracy."""
    settings, run, trainer = training.settings, training.run, training.trainer
    sft, phases = settings.sft, training.phases
    stops = StopSignals(settings.run.max_hours, run.history().elapsed_s, training.began)
    stack.enter_context(stops.signals())
    saved = RunCheckpoints(run, settings)

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
    parts, wanted = training.parts, settings.train.tokens_per_micro_batch
    tell_plan(parts.memory, parts.opened, trainer.model.device, console.note)
    notes += size_notes(parts.memory, trainer.micro_batch_size.tokens, wanted)
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
        stops.check_time(metrics["timing/step_s"], saved.ending_s)
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
