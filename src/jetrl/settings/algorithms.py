"""RL algorithms by name: each combines an advantage estimator, a loss and an aggregation.

    advantages   computed from the rewards of a step       training/advantages.py
    loss         per token, given its advantage          training/objectives.py
    aggregation  token weights within an update            training/objectives.py

A record also lists the `[algorithm]` settings that the algorithm reads, with its defaults; setting
any other is an error. Formulas are in docs/algorithms.md. This module does not import torch.

A user-defined algorithm is a loss function in a file (`algorithm.name = "file.py:function"`), based
on `USERS`, or a complete `Algorithm` in a file. Loading settings does not import that file, so
`training/objectives.py` validates the settings of such an algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from jetrl.errors import nearest
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

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]
VERL_AGGREGATIONS: Mapping[str, Aggregation | None] = {
    "token-mean": "token_mean",
    "token-sum": None,
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
}
"""Values of verl's actor.loss_agg_mode."""
KlEstimator = Literal["k1", "k2", "k3"]
KlPlace = Literal["loss", "reward"]
Correction = Literal["none", "tis", "mis", "icepop", "sequence_mask"]
Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True)
class Algorithm:
    """An RL algorithm: its parts, and the settings that it reads.

    Attributes:
        advantages: group, leave_one_out, global, group_global or gae, or a function of
            (StepRewards, **options).
        loss: clipped_ratio, sequence_ratio, detached_ratio or ratio, or a function of (Tokens,
            **options).
        options: Settings that the algorithm reads, with its defaults; None if the default depends
            on other settings.
        compares_group: True if a prompt needs at least two completions.
        needs_critic: True if a value model is needed.
        needs_teacher: True if a teacher is needed (training/distillation.py).
    """

    title: str
    paper: str
    advantages: str | Callable[..., Any]
    loss: str | Callable[..., Any]
    aggregation: Aggregation
    options: Options = field(default_factory=dict)
    kl_estimator: KlEstimator = "k3"
    kl_in: KlPlace = "loss"
    compares_group: bool = True
    needs_critic: bool = False
    needs_teacher: bool = False


Options = Mapping[str, float | bool | None]
_CLIP: Options = {"clip": 0.2, "clip_high": None, "dual_clip": None}
_GROUPS: Options = {"dynamic_sampling": False, "overlong_buffer": 0}
_STD: Options = {"normalize_std": True}

ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(
        title="GRPO",
        paper="Shao et al. 2024, DeepSeekMath, arXiv 2402.03300, eq. 3",
        advantages="group",
        loss="clipped_ratio",
        aggregation="sequence_mean",
        options={**_CLIP, **_STD, **_GROUPS},
    ),
    "dr_grpo": Algorithm(
        title="Dr. GRPO",
        paper="Liu et al. 2025, arXiv 2503.20783",
        advantages="group",
        loss="clipped_ratio",
        aggregation="constant",
        options={**_CLIP, "normalize_std": False, **_GROUPS},
    ),
    "dapo": Algorithm(
        title="DAPO",
        paper="Yu et al. 2025, arXiv 2503.14476, eq. 8 to 13",
        advantages="group",
        loss="clipped_ratio",
        aggregation="token_mean",
        options={
            **_CLIP,
            **_STD,
            "clip_high": 0.28,
            "dynamic_sampling": True,
            "overlong_buffer": None,
        },
    ),
    "gspo": Algorithm(
        title="GSPO",
        paper="Zheng et al. 2025, arXiv 2507.18071, eq. 5 to 7; clips of sec. 5.1",
        advantages="group",
        loss="sequence_ratio",
        aggregation="sequence_mean",
        options={"clip": 3e-4, "clip_high": 4e-4, **_STD, **_GROUPS},
    ),
    "cispo": Algorithm(
        title="CISPO",
        paper="MiniMax 2025, MiniMax-M1, arXiv 2506.13585, eq. 4 and 5; the cap of 5 of "
        "Khatri et al. 2025, arXiv 2510.13786",
        advantages="group",
        loss="detached_ratio",
        aggregation="token_mean",
        options={"clip_high": 4.0, **_STD, **_GROUPS},
    ),
    "rloo": Algorithm(
        title="RLOO",
        paper="Ahmadian et al. 2024, arXiv 2402.14740",
        advantages="leave_one_out",
        loss="ratio",
        aggregation="sequence_sum",
        options=_GROUPS,
        kl_estimator="k1",
        kl_in="reward",
    ),
    "reinforce_pp": Algorithm(
        title="REINFORCE++",
        paper="Hu 2025, arXiv 2501.03262",
        advantages="global",
        loss="clipped_ratio",
        aggregation="token_mean",
        options={**_CLIP, "overlong_buffer": 0},
        kl_estimator="k1",
        kl_in="reward",
        compares_group=False,
    ),
    "reinforce_pp_baseline": Algorithm(
        title="REINFORCE++ with baseline",
        paper="Hu 2025, arXiv 2501.03262 (with baseline)",
        advantages="group_global",
        loss="clipped_ratio",
        aggregation="token_mean",
        options={**_CLIP, **_GROUPS},
        kl_estimator="k2",
    ),
    "ppo": Algorithm(
        title="PPO",
        paper="Schulman et al. 2017, arXiv 1707.06347, eq. 7; GAE: arXiv 1506.02438, eq. 16",
        advantages="gae",
        loss="clipped_ratio",
        aggregation="token_mean",
        options={**_CLIP, "gamma": 1.0, "gae_lambda": 0.95, "overlong_buffer": 0},
        kl_estimator="k1",
        kl_in="reward",
        compares_group=False,
        needs_critic=True,
    ),
    "opd": Algorithm(
        title="On-policy distillation",
        paper="Agarwal et al. 2024, arXiv 2306.13649; with the reverse KL per token",
        advantages="group",
        loss="clipped_ratio",
        aggregation="token_mean",
        options={**_CLIP, **_STD, "overlong_buffer": 0},
        compares_group=False,
        needs_teacher=True,
    ),
}

