"""An open run: the verbs of the loop and their components.

session           the verbs of the training loop
step              step record, sampling parameters, dynamic sampling, metrics; preflight
from_python       settings from Python functions and examples
open, building    checks before the start; models and data
training_run      run directory, trackers, phases and checkpoints of an attempt
phases            phases of a run: timing, console, memory peaks
prompt_order      the order of training prompts
partial_rollouts  completions that span several steps
supervised        supervised updates, and reward-model training
examples          demonstrations and preference pairs
checkpoints       saving and resuming
stop_signals      Ctrl-C, SIGTERM, the time limit
watchdog          hang detection
ranks             joining, comparing and ending the processes of a multi-GPU run
nonfinite         reports of NaNs
replay            rerunning the steps after the last checkpoint
"""

from jetrl.session.session import RunResult, Session

__all__ = ["RunResult", "Session"]
