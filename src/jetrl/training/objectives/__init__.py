"""Objectives: an algorithm's loss. `pieces` has its parts, `objective` puts them together."""

from jetrl.training.objectives.objective import Objective
from jetrl.training.objectives.pieces import TokenLoss, Tokens, UpdateSize

__all__ = ["Objective", "TokenLoss", "Tokens", "UpdateSize"]
