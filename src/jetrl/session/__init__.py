"""A run while it is open: the verbs that the loop is written in, and what they work with.

session               the verbs of the loop
step                  the record of a step, which the verbs pass on
open, building        models and data
advantages_trial      a user's advantage function, called before anything is loaded
training_run          directory, console, phases, checkpoints
prompt_order          which prompts a step draws
sampling_params       how completions are drawn
partial_rollouts      completions that take several steps
dynamic_sampling      prompts in place of groups that teach nothing
supervised, examples  supervised updates, and what is imitated
reward_training       a reward model from pairs of completions
checkpoints           saving and resuming
stop_signals          Ctrl-C, SIGTERM, the time limit
phases, watchdog      what runs now, and a run that hangs
display               the console
ranks, last_words     the processes of a run on several GPUs, joined and ended
memory_peaks          memory, planned and held
step_metrics          the numbers of a step
step_notes            what is unusual about a step
nonfinite             reports of NaN
reproduction          a NaN that can be run again
preflight             a look before a run
results               what a training returns
"""

from jetrl.session.results import RunResult
from jetrl.session.session import Session

__all__ = ["RunResult", "Session"]
