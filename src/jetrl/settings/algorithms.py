"""The algorithms by name: each is a record of an advantage estimator, a loss and an aggregation.

    advantages   what is made of the rewards of a step           training/advantages.py
    loss         what a token contributes, given its advantage   training/objectives/
    aggregation  how the tokens of an update are weighted        training/objectives/aggregation.py

Beside them a record holds the settings of `[algorithm]` that the algorithm reads, with its own
defaults: a setting that is not among them means nothing to it, and giving it is an error. The
formulas are in docs/algorithms.md. No torch here: the settings are checked against this table.

A user's algorithm is a loss function in a file (`algorithm.name = "file.py:function"`), which takes
GRPO's place in `USERS`, or a whole `Algorithm` in a file. Its record is known once the file
was run, which is not when settings are read: `training/objectives` checks the settings then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]
KlPlace = Literal["loss", "reward"]
Correction = Literal["none", "tis", "mis", "icepop", "sequence_mask"]
Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True)
class Algorithm:
    """The pieces of one algorithm, and the settings that it reads.

    Attributes:
        title: The name that people read.
        paper: The source.
        advantages: group, leave_one_out, global, group_global or gae, or a function of
            (StepRewards, **options).
        loss: clipped_ratio, sequence_ratio, detached_ratio or ratio, or a function of (Tokens,
            **options).
        aggregation: How the tokens of an update are weighted.
        options: The settings that the algorithm reads, with its defaults; None for a default that
            follows from other settings.
        kl_estimator: The estimate of the KL where the settings name none.
        kl_in: Where the KL counts where the settings do not say.
        compares_group: Whether a prompt needs two completions at least.
        needs_critic: Whether a value model is needed.
    """

    title: str
    paper: str
    advantages: str | Callable[..., Any]
    loss: str | Callable[..., Any]
    aggregation: Aggregation
    options: Mapping[str, float | bool | None] = field(default_factory=dict)
    kl_estimator: KlEstimator = "k3"
    kl_in: KlPlace = "loss"
    compares_group: bool = True
    needs_critic: bool = False


_CLIP: dict[str, float | bool | None] = {"clip": 0.2, "clip_high": None, "dual_clip": None}
_GROUPS: dict[str, float | bool | None] = {"dynamic_sampling": False, "overlong_buffer": 0}
_STD: dict[str, float | bool | None] = {"normalize_std": True}

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
            "clip": 0.2,
            "clip_high": 0.28,
            "dual_clip": None,
            **_STD,
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
}

USERS = Algorithm(
    title="your own",
    paper="",
    advantages="group",
    loss="",
    aggregation="token_mean",
    options={**_STD, **_GROUPS},
)
"""The record that a loss function in a user's file is put into."""


@dataclass(frozen=True)
class CorrectionBounds:
    """The levels that a correction has, and its bounds where the settings give none.

    Attributes:
        levels: The levels that the settings may name; the first is the default.
        low: The lower bound; None for a correction that has none.
        high: The upper bound.
    """

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
