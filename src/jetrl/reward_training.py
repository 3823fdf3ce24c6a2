"""A reward model from pairs of completions: `jetrl sft --task reward`.

The pairs are the task's (`Task.preference`); the model is [model]'s decoder with a new head, or its
own head where it has one. It is trained in the flow of [precision], and written as a Hugging Face
...ForSequenceClassification directory.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetrl.building import build_scalar_model
from jetrl.config import Settings
from jetrl.errors import UserError
from jetrl.evaluate import EncodedPrompt, encode_prompts
from jetrl.models.chat import encode_turns
from jetrl.precision import PrecisionPlan
from jetrl.runs import Console, RunDirectory
from jetrl.scalar_model import ScalarModel
from jetrl.session.drawing import Drawing
from jetrl.tasks import Task, get_task
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


def train_reward_model(settings: Settings, out: str | Path | None = None) -> RewardResult:
    """`sft.steps` updates of `sft.examples_per_step` pairs, or fewer when the accuracy on held-out
    pairs reaches `sft.until`, looked at every `sft.check_every`. Writes RUN/model, and `out`.

    Raises:
        UserError: settings, data or a model that cannot be used; a task without pairs.
        NonFiniteError: the gradient is not finite.
    """
    RunDirectory.check_name(settings, resume=False)
    plan = PrecisionPlan.from_settings(settings.precision)
    wanted, sft = settings.task, settings.sft
    options: dict[str, Any] = dict(wanted.options)
    task = get_task(wanted.name, path=wanted.path, **options)
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
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(RunDirectory.create(settings, plan.to_dict(), resume=False))
        notes = {"plan": plan.name, "device": str(model.device)}
        stack.enter_context(run.attempt(sys.argv, notes))
        console = Console(sft.steps, title="reward model", samples_every=0, lines_every=25)
        stack.callback(console.close)
        for step in range(1, sft.steps + 1):
            began = time.monotonic()
            chosen = drawing.draw(step, sft.examples_per_step)
            metrics = trainer.step([_pair(model, task, encoded) for encoded in chosen])
            metrics["timing/step_s"] = time.monotonic() - began
            last = step == sft.steps
            if last or (sft.until is not None and step % sft.check_every == 0):
                reached = accuracy(model, held_out, settings.train.tokens_per_micro_batch)
                metrics["reward_model/eval_accuracy"] = reached
                last = last or (sft.until is not None and reached >= sft.until)
            stats = StepStats(step, metrics)
            run.write_step(stats, "sft")
            console.step(stats)
            if last:
                break
        target = run.path / "model"
        model.save_pretrained(target, dtype="float32", overwrite=True)
        if out is not None:
            model.save_pretrained(out, dtype="float32")
        return RewardResult(run.path, target, reached, len(held_out))


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
