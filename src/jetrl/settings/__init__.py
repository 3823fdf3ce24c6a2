"""The settings of a run: every section and key, with its type, range and meaning.

`sections.py` has the sections and `Settings`, the whole; `algorithm_section.py`,
`precision_section.py` and `model_sections.py` the sections of the algorithm, of the formats and of
the models next to the policy; `section.py` their base class; `loading.py` reads and writes them. No
torch.
"""

from jetrl.settings.algorithms import AlgorithmSettings
from jetrl.settings.model_sections import RewardSettings
from jetrl.settings.precision_section import PrecisionSettings, SamplerDeviationSettings
from jetrl.settings.sections import (
    ModelSettings,
    RolloutSettings,
    Settings,
    TaskSettings,
    TrainSettings,
    WatchdogSettings,
)

__all__ = [
    "AlgorithmSettings",
    "ModelSettings",
    "PrecisionSettings",
    "RewardSettings",
    "RolloutSettings",
    "SamplerDeviationSettings",
    "Settings",
    "TaskSettings",
    "TrainSettings",
    "WatchdogSettings",
]
