"""The reinforcement learning loop.

`train` is the whole loop. Each verb is a method of `Session`, which holds the models and data of a
run; a verb takes the record of the step (session/step.py) and returns it with more filled in.
`Session.update` is the trainer's step: packing, advantages, forward, backward, AdamW, requantize,
with the mismatch measured before any weight changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jetrl.errors import UserError
from jetrl.session import RunResult, Session
from jetrl.session.from_python import settings_of
from jetrl.session.ranks import joined_in_script
from jetrl.session.session import StepCallback
from jetrl.session.supervised import train_text
from jetrl.settings.loading import Settings


def train(
    settings: Settings | str | Path | None = None,
    resume: bool = False,
    *,
    model: Any = None,
    data: Any = None,
    rewards: Any = (),
    reward_weights: Sequence[float] | None = None,
    task: Any = None,
    callbacks: Sequence[StepCallback] = (),
    **sections: Any,
) -> RunResult:
    """Train with reinforcement learning for `loop.steps` steps, or resume from the last checkpoint.

        train("mine.toml")
        train(model="Qwen/Qwen3-1.7B", rewards=[f, g], data="rows.jsonl", train={"lr": 2e-6})

    In a script that torchrun started as several ranks, this joins the ranks, and an error ends all
    of them with its exit code instead of being raised.

    Args:
        settings: Settings, or a recipe: a file, or a packaged one by name.
        model: The model's directory or hub name.
        data: Rows (dicts), or a file, folder or dataset name.
        rewards: Functions (session/from_python.py), or names of verifiers, such as "math".
        reward_weights: Weight of each reward; default: 1.
        task: A task's name, class or instance, in place of data and rewards.
        callbacks: Functions of (StepStats), called after each step; True ends the run, which
            then writes its checkpoint, model and report.
        sections: Other settings, by section; a dict for `model`, `data` or `task` is that section.

    Raises:
        UserError: The settings, data or model cannot be used; raised before training.
        RunStopped: The run stopped itself, for example with a MismatchError; its report says why.
        KeyboardInterrupt, Terminated: Ctrl-C, SIGTERM; checkpoint and report are written. A second
            signal exits immediately; the last checkpoint is intact.
    """
    if callable(callbacks) or not all(map(callable, callbacks)):
        raise UserError("callbacks: give a list of functions of (StepStats)")
    own = {"model": model, "data": data, "rewards": rewards, "task": task}
    settings = settings_of(settings, **own, reward_weights=reward_weights, **sections)
    with (
        joined_in_script(settings, resume) as resumed,
        Session(settings, resumed, callbacks) as session,
    ):
        session.warm_up()  # supervised, if sft.steps > 0
        session.evaluate_start()
        for number in session.steps():
            step = session.draw_prompts(number)
            step = session.sample(step)
            step = session.score(step)
            step = session.sample_dynamically(step)
            step = session.update(step)
            step = session.evaluate(step)
            session.record(step)
        return session.finish()


def sft(settings: Settings, out: str | Path | None = None, resume: bool = False) -> RunResult:
    """Train on the task's demonstrations, or on raw text (`sft.steps`), and write the model.

    Raises the errors of `train`. The model is also written to `out`, if given.
    """
    if settings.task.is_text:
        with joined_in_script(settings, resume) as resumed:
            return train_text(settings, out, resumed)
    with joined_in_script(settings, resume) as resumed, Session(settings, resumed) as session:
        session.warm_up()
        session.evaluate_start()
        return session.finish(out)
