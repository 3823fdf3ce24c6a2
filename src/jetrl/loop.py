"""The reinforcement learning loop.

Read `train` first: it is the whole of it. Each verb is a method of `Session`, which holds what a
run is made of. `Session.update` is the trainer's step: advantages, packing, forward, backward,
AdamW and requantize, with the mismatch measured before any weight changes.
"""

from __future__ import annotations

from pathlib import Path

from jetrl.session import RunResult, Session
from jetrl.settings.loading import Settings


def train(settings: Settings, resume: bool = False) -> RunResult:
    """Run reinforcement learning to its end (`loop.steps`), or on from its last checkpoint.

    Raises:
        UserError: settings, data or a model that cannot be used, before anything is trained.
        RunStopped: the run ended itself; its report says why. MismatchError is one of these.
        KeyboardInterrupt, Terminated: Ctrl-C, SIGTERM (session/stops.py). The checkpoint and report
            are written; a second signal leaves at once, with the last checkpoint good.
    """
    with Session(settings, resume) as session:
        session.warm_up()
        session.evaluate_start()
        for step in session.steps():
            prompts = session.draw_prompts(step)
            completions = session.sample(prompts, step)
            samples = session.refill(step, session.score(completions))
            metrics = session.update(step, samples)
            metrics |= session.evaluate(step)
            session.record(step, samples, metrics)
        return session.finish()


def sft(settings: Settings, out: str | Path | None = None, resume: bool = False) -> RunResult:
    """Supervised training on the task's worked answers (`sft.steps`); writes the model, also to
    `out` if given.

    Raises:
        As `train`.
    """
    with Session(settings, resume) as session:
        session.warm_up()
        session.evaluate_start()
        return session.finish(out)
