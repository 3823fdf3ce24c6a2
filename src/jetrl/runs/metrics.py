"""The registry of metrics: the name, unit and meaning of everything a run measures.

An unregistered name is refused when it is written, so that plots, comparisons and users' scripts
can rely on names. Names such as `eval/<task>/mean` have a free part, which `eval_metric`,
`task_metric` and `part_metric` fill in. docs/metrics.md is generated from this (tools.documents).
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from typing import NamedTuple

FREE = r"[^/<>\s]+"
"""Pattern of <task> and <name>: a path component without blanks or angle brackets."""

MEASURED = ("speculation", "timing", "throughput", "distributed", "memory")
"""Times, speeds and memory; all others have the same bits when a run is repeated on the CPU."""

# Name, unit and meaning, two blanks apart; a meaning may continue on indented lines.
TABLE = """
reward/mean  reward  mean reward of the step's completions
reward/std  reward  standard deviation of the step's rewards (population)
reward/zero_std_groups  share  groups whose completions all got the same reward, which teach
    nothing; absent if the algorithm does not compare them (reinforce_pp, ppo)
reward/failures  count  completions that could not be scored (error or timeout); their reward is 0
reward/unusable_replies  count  of these failures, multi-turn completions that ended because the
    environment's reply was no text for the model (empty, half a character, or one that the
    tokenizer lacks)
reward/part/<name>  reward  mean of a named part of the task's score
reward/task/<task>  reward  mean reward of one of several mixed tasks
reward/overlong_penalty  reward  mean reduction of rewards near the length limit
    (algorithm.overlong_buffer)
reward/kl_penalty  reward  mean reduction of rewards by the KL to the reference (algorithm.kl_in =
    reward)
dynamic_sampling/rounds  count  draws of prompts in the step, including the first
    (algorithm.dynamic_sampling)
