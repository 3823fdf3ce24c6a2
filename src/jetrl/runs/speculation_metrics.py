"""The metrics of speculation, `rollout.speculation`."""

from __future__ import annotations

from jetrl.runs.metric import Metric

SPECULATION: tuple[Metric, ...] = (
    Metric(
        "speculation/tokens_per_forward",
        "tokens",
        "tokens that a sequence drew in a forward of decode, since the step before, evaluations "
        "included; this and the other speculation/* only where rollout.speculation is not off",
        measured=True,
    ),
    Metric(
        "speculation/verify_share",
        "share",
        "of the time of decode, that of forwards that verified drafts",
        measured=True,
    ),
    Metric(
        "speculation/acceptance_self",
        "share",
        "of the drafted tokens that came from the sequence's own text and were verified, those "
        "that were drawn. Only where there are any, as the next three",
        measured=True,
    ),
    Metric(
        "speculation/acceptance_siblings",
        "share",
        "the same of drafts from other running completions of the prompt",
        measured=True,
    ),
    Metric(
        "speculation/acceptance_earlier",
        "share",
        "the same of drafts from completions of the prompt that had ended, of this step and of "
        "earlier steps and evaluations",
        measured=True,
    ),
    Metric(
        "speculation/acceptance_head",
        "share",
        "the same of guesses of the draft head",
        measured=True,
    ),
    Metric(
        "draft_head/loss",
        "nats",
        "cross entropy of the draft head's guesses over the tokens that it knows, mean over "
        "guesses and the step's updates, before each; this and the next two where "
        "rollout.speculation is head or auto",
    ),
    Metric(
        "draft_head/accuracy",
        "share",
        "of the tokens that it learned from, those whose next token it guessed first",
    ),
    Metric(
        "draft_head/skipped_updates",
        "count",
        "its updates with a gradient that was not finite, which were left out; absent where none "
        "was",
    ),
    Metric(
        "timing/draft_head_s", "s", "of the update, the training of the draft head", measured=True
    ),
)
