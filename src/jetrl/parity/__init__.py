"""The comparison of the policy that samples with the policy that trains, bit by bit.

`measure` samples and compares the sampler's log-probs with the trainer's, token by token.
`locate` runs one sequence both ways, operation by operation, and names the first that differs;
`located` returns the same in words.
`self_check` tests the properties that the agreement rests on, each by itself, on this machine;
`check_policy` tests the promise for a run's own shapes, and `require_exact` makes it a condition.
"""

from jetrl.parity.checks import (
    Check,
    check_policy,
    failures,
    require_exact,
    said_when_slow,
    self_check,
)
from jetrl.parity.locating import Location, locate, located
from jetrl.parity.measuring import ParityResult, check_correction, measure, random_prompts

__all__ = [
    "Check",
    "Location",
    "ParityResult",
    "check_correction",
    "check_policy",
    "failures",
    "locate",
    "located",
    "measure",
    "random_prompts",
    "require_exact",
    "said_when_slow",
    "self_check",
]