dynamic_sampling/dropped_groups  count  groups not trained on, because of equal rewards or because
    enough were drawn; reward/* and response_length/* include them
partial_rollout/unfinished  count  completions that continue in the next step (rollout.oversample)
partial_rollout/earlier_tokens  share  trained tokens sampled by the policy of an earlier step;
    mismatch/* excludes them. Absent if there are none
speculation/tokens_per_forward  tokens  tokens per sequence and decode forward since the last
    step, including evaluations; speculation/* is absent if rollout.speculation is off
speculation/verify_share  share  share of decode time in forwards that verified drafts
speculation/acceptance_self  share  acceptance rate of verified draft tokens from the sequence's
    own text; this and the next three are absent without such drafts
speculation/acceptance_siblings  share  the same for drafts from other running completions of the
    prompt
speculation/acceptance_earlier  share  the same for drafts from finished completions of the
    prompt, in this step, earlier steps and evaluations
speculation/acceptance_head  share  the same for drafts of the draft head
draft_head/loss  nats  cross entropy of the draft head over its known tokens, before each update
    (mean over the step); draft_head/* needs rollout.speculation = head or auto
draft_head/accuracy  share  share of training tokens whose next token was its first guess
draft_head/skipped_updates  count  its updates skipped because of a gradient that is not finite;
    absent if there are none
timing/draft_head_s  s  training of the draft head; part of timing/update_s
noise/sigma  deviation  of the Gaussian noise on the norm weights in this step
    (adapter.noise_start)
response_length/mean  tokens  mean length of a completion
response_length/clip_ratio  share  completions cut off at rollout.max_tokens
response_length/turns  turns  mean number of turns, in a task with turns
response_length/sampled  tokens  mean tokens sampled by the model, without the environment's, in a
    task with turns
response_length/task/<task>  tokens  mean length of a completion of one of several mixed tasks
policy/entropy  nats  mean entropy of the next-token distribution at sampled tokens
policy/kl_ref  nats  KL to the frozen reference (K3 estimate, mean over tokens)
policy/clip_fraction  share  tokens whose probability ratio was clipped
policy/clip_low  ratio  lower bound of the ratio, as calibrated (algorithm.calibrate_clip_every)
policy/clip_high  ratio  upper bound of the ratio, as calibrated
policy/over_clipped  share  tokens with a negative advantage whose FP8 ratio is below the
    uncalibrated lower bound while their BF16 ratio is not, in steps that calibrate
policy/grad_norm  norm  global gradient norm before clipping (mean over the step's updates)
policy/loss  loss  policy loss (mean over the step's updates, by their tokens)
policy/active_fraction  share  sampled tokens whose advantage is not 0
policy/lr  1/update  learning rate of the step's last update
policy/skipped_updates  count  updates skipped because of a NaN or infinite loss or gradient;
    absent if there are none
policy/anomalies  count  numbers that went out of bounds in this step (loss, gradient norm,
    entropy, reward, draws; rules in docs/numbers.md); absent if none did
correction/weight_mean  ratio  mean importance weight of algorithm.correction, after its bounds
correction/weight_max  ratio  largest importance weight after the bounds
correction/ratio_max  ratio  largest importance ratio before the bounds
correction/touched_fraction  share  trained tokens whose weight the bounds changed or set to 0
critic/loss  reward^2  half the squared error of the critic, mean over tokens
critic/clip_fraction  share  tokens whose change of value was clipped
critic/grad_norm  norm  global gradient norm of the critic before clipping (mean over the step's
    updates)
critic/lr  1/update  learning rate of the critic (mean over the step's updates)
critic/skipped_updates  count  updates of the critic skipped because of a NaN or infinite loss or
    gradient; absent if there are none
critic/value_mean  reward  mean value before the step
critic/return_mean  reward  mean return
critic/explained_variance  share  1 - var(return - value) / var(return); 1 is a perfect critic
sampling/surprise_z  deviations  distance of the sampled tokens' mean -log p from the entropy,
    over the step's first update: beyond 5, the sampler does not draw from the policy
    (docs/exactness.md). Absent with top_p, top_k, oversample, dynamic sampling or pairs of
    samples, which select draws
mismatch/num_tokens  tokens  sampled tokens whose log-probs of trainer and sampler were compared;
    0 if earlier policies drew all of them, or a log-prob is not finite
mismatch/num_different  tokens  of these, tokens whose log-probs differ in any bit; 0 is right
mismatch/mean_abs_logprob_diff  nats  mean |trainer log-prob - sampler log-prob|
mismatch/max_abs_logprob_diff  nats  largest |trainer log-prob - sampler log-prob|
mismatch/k3_kl  nats  K3 estimate of the KL between sampler and trainer
mismatch/token_mult_prob_error  ratio  mean of exp|trainer log-prob - sampler log-prob|; 1 is
    right
timing/rollout_s  s  sampling completions
timing/reward_s  s  scoring completions, except while others were still sampled
timing/update_s  s  forward, backward and optimizer
timing/optimizer_s  s  AdamW on the master weights; part of timing/update_s
timing/requantize_s  s  quantizing the master weights
timing/checkpoint_s  s  waiting until a checkpoint is copied, and the previous one is written
timing/eval_s  s  held-out evaluation
timing/step_s  s  the whole step
throughput/rollout_tokens_per_s  tokens/s  sampled tokens per second of timing/rollout_s
throughput/train_tokens_per_s  tokens/s  trained tokens, including prompts, per second of
    timing/update_s
distributed/size  ranks  processes of the run, one per GPU; distributed/* is absent unless
    torchrun started several
distributed/wait_share  share  share of timing/step_s in which a rank waited for others on the
    host (the longest completion, a score, a message), mean over ranks
distributed/rollout_tokens_per_s_per_rank  tokens/s  throughput/rollout_tokens_per_s divided by
    the number of ranks
distributed/train_tokens_per_s_per_rank  tokens/s  throughput/train_tokens_per_s divided by the
    number of ranks
memory/peak_gib  GiB  peak memory of the device (on CPU: of the process); maximum over ranks
memory/rollout_peak_gib  GiB  peak memory while sampling (GPU)
memory/update_peak_gib  GiB  peak memory while training (GPU)
memory/rollout_retries  count  times sampling restarted with a smaller batch after running out of
    memory; else absent
memory/train_retries  count  times an update restarted with micro-batches of half the tokens; else
    absent
eval/<task>/mean  reward  mean reward on the held-out split, over eval.samples completions per
    prompt
eval/<task>/pass_at_k  share  held-out prompts solved by at least one of k = eval.samples
    completions
eval/<task>/response_length  tokens  mean length of a held-out completion
eval/<task>/clip_ratio  share  held-out completions cut off at the token limit
eval/<task>/failures  count  held-out completions that could not be scored
sft/loss  nats  mean next-token loss of a supervised update on answer tokens; of a reward model,
    mean Bradley-Terry loss per pair
sft/grad_norm  norm  global gradient norm before clipping, supervised update
sft/lr  1/update  learning rate of the supervised update
sft/tokens  tokens  answer tokens of the supervised update
reward_model/accuracy  share  pairs of an update in which the better completion scored higher,
    before the update
reward_model/margin  score  mean score of the better minus that of the worse completion
reward_model/skipped_updates  count  1 if the update was skipped because of a NaN or infinite loss
    or gradient
reward_model/eval_accuracy  share  held-out pairs in the right order
"""


class Metric(NamedTuple):
    """A metric that a run may write."""

    name: str
    unit: str
    meaning: str

    @property
    def measured(self) -> bool:
        return self.name.split("/")[0] in MEASURED

    def matches(self, name: str) -> bool:
        """Return whether a name is this metric, or fits its free part."""
        return re.fullmatch(re.sub(r"<\w+>", lambda _: FREE, self.name), name) is not None


METRICS = tuple(
    Metric(*line.split("  ", 2)) for line in TABLE.replace("\n    ", " ").strip().splitlines()
)


@functools.lru_cache(maxsize=4096)  # called for each metric of each line of a long run
def find_metric(name: str) -> Metric | None:
    """Return the registered metric of a name; None if there is none."""
    return next((metric for metric in METRICS if metric.matches(name)), None)


def check_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics as Python numbers; raise ValueError if a name is not registered."""
    checked: dict[str, float] = {}
    for name, value in metrics.items():
        if find_metric(name) is None:
            near = difflib.get_close_matches(name, [m.name for m in METRICS], n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"unknown metric {name!r}: names are fixed in runs/metrics.py{hint}")
        if isinstance(value, bool | str) or not hasattr(value, "__float__"):
            raise TypeError(f"metric {name}: {value!r} is not a number")
        checked[name] = value if type(value) is int else float(value)
    return checked


def reproducible(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that a repeated or resumed run on the CPU must reproduce bit for bit."""
    known = {name: find_metric(name) for name in metrics}
    return {name: metrics[name] for name, metric in known.items() if metric and not metric.measured}


def eval_metric(task: str, what: str) -> str:
    """Return `eval/<task>/<what>`; the task `my/tasks.py:Sum` becomes `tasks.py:Sum`."""
    return f"eval/{_component(task.rpartition('/')[2])}/{what}"


def is_eval_mean(name: str) -> bool:
    return name.startswith("eval/") and name.endswith("/mean")


def task_metric(what: str, task: str) -> str:
    """Return `<what>/task/<task>`, a metric of one of several mixed tasks."""
    return f"{what}/task/{_component(task.rpartition('/')[2])}"


def part_metric(part: str) -> str:
    """Return `reward/part/<part>`, the mean of `Score.parts[part]`."""
    return f"reward/part/{_component(part)}"


def _component(text: str) -> str:
    return re.sub(r"[/<>\s]", "_", text) or "_"
