"""The values of `rollout.speculation`, and what a run verifies where it is not set."""

from __future__ import annotations

from typing import Literal

Speculation = Literal["off", "text", "head", "auto"]


def verified_drafts(
    asked: Speculation | None, exact: bool, device: str, oversample: float
) -> Speculation:
    """Return which drafts a run verifies: those of text where it is faster, where none are asked.

    None are by default where the run would not repeat itself. `auto` decides by time how many rows
    a forward has: on that depend the draws of a plan that promises no bits, and which completions
    are cut off where more prompts are on their way than a step needs.

    Args:
        asked: The setting rollout.speculation; None: it is not set, and no draft head is trained.
        exact: Whether the plan promises that sampler and trainer agree.
        device: "cpu", or a GPU.
    """
    return asked or ("auto" if exact and device != "cpu" and not oversample else "off")
