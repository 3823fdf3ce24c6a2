"""The section `[algorithm]`: its keys, and which combinations of keys mean something."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from jetrl.settings.algorithms import (
    ALGORITHMS,
    CORRECTIONS,
    Aggregation,
    Algorithm,
    Correction,
    KlEstimator,
    KlPlace,
    Level,
)
from jetrl.settings.section import (
    Mass,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    Share,
    without_none,
)

_ALGORITHM_OPTIONS = (
    "clip",
    "clip_high",
    "dual_clip",
    "normalize_std",
    "dynamic_sampling",
    "overlong_buffer",
    "gamma",
    "gae_lambda",
)
DYNAMIC_SAMPLING_ROUNDS = 4
_KL_ESTIMATOR_IN: dict[KlPlace, KlEstimator] = {"loss": "k3", "reward": "k1"}


class AlgorithmSettings(Section):
    """The section `[algorithm]`.

    Unset keys take the value of the algorithm (docs/algorithms.md); a key that the algorithm does
    not read is refused.
    """

    name: str = Field(
        "grpo",
        description="grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce_pp, reinforce_pp_baseline, "
        "ppo, or file.py:function",
    )
    clip: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="ratio clipped to 1 - clip, 1 + clip_high; unset: the algorithm's"
    )
    clip_high: PositiveFloat | None = Field(
        None, description="upper clip; unset: the algorithm's, or clip"
    )
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        None,
        description="ratio up to which a token with a negative advantage counts, as verl's "
        "clip_ratio_c = 3; unset: off",
    )
    calibrate_clip_every: NonNegative = Field(
        0,
        description="steps between calibrations of the clips against a BF16 forward, under jet and "
        "unified with train.updates_per_step > 1; 0: never (the paper: 20)",
    )
    normalize_std: bool | None = Field(
        None, description="divide a group's advantages by its std; unset: the algorithm's"
    )
    aggregation: Aggregation | None = Field(
        None, description="how an update's tokens are weighted; unset: the algorithm's"
    )
    dynamic_sampling: bool | None = Field(
        None,
        description="draw more prompts in place of groups with equal rewards; unset: dapo alone",
    )
    dynamic_sampling_rounds: Positive = Field(
        DYNAMIC_SAMPLING_ROUNDS,
        description="draws a step at most, the first included, with dynamic_sampling",
    )
    overlong_buffer: NonNegative | None = Field(
        None,
        description="tokens before rollout.max_tokens in which the reward falls by up to 1; "
        "unset: a fifth of rollout.max_tokens for dapo, else 0 (off)",
    )
    gamma: Mass | None = Field(None, description="discount a token, ppo; unset: 1")
    gae_lambda: Share | None = Field(None, description="GAE's lambda, ppo; unset: 0.95")
    kl: NonNegativeFloat = Field(0.0, description="weight of the KL to a frozen reference; 0: none")
    kl_estimator: KlEstimator | None = Field(
        None,
        description="of the KL that has a weight; unset: the algorithm's, in another place than "
        "its own k3 in the loss and k1 in the reward",
    )
    kl_in: KlPlace | None = Field(
        None, description="where the KL counts; unset: the algorithm's place"
    )
    correction: Correction = Field(
        "none", description="importance weights against the sampler's mismatch"
    )
    correction_level: Level | None = Field(
        None, description="ratio of a token, a sequence, or its geometric mean; unset: the first"
    )
    correction_low: PositiveFloat | None = Field(
        None, description="lower bound of the weight; unset: the correction's"
    )
    correction_high: PositiveFloat | None = Field(
        None, description="upper bound of the weight; unset: the correction's"
    )
    correction_under_exact_plan: bool = Field(
        False, description="correct under jet and unified too, where every weight is 1"
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of file.py:function"
    )

    _options = field_validator("options", mode="before")(without_none)

    @property
    def from_file(self) -> bool:
        """Return whether the algorithm is a user's, whose record is in a file."""
        return self.name.rpartition(":")[0].endswith(".py")

    def value(self, key: str, record: Algorithm) -> Any:
        """Return a setting, or the algorithm's default where the setting is not given, or None."""
        own = getattr(self, key)
        return record.options.get(key) if own is None else own

    @model_validator(mode="after")
    def means_something(self) -> AlgorithmSettings:
        """Check that the set keys mean something to the algorithm."""
        problems = [*self._name_problems(), *self._correction_problems()]
        if self.name in ALGORITHMS:
            problems += self.problems(ALGORITHMS[self.name])
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _name_problems(self) -> Iterator[str]:
        if self.name not in ALGORITHMS and not self.from_file:
            near = difflib.get_close_matches(self.name, ALGORITHMS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(ALGORITHMS)}"
            yield f"algorithm.name = {self.name!r} is unknown; {hint} (or file.py:function)"
        if self.options and not self.from_file:
            yield "algorithm.options are for an algorithm.name of the form file.py:function"

    def problems(self, record: Algorithm) -> Iterator[str]:
        """Yield messages about keys that are set and mean nothing to an algorithm."""
        read = record.options
        for key in read:
            if key not in _ALGORITHM_OPTIONS:
                yield (
                    f"{self.name}: the options of its Algorithm name {key!r}, which is none of the "
                    f"settings that an algorithm reads ({', '.join(_ALGORITHM_OPTIONS)}); leave it "
                    "out there, and give the function an argument of that name, which "
                    f"algorithm.options.{key} sets"
                )
        for key in _ALGORITHM_OPTIONS:
            if getattr(self, key) is not None and key not in read:
                yield (
                    f"algorithm.{key} means nothing to {self.name}; it reads "
                    f"{', '.join(sorted(read)) or 'none of these'}"
                )
        rounds, usual = self.dynamic_sampling_rounds, DYNAMIC_SAMPLING_ROUNDS
        if rounds != usual and not self.value("dynamic_sampling", record):
            yield (
                f"algorithm.dynamic_sampling_rounds = {rounds} means nothing without dynamic "
                "sampling: set algorithm.dynamic_sampling=true, or leave it out"
            )
        if self.calibrate_clip_every and record.loss != "clipped_ratio":
            yield f"algorithm.calibrate_clip_every: {self.name} has no token-level clips"
        if not self.kl:
            for key in ("kl_estimator", "kl_in"):
                if getattr(self, key) is not None:
                    yield f"algorithm.{key} is set, but algorithm.kl = 0: give the KL a weight"
        elif self.kl_term(record) == ("k1", "loss"):
            yield (
                "algorithm.kl_estimator = k1 in the loss: the expected gradient of k1 is zero, so "
                "it would only add noise; take k2 or k3, or algorithm.kl_in=reward"
            )

    def kl_term(self, record: Algorithm) -> tuple[KlEstimator, KlPlace]:
        """Return the estimator of the KL that has a weight, and the place where the KL counts."""
        kl_in = self.kl_in or record.kl_in
        own = record.kl_estimator if kl_in == record.kl_in else _KL_ESTIMATOR_IN[kl_in]
        return self.kl_estimator or own, kl_in

    def _correction_problems(self) -> Iterator[str]:
        given = [
            key
            for key in ("correction_level", "correction_low", "correction_high")
            if getattr(self, key) is not None
        ]
        if self.correction == "none":
            if given:
                yield f"algorithm.{given[0]} is set, but algorithm.correction = none"
            return
        bounds = CORRECTIONS[self.correction]
        if self.correction_level is not None and self.correction_level not in bounds.levels:
            yield (
                f"algorithm.correction_level = {self.correction_level}: {self.correction} has "
                f"{', '.join(bounds.levels)}"
            )
        if self.correction_low is not None and bounds.low is None:
            yield f"algorithm.correction_low: {self.correction} has an upper bound alone"
        low, high = self.correction_low or bounds.low, self.correction_high or bounds.high
        if low is not None and low >= high:
            yield f"algorithm.correction_low = {low} is not below correction_high = {high}"
