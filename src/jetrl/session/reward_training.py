"""A reward model from pairs of completions: `jetrl sft --task reward`.

The pairs are the task's (`Task.preference`); the model is [model]'s decoder with a new head, or its
own head where it has one. It is trained in the flow of [precision], and written as a Hugging Face
...ForSequenceClassification directory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jetrl.distributed.world import world
from jetrl.memory.out_of_memory import explained
from jetrl.models.scalar_model import ScalarModel
from jetrl.runs import RunDirectory
from jetrl.session.building import build_scalar_model
from jetrl.session.examples import preference_pair
from jetrl.session.open import RewardContext, check_pairs
from jetrl.session.ranks import joined_in_script
from jetrl.session.results import RewardResult
from jetrl.session.supervised import SupervisedUpdates
from jetrl.session.training_run import TrainingRun
from jetrl.settings.loading import Settings
from jetrl.training.micro_batches import MicroBatchSize
from jetrl.training.sft import Pair, RewardTrainer


def train_reward_model(
    settings: Settings, out: str | Path | None = None, resume: bool = False
) -> RewardResult:
    """Train a reward model, and write it into the run directory.

    It makes `sft.steps` updates of `sft.examples_per_step` pairs, or fewer when the accuracy on
    held-out pairs reaches `sft.until`, looked at every `sft.check_every`.

    Args:
        out: A second directory to write the model to; None: none.
        resume: Whether to resume from the last checkpoint, with the bits of an uncut training.

    Raises:
        UserError: Settings, data or a model that cannot be used; a task without pairs.
        NonFiniteError: The loss or gradient is not finite (train.on_nonfinite).
        OutOfMemoryStop: Memory ran out with one pair in a micro-batch.
        KeyboardInterrupt, Terminated: A signal; the update was finished, its checkpoint written.
        TimeLimitReached: The time limit; the update was finished, its checkpoint written.
    """
    with joined_in_script(settings, resume) as resumed:
        return _train(settings, out, resumed)


def _train(settings: Settings, out: str | Path | None, resume: bool) -> RewardResult:
    """Train a reward model as `train_reward_model` says, once the ranks are joined."""
    began = time.monotonic()
    given = settings
    if resume:
        settings = world().from_first(
            "the run's settings", lambda: RunDirectory.settings_of_resume(given)
        )
    context = open_reward_context(settings, resume)
    size = MicroBatchSize.of(settings.train, context.memory.tokens)
    trainer = RewardTrainer(context.model, settings, size)
    with contextlib.ExitStack() as stack:
        run = TrainingRun(settings, context, stack, resume, began)
        run.checkpoints.register("micro_batches", size)
        run.checkpoints.register("guard", trainer.guard)
        if not run.checkpoints.in_supervised_updates:
            run.display.note(*(run.checkpoints.start_over() if resume else []))
            run.note_micro_batches(size.tokens)

        def held_out_accuracy() -> float:
            with run.phases.phase("eval"):
                return accuracy(context.model, context.held_out, size.tokens)

        updates = SupervisedUpdates(
            run,
            trainer,
            preference_pair,
            held_out_accuracy,
            title="reward model",
            held_out_metric="reward_model/eval_accuracy",
        )
        value = updates.train()
        assert value is not None, "the accuracy is looked at after the last update"
        model_path = run.export("float32", out)
        return RewardResult(run.directory.path, model_path, value, len(context.held_out))


def open_reward_context(settings: Settings, resume: bool | None = None) -> RewardContext:
    """Check the training of a reward model, then load its model.

    Args:
        resume: As of `check_pairs`.

    Raises:
        UserError: As `check_pairs`; weights that cannot be used.
    """
    checked = check_pairs(settings, resume)
    began = time.monotonic()
    with explained("loading the model", "`jetrl sft --task reward --dry-run` prints what it holds"):
        model = build_scalar_model(settings, checked.model.plan, checked.task.alphabet)
    loading = f"models loaded in {time.monotonic() - began:.1f} s"
    return replace(checked, model=model, loading=loading)


def accuracy(model: ScalarModel, pairs: Sequence[Pair], tokens_at_once: int) -> float:
    """Return the share of pairs whose better sequence scores higher."""
    scores = model.scores([sequence for pair in pairs for sequence in pair], tokens_at_once)
    return float((scores[0::2] > scores[1::2]).double().mean())
