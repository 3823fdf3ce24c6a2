"""Objectives: pure functions of log-probs, one file each, and how an algorithm is made of them.

tokens: what a loss sees.  clipped_ratio, sequence_ratio, detached_ratio, ratio: the losses.
aggregation: how tokens are weighted.  kl: estimates of the KL to a reference.  users: a function in
a user's file.  objective: all of it, as the settings say.
"""

from jetrl.training.objectives.aggregation import UpdateSize
from jetrl.training.objectives.objective import Objective
from jetrl.training.objectives.tokens import TokenLoss, Tokens

__all__ = ["Objective", "TokenLoss", "Tokens", "UpdateSize"]
