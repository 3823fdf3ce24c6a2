"""A run while it is open: what it is made of, and the verbs that the loop is written in.

opening: everything a run needs.  stops: signals and the time limit.  phases: what runs now, and how
long it took.  display: the console.  saved: checkpoints, and going on from one.  warm_up: the
supervised updates before the first step.  session: the verbs.
"""

from jetrl.session.session import RunResult, Session

__all__ = ["RunResult", "Session"]
