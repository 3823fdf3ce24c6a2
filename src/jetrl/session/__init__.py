"""A run while it is open: what it is made of, and the verbs that the loop is written in.

opening: everything a run needs.  stops: signals and the time limit.  phases: what runs now, and how
long it took.  display: the console.  watchdog, hang_state: hangs.  saved: checkpoints, and going on
from one.  carrying: completions that go on in the next step.  warm_up, worked_answers: supervised
updates before the first step.  measured: times, speeds, memory.  ending: the last checkpoint, the
exported model.  session: the verbs.
"""

from jetrl.session.finish import RunResult
from jetrl.session.session import Session

__all__ = ["RunResult", "Session"]
