"""The memory plan: what a run will hold and when, from its settings and config.json alone, before
anything is loaded; and whether it fits."""

from jetrl.memory.fitting import Fitted, check_fits, shown
from jetrl.memory.machine import free_bytes
from jetrl.memory.plan import GIB, Load, MemoryPlan, OtherModels, Row, memory_plan

__all__ = [
    "GIB",
    "Fitted",
    "Load",
    "MemoryPlan",
    "OtherModels",
    "Row",
    "check_fits",
    "free_bytes",
    "memory_plan",
    "shown",
]
