"""The same step twice, with speculation off and with drafts that are right by a chosen chance.

The weights are random, so no text would be a good draft. The completions of the step without
speculation, with wrong tokens among them (`_known_drafts`), are the drafts of the other step, which
draws the same tokens of the same weights. For that its first update must leave the weights as they
are: the learning rate of that update is zero, its work is the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from benchmarks._flow import Choices, Flow
from benchmarks._known_drafts import KnownDrafts, differences, width_rows
from benchmarks._load import Load
from benchmarks._timing import Row
from benchmarks._whole_step import TimedRollout, draw, step_row, train, warmed

from jetrl.models.policy import Policy
from jetrl.rollout.engine import RolloutEngine
from jetrl.training import Trainer

_WARM_TOKENS = 64  # Of each completion in the call with drafts before the one that is timed.


def measure_with_drafts(
    policy: Policy,
    load: Load,
    choices: Choices,
    limit: float,
    one_update: bool = False,
    mode: str = "auto",
) -> Iterator[Row]:
    """Yield the row of a step with speculation off, and then that of the same step with drafts.

    Seconds of both rollouts are without the capture of graphs in them, as `late_capture_s`.

    Args:
        policy: The policy under the plan.
        load: The prompts and completions of the step.
        choices: The choices that are the same for all plans; `drafts_right` is the chance of a
            drafted token to be right.
        limit: The FLOP/s that MFU is a share of.
        one_update: Whether to make the update once, of the first rollout; it is that of both rows.
        mode: "auto", or "text" to verify drafts in every forward.
    """
    right = choices.drafts_right
    assert right is not None, "no drafts"
    flow, changed = warmed(policy, load, choices)
    off = _without_capture(draw(flow))
    with _weights_kept(flow.trainer):
        update = train(flow, off.samples)
    updates = 1 if one_update else 2
    plain = step_row(flow, choices, limit, off, update, changed)
    yield {**plain, **_drafting(off, off), "updates": updates}
    plain_engine = flow.engine  # Kept, so that its graphs are not collected before their memory.
    drafts = _use_drafts(flow, off, right, mode)
    on = _without_capture(draw(flow))
    own = update if one_update else train(flow, on.samples)
    del plain_engine
    row = step_row(flow, choices, limit, on, own, changed)
    yield {
        **row,
        **_drafting(on, off),
        "updates": updates,
        "speculation": mode,
        "right": right,
        "widths": width_rows(drafts.spent),
        "times_off": {
            "rollout": round(plain["seconds"]["rollout"] / row["seconds"]["rollout"], 3),
            "step": round(plain["step_s"] / row["step_s"], 3),
        },
    }


def _without_capture(rollout: TimedRollout) -> TimedRollout:
    """Return a rollout whose seconds leave out those of capturing graphs."""
    seconds = dict(rollout.seconds)
    seconds["rollout"] -= rollout.stats.capture_s
    return replace(rollout, seconds=seconds)


@contextlib.contextmanager
def _weights_kept(trainer: Trainer) -> Iterator[None]:
    """Make updates of the block leave the master weights as they are: at a learning rate of 0."""
    optimizer = trainer.optimizer
    settings = optimizer.settings
    optimizer.settings = settings.model_copy(update={"lr": 0.0})
    try:
        yield
    finally:
        optimizer.settings = settings


def _use_drafts(flow: Flow, off: TimedRollout, right: float, mode: str) -> KnownDrafts:
    """Let a flow sample with known drafts, after a short call with them; return the drafts.

    Args:
        flow: The sampler and trainer.
        off: The rollout with speculation off.
        right: The chance of a drafted token to be right.
        mode: "auto", or "text" to verify drafts in every forward.
    """
    policy, load, batch_size = flow.policy, flow.load, flow.engine.max_batch_size
    flow.engine.free_cache()
    # As many pages as before from the start: the long call keeps the graphs of the short one.
    engine = RolloutEngine(policy, max_batch_size=batch_size, num_pages=off.stats.pages_total)
    drafts = KnownDrafts(batch_size, engine.max_model_len, policy.device, mode=mode)
    drafts.know(off.completions, right, flow.vocabulary)
    engine.use_drafts(drafts)
    flow.engine = engine
    flow.sample(seed=1, response_length=min(_WARM_TOKENS, load.response_length))
    flow.captured = engine.stats.graphs, engine.stats.capture_s
    engine.free_cache()
    drafts.spent.clear()
    return drafts


def _drafting(rollout: TimedRollout, off: TimedRollout) -> Row:
    """Return the tokens per forward that drafts brought, and how many tokens they changed.

    Args:
        rollout: The rollout.
        off: The rollout with speculation off.
    """
    stats, drafts = rollout.stats, rollout.stats.speculation
    tokens, logprobs = differences(rollout.completions, off.completions)
    row: Row = {
        "speculation": "off",
        "right": None,
        "tokens_per_forward": 1.0,
        "verify_share": 0.0,
        "forwards": stats.forwards,
        "late_capture_s": round(stats.capture_s, 2),
        "different_tokens": tokens,
        "different_logprobs": logprobs,
    }
    if drafts is not None:
        row["tokens_per_forward"] = round(drafts.tokens_per_forward, 3)
        row["verify_share"] = round(drafts.verify_s / drafts.decode_s, 3)
        row["drafted"], row["accepted"] = sum(drafts.drafted), sum(drafts.accepted)
    return row