USERS = Algorithm(
    title="your own",
    paper="",
    advantages="group",
    loss="",
    aggregation="token_mean",
    options={**_STD, **_GROUPS},
)
"""Record for a loss function from a user's file."""


@dataclass(frozen=True)
class CorrectionBounds:
    """Levels of a correction, the default first, and its default bounds."""

    levels: tuple[Level, ...]
    low: float | None
    high: float


CORRECTIONS: dict[str, CorrectionBounds] = {
    "tis": CorrectionBounds(("token", "sequence"), None, 2.0),
    "mis": CorrectionBounds(("token", "sequence", "geometric"), 0.5, 2.0),
    "icepop": CorrectionBounds(("token",), 0.5, 5.0),
    "sequence_mask": CorrectionBounds(("geometric",), 0.999, 1.002),
}
"""TIS: Yao et al. 2025 (fengyao.notion.site/off-policy-rl). MIS, sequence masks: Liu et al. 2025
(richardli.xyz/rl-collapse). IcePop: Ling team 2025, arXiv 2510.18855."""


_ALGORITHM_OPTIONS = (*_CLIP, *_STD, *_GROUPS, "gamma", "gae_lambda")
DYNAMIC_SAMPLING_ROUNDS = 4
_ELSEWHERE = {  # names from other libraries
    **dict.fromkeys(
        ("dpo", "kto", "orpo", "ipo", "simpo"),
        ": of preference optimization jetrl has DPO, `jetrl sft --task dpo`; `jetrl sft --task "
        "reward` trains a reward model on pairs, and reward.model_path uses it in RL",
    ),
    "sft": ": supervised training is a command, `jetrl sft`",
}
_KL_ESTIMATOR_IN: dict[KlPlace, KlEstimator] = {"loss": "k3", "reward": "k1"}


