"""The settings of a run: every section and key, with its type, range and meaning.

`sections.py` has the sections and `Settings`, the whole; `algorithm_section.py` and
`model_sections.py` the sections of the algorithm and of the models beside the policy; `section.py`
their base class; `loading.py` reads and writes them. No torch.
"""

from jetrl.settings.algorithm_section import AlgorithmSettings
from jetrl.settings.model_sections import CriticSettings, ReferenceSettings, RewardSettings
from jetrl.settings.presets import Preset
from jetrl.settings.section import Section
from jetrl.settings.sections import (
    CheckpointSettings,
    DataSettings,
    EvalSettings,
    LoopSettings,
    ModelSettings,
    PrecisionSettings,
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
