"""An open run: the verbs of the loop, and what they work with.

session           the verbs of the loop
step              a step's record, sampling parameters, dynamic sampling, metrics; preflight
from_python       settings from a program's functions and rows
open, building    checks before the start; models and data
training_run      run directory, console, phases, memory peaks
prompt_order      which prompts per step draws
partial_rollouts  completions that take several steps
supervised        supervised updates, and the training of a reward model
examples          worked answers and pairs
checkpoints       saving and resuming
stop_signals      Ctrl-C, SIGTERM, the time limit
watchdog          a run that hangs
ranks             the processes of a run on several GPUs: joined, compared and ended
nonfinite         reports of NaN
replay            the steps after the last checkpoint, run again
"""

from jetrl.session.session import RunResult, Session

__all__ = ["RunResult", "Session"]