class AlgorithmSettings(Section):
    """The section `[algorithm]`.

    Unset keys default to the algorithm's values (docs/algorithms.md). Setting a key that the
    algorithm does not read is an error.
    """

    name: str = "grpo"
    """grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce_pp, reinforce_pp_baseline, ppo, opd
    (on-policy distillation, see [teacher]), or file.py:function"""
    clip: Annotated[float, Field(gt=0, lt=1)] | None = None
    """clip the ratio to [1 - clip, 1 + clip_high]. Default: from the algorithm"""
    clip_high: PositiveFloat | None = None
    """upper clip range. Default: from the algorithm, or clip"""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """dual-clip bound of the ratio for negative advantages (verl: clip_ratio_c = 3). Default:
    off"""
    calibrate_clip_every: NonNegative = 0
    """steps between calibrations of the clip range against a BF16 forward, for 8-bit training with
    train.updates_per_step > 1; 0: never (the paper: 20)"""
    normalize_std: bool | None = None
    """divide advantages by the std of their group. Default: from the algorithm"""
    aggregation: Aggregation | None = None
    """token weighting within an update. Default: from the algorithm"""
    dynamic_sampling: bool | None = None
    """replace zero-advantage groups by sampling more prompts. Default: only for dapo"""
    dynamic_sampling_rounds: Positive = DYNAMIC_SAMPLING_ROUNDS
    """maximum sampling rounds per step with dynamic_sampling, including the first"""
    overlong_buffer: NonNegative | None = None
    """number of tokens before rollout.max_tokens over which the reward drops by up to 1. Default: a
    fifth of rollout.max_tokens for dapo, else 0 (off)"""
    gamma: Mass | None = None
    """discount factor per token, for ppo. Default: 1"""
    gae_lambda: Share | None = None
    """GAE lambda, for ppo. Default: 0.95"""
    kl: NonNegativeFloat = 0.0
    """KL coefficient against a frozen reference; 0: none"""
    kl_estimator: KlEstimator | None = None
    """KL estimator. Default: from the algorithm; if kl_in is overridden, k3 in the loss and k1 in
    the reward"""
    kl_in: KlPlace | None = None
    """add the KL to the loss or subtract it from the reward. Default: from the algorithm"""
    correction: Correction = "none"
    """importance-sampling correction of the train-inference mismatch"""
    correction_level: Level | None = None
    """ratio per token, per sequence, or as the geometric mean of a sequence. Default: the
    correction's first"""
    correction_low: PositiveFloat | None = None
    """lower bound of the importance weight. Default: from the correction"""
    correction_high: PositiveFloat | None = None
    """upper bound of the importance weight. Default: from the correction"""
    correction_under_exact_plan: bool = False
    """correct under an exact plan too, although every weight is 1"""
    options: dict[str, Any] = Field(default_factory=dict)
    """keyword arguments of file.py:function"""

    _options = field_validator("options", mode="before")(without_none)

    @field_validator("aggregation", mode="before")
    @classmethod
    def _of_verl(cls, value: Any) -> Any:
        if isinstance(value, str) and value in VERL_AGGREGATIONS:
            here = VERL_AGGREGATIONS[value]
            name = f"here it is {here}" if here else "jetrl has no equivalent"
            raise ValueError(f"{value} is a loss_agg_mode of verl; {name}")
        return value

    @property
    def from_file(self) -> bool:
        """Return True if the algorithm comes from a user's file."""
        return self.name.rpartition(":")[0].endswith(".py")

    def value(self, key: str, record: Algorithm) -> Any:
        """Return a setting, or the algorithm's default if it is unset."""
        own = getattr(self, key)
        return record.options.get(key) if own is None else own

    @model_validator(mode="after")
    def means_something(self) -> AlgorithmSettings:
        """Check that the algorithm reads every key that is set."""
        problems = [*self._name_problems(), *self._correction_problems()]
        if self.name in ALGORITHMS:
            problems += self.problems(ALGORITHMS[self.name])
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _name_problems(self) -> Iterator[str]:
        if self.name not in ALGORITHMS and not self.from_file:
            hint = _ELSEWHERE.get(self.name.lower()) or nearest(self.name, ALGORITHMS)
            yield f"algorithm.name = {self.name!r} is unknown{hint} (or file.py:function)"
        if self.options and not self.from_file:
            yield "algorithm.options are for an algorithm.name of the form file.py:function"

    def problems(self, record: Algorithm) -> Iterator[str]:
        """Yield a message for each key that is set but not read by the algorithm."""
        read = record.options
        for key in read:
            if key not in _ALGORITHM_OPTIONS:
                instead = f"give the function an argument, which algorithm.options.{key} sets"
                yield f"{self.name}: {key!r} is not an option of an Algorithm; {instead}"
        for key in _ALGORITHM_OPTIONS:
            if getattr(self, key) is not None and key not in read:
                known = ", ".join(sorted(read)) or "none of these"
                yield f"algorithm.{key} has no effect on {self.name}, which reads {known}"
        rounds, usual = self.dynamic_sampling_rounds, DYNAMIC_SAMPLING_ROUNDS
        if rounds != usual and not self.value("dynamic_sampling", record):
            yield (
                f"algorithm.dynamic_sampling_rounds = {rounds} has no effect without "
                "algorithm.dynamic_sampling=true"
            )
        if self.calibrate_clip_every and record.loss != "clipped_ratio":
            yield f"algorithm.calibrate_clip_every: {self.name} has no token-level clips"
        if not self.kl:
            for key in ("kl_estimator", "kl_in"):
                if getattr(self, key) is not None:
                    yield f"algorithm.{key} is set, but algorithm.kl = 0: give the KL a weight"
        elif self.kl_term(record) == ("k1", "loss"):
            instead = "use k2 or k3, or algorithm.kl_in=reward"
            yield f"algorithm.kl_estimator = k1 in the loss only adds noise; {instead}"

    def kl_term(self, record: Algorithm) -> tuple[KlEstimator, KlPlace]:
        """Return the KL estimator and place (loss or reward)."""
        kl_in = self.kl_in or record.kl_in
        own = record.kl_estimator if kl_in == record.kl_in else _KL_ESTIMATOR_IN[kl_in]
        return self.kl_estimator or own, kl_in

    def _correction_problems(self) -> Iterator[str]:
        if self.correction == "none":
            for key in ("correction_level", "correction_low", "correction_high"):
                if getattr(self, key) is not None:
                    yield f"algorithm.{key} is set, but algorithm.correction = none"
            return
        bounds = CORRECTIONS[self.correction]
        if self.correction_level is not None and self.correction_level not in bounds.levels:
            yield (
                f"algorithm.correction_level = {self.correction_level}: {self.correction} has "
                f"{', '.join(bounds.levels)}"
            )
        if self.correction_low is not None and bounds.low is None:
            yield f"algorithm.correction_low: {self.correction} has only an upper bound"
        low, high = self.correction_low or bounds.low, self.correction_high or bounds.high
        if low is not None and low >= high:
            yield f"algorithm.correction_low = {low} is not below correction_high = {high}"
