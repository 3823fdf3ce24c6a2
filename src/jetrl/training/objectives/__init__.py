"""Objectives: the pieces that an algorithm's loss is made of, pure functions of log-probs.

tokens is the input of a loss, token_losses has the built-in ones, users a loss in a user's file.
aggregation weights the tokens, corrections the mismatch, kl the distance to a reference. objective
puts all of them together, as the settings ask.
"""

from jetrl.training.objectives.aggregation import UpdateSize
from jetrl.training.objectives.objective import Objective
from jetrl.training.objectives.tokens import TokenLoss, Tokens

__all__ = ["Objective", "TokenLoss", "Tokens", "UpdateSize"]
