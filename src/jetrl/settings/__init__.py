"""What can be set: every section and key of a run's settings, with its type, range and meaning.

`tree.py` has the sections and `Settings`, the whole; `algorithm.py` and `models.py` the sections of
the algorithm and of the models beside the policy; `section.py` what a section is made of. Reading
and writing them is `jetrl.settings.loading`. No torch.
"""

from jetrl.settings.algorithm_section import AlgorithmSettings
from jetrl.settings.model_sections import CriticSettings, ReferenceSettings, RewardSettings
from jetrl.settings.section import Section
from jetrl.settings.sections import (
    CheckpointSettings,
    DataSettings,
    EvalSettings,
    LoopSettings,
    ModelSettings,
    PrecisionSettings,
    Preset,
    ReportSettings,
    RolloutSettings,
    RunSettings,
    Settings,
    SftSettings,
    TaskSettings,
    TrackerSettings,
    TrainSettings,
    WatchdogSettings,
)

__all__ = [
    "AlgorithmSettings",
    "CheckpointSettings",
    "CriticSettings",
    "DataSettings",
    "EvalSettings",
    "LoopSettings",
    "ModelSettings",
    "PrecisionSettings",
    "Preset",
    "ReferenceSettings",
    "ReportSettings",
    "RewardSettings",
    "RolloutSettings",
    "RunSettings",
    "Section",
    "Settings",
    "SftSettings",
    "TaskSettings",
    "TrackerSettings",
    "TrainSettings",
    "WatchdogSettings",
]
