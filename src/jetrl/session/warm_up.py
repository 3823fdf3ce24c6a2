"""The supervised warm-up: updates on the task's worked answers before the first RL step."""

from __future__ import annotations

import time
from collections.abc import Callable

from jetrl.errors import UserError
from jetrl.evaluate import EncodedPrompt
from jetrl.models.chat import encode_text
from jetrl.randomness import derive_seed, draw_indices
from jetrl.session.display import Display
from jetrl.session.opening import Parts
from jetrl.session.stops import Stops
from jetrl.training import SftTrainer
from jetrl.types import StepStats


def warm_up(parts: Parts, display: Display, stops: Stops, held_out: Callable[[], float]) -> None:
    """`sft.steps` updates, or fewer when `held_out`, the held-out mean reward, reaches `sft.until`.

    Raises:
        UserError: the task has no worked answers.
        KeyboardInterrupt: Ctrl-C; the update was finished.
    """
    settings = parts.settings
    sft, steps = settings.sft, settings.sft.steps
    display.open_warm_up(steps)
    trainer = SftTrainer(parts.policy, settings)
    seed = derive_seed(settings.run.seed, "sft")
    for step in range(1, steps + 1):
        chosen = draw_indices(len(parts.prompts), sft.examples_per_step, step, seed)
        began = time.monotonic()
        metrics = trainer.step([_example(parts, parts.prompts[i]) for i in chosen])
        metrics["timing/step_s"] = time.monotonic() - began
        stats = StepStats(step, metrics)
        parts.run.write_step(stats, "sft")
        display.step(stats)
        if stops.interrupted:
            raise KeyboardInterrupt
        if sft.until is not None and step % sft.check_every == 0:
            reached = held_out()
            display.note(f"held-out reward {reached:.3f} after {step} supervised updates")
            if reached >= sft.until:
                break
    display.close()


def _example(parts: Parts, encoded: EncodedPrompt) -> tuple[list[int], list[int]]:
    """(prompt ids, worked answer with its end).

    Raises:
        UserError: the task has no worked answers, or the model no tokenizer to write them in.
    """
    tokenizer = parts.policy.tokenizer
    answer = parts.task.demonstration(encoded.prompt)
    if answer is None or tokenizer is None:
        raise UserError(
            f"supervised training needs worked answers, and task {parts.task.label} has "
            f"none for prompt {encoded.prompt.id!r}; set sft.steps=0, or give the task "
            "a demonstration method"
        )
    ids = encode_text(tokenizer, answer, begin=False)
    if tokenizer.eos_token_id is not None:
        ids = [*ids, tokenizer.eos_token_id]
    return list(encoded.token_ids), ids
