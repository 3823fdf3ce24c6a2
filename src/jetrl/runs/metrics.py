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
from dataclasses import dataclass

FREE = r"[^/<>\s]+"
"""Pattern of <task> and <name>: a path component without blanks or angle brackets."""


@dataclass(frozen=True)
class Metric:
    """A metric that a run may write.

    Attributes:
        measured: Whether it is a time, speed or memory. All others have the same bits when a run is
            repeated on the CPU.
    """

    name: str
    unit: str
    meaning: str
    measured: bool = False

    def matches(self, name: str) -> bool:
        """Return whether a name is this metric, or fits its free part."""
        if "<" not in self.name:
            return name == self.name
        pattern = re.sub(r"<\w+>", lambda _: FREE, self.name)
        return re.fullmatch(pattern, name) is not None


METRICS: tuple[Metric, ...] = (
    Metric("reward/mean", "reward", "mean reward of the step's completions"),
    Metric("reward/std", "reward", "standard deviation of the step's rewards (population)"),
    Metric(
        "reward/zero_std_groups",
        "share",
        "groups whose completions all got the same reward, which teach nothing; absent if the "
        "algorithm does not compare them (reinforce_pp, ppo)",
    ),
    Metric(
        "reward/failures",
        "count",
        "completions that could not be scored (error or timeout); their reward is 0",
    ),
    Metric(
        "reward/unusable_replies",
        "count",
        "of these failures, multi-turn completions that ended because the environment's reply was "
        "no text for the model (empty, half a character, or one that the tokenizer lacks)",
    ),
    Metric("reward/part/<name>", "reward", "mean of a named part of the task's score"),
    Metric("reward/task/<task>", "reward", "mean reward of one of several mixed tasks"),
    Metric(
        "reward/overlong_penalty",
        "reward",
        "mean reduction of rewards near the length limit (algorithm.overlong_buffer)",
    ),
    Metric(
        "reward/kl_penalty",
        "reward",
        "mean reduction of rewards by the KL to the reference (algorithm.kl_in = reward)",
    ),
    Metric(
        "dynamic_sampling/rounds",
        "count",
        "draws of prompts in the step, including the first (algorithm.dynamic_sampling)",
    ),
    Metric(
        "dynamic_sampling/dropped_groups",
        "count",
        "groups not trained on, because of equal rewards or because enough were drawn; reward/* "
        "and response_length/* include them",
    ),
    Metric(
        "partial_rollout/unfinished",
        "count",
        "completions that continue in the next step (rollout.oversample)",
    ),
    Metric(
        "partial_rollout/earlier_tokens",
        "share",
        "trained tokens sampled by the policy of an earlier step; mismatch/* excludes them. Absent "
        "if there are none",
    ),
    Metric(
        "speculation/tokens_per_forward",
        "tokens",
        "tokens per sequence and decode forward since the last step, including evaluations; "
        "speculation/* is absent if rollout.speculation is off",
        True,
    ),
    Metric(
        "speculation/verify_share",
        "share",
        "share of decode time in forwards that verified drafts",
        True,
    ),
    Metric(
        "speculation/acceptance_self",
        "share",
        "acceptance rate of verified draft tokens from the sequence's own text; this and the next "
        "three are absent without such drafts",
        True,
    ),
    Metric(
        "speculation/acceptance_siblings",
        "share",
        "the same for drafts from other running completions of the prompt",
        True,
    ),
    Metric(
        "speculation/acceptance_earlier",
        "share",
        "the same for drafts from finished completions of the prompt, in this step, earlier steps "
        "and evaluations",
        True,
    ),
    Metric("speculation/acceptance_head", "share", "the same for drafts of the draft head", True),
    Metric(
        "draft_head/loss",
        "nats",
        "cross entropy of the draft head over its known tokens, before each update (mean over the "
        "step); draft_head/* needs rollout.speculation = head or auto",
    ),
    Metric(
        "draft_head/accuracy",
        "share",
        "share of training tokens whose next token was its first guess",
    ),
    Metric(
        "draft_head/skipped_updates",
        "count",
        "its updates skipped because of a gradient that is not finite; absent if there are none",
    ),
    Metric("timing/draft_head_s", "s", "training of the draft head; part of timing/update_s", True),
    Metric(
        "noise/sigma",
        "deviation",
        "of the Gaussian noise on the norm weights in this step (adapter.noise_start)",
    ),
    Metric("response_length/mean", "tokens", "mean length of a completion"),
    Metric("response_length/clip_ratio", "share", "completions cut off at rollout.max_tokens"),
    Metric("response_length/turns", "turns", "mean number of turns, in a task with turns"),
    Metric(
        "response_length/sampled",
        "tokens",
        "mean tokens sampled by the model, without the environment's, in a task with turns",
    ),
    Metric(
        "response_length/task/<task>",
        "tokens",
        "mean length of a completion of one of several mixed tasks",
    ),
    Metric(
        "policy/entropy", "nats", "mean entropy of the next-token distribution at sampled tokens"
    ),
    Metric("policy/kl_ref", "nats", "KL to the frozen reference (K3 estimate, mean over tokens)"),
    Metric("policy/clip_fraction", "share", "tokens whose probability ratio was clipped"),
    Metric(
        "policy/clip_low",
        "ratio",
        "lower bound of the ratio, as calibrated (algorithm.calibrate_clip_every)",
    ),
    Metric("policy/clip_high", "ratio", "upper bound of the ratio, as calibrated"),
    Metric(
        "policy/over_clipped",
        "share",
        "tokens with a negative advantage whose FP8 ratio is below the uncalibrated lower bound "
        "while their BF16 ratio is not, in steps that calibrate",
    ),
    Metric(
        "policy/grad_norm",
        "norm",
        "global gradient norm before clipping (mean over the step's updates)",
    ),
    Metric("policy/loss", "loss", "policy loss (mean over the step's updates, by their tokens)"),
    Metric("policy/active_fraction", "share", "sampled tokens whose advantage is not 0"),
    Metric("policy/lr", "1/update", "learning rate of the step's last update"),
    Metric(
        "policy/skipped_updates",
        "count",
        "updates skipped because of a NaN or infinite loss or gradient; absent if there are none",
    ),
    Metric(
        "policy/anomalies",
        "count",
        "numbers that went out of bounds in this step (loss, gradient norm, entropy, reward, "
        "draws; rules in docs/numbers.md); absent if none did",
    ),
    Metric(
        "correction/weight_mean",
        "ratio",
        "mean importance weight of algorithm.correction, after its bounds",
    ),
    Metric("correction/weight_max", "ratio", "largest importance weight after the bounds"),
    Metric("correction/ratio_max", "ratio", "largest importance ratio before the bounds"),
    Metric(
        "correction/touched_fraction",
        "share",
        "trained tokens whose weight the bounds changed or set to 0",
    ),
    Metric("critic/loss", "reward^2", "half the squared error of the critic, mean over tokens"),
    Metric("critic/clip_fraction", "share", "tokens whose change of value was clipped"),
    Metric(
        "critic/grad_norm",
        "norm",
        "global gradient norm of the critic before clipping (mean over the step's updates)",
    ),
    Metric("critic/lr", "1/update", "learning rate of the critic (mean over the step's updates)"),
    Metric(
        "critic/skipped_updates",
        "count",
        "updates of the critic skipped because of a NaN or infinite loss or gradient; absent if "
        "there are none",
    ),
    Metric("critic/value_mean", "reward", "mean value before the step"),
    Metric("critic/return_mean", "reward", "mean return"),
    Metric(
        "critic/explained_variance",
        "share",
        "1 - var(return - value) / var(return); 1 is a perfect critic",
    ),
    Metric(
        "sampling/surprise_z",
        "deviations",
        "distance of the sampled tokens' mean -log p from the entropy, over the step's first "
        "update: beyond 5, the sampler does not draw from the policy (docs/exactness.md). Absent "
        "with top_p, top_k, oversample, dynamic sampling or pairs of samples, which select draws",
    ),
    Metric(
        "mismatch/num_tokens",
        "tokens",
        "sampled tokens whose log-probs of trainer and sampler were compared; 0 if earlier "
        "policies drew all of them, or a log-prob is not finite",
    ),
    Metric(
        "mismatch/num_different",
        "tokens",
        "of these, tokens whose log-probs differ in any bit; 0 is right",
    ),
    Metric("mismatch/mean_abs_logprob_diff", "nats", "mean |trainer log-prob - sampler log-prob|"),
    Metric(
        "mismatch/max_abs_logprob_diff", "nats", "largest |trainer log-prob - sampler log-prob|"
    ),
    Metric("mismatch/k3_kl", "nats", "K3 estimate of the KL between sampler and trainer"),
    Metric(
        "mismatch/token_mult_prob_error",
        "ratio",
        "mean of exp|trainer log-prob - sampler log-prob|; 1 is right",
    ),
    Metric("timing/rollout_s", "s", "sampling completions", True),
    Metric(
        "timing/reward_s", "s", "scoring completions, except while others were still sampled", True
    ),
    Metric("timing/update_s", "s", "forward, backward and optimizer", True),
    Metric("timing/optimizer_s", "s", "AdamW on the master weights; part of timing/update_s", True),
    Metric("timing/requantize_s", "s", "quantizing the master weights", True),
    Metric(
        "timing/checkpoint_s",
        "s",
        "waiting until a checkpoint is copied, and the previous one is written",
        True,
    ),
    Metric("timing/eval_s", "s", "held-out evaluation", True),
    Metric("timing/step_s", "s", "the whole step", True),
    Metric(
        "throughput/rollout_tokens_per_s",
        "tokens/s",
        "sampled tokens per second of timing/rollout_s",
        True,
    ),
    Metric(
        "throughput/train_tokens_per_s",
        "tokens/s",
        "trained tokens, including prompts, per second of timing/update_s",
        True,
    ),
    Metric(
        "distributed/size",
        "ranks",
        "processes of the run, one per GPU; distributed/* is absent unless torchrun started "
        "several",
        True,
    ),
    Metric(
        "distributed/wait_share",
        "share",
        "share of timing/step_s in which a rank waited for others on the host (the longest "
        "completion, a score, a message), mean over ranks",
        True,
    ),
    Metric(
        "distributed/rollout_tokens_per_s_per_rank",
        "tokens/s",
        "throughput/rollout_tokens_per_s divided by the number of ranks",
        True,
    ),
    Metric(
        "distributed/train_tokens_per_s_per_rank",
        "tokens/s",
        "throughput/train_tokens_per_s divided by the number of ranks",
        True,
    ),
    Metric(
        "memory/peak_gib",
        "GiB",
        "peak memory of the device (on CPU: of the process); maximum over ranks",
        True,
    ),
    Metric("memory/rollout_peak_gib", "GiB", "peak memory while sampling (GPU)", True),
    Metric("memory/update_peak_gib", "GiB", "peak memory while training (GPU)", True),
    Metric(
        "memory/rollout_retries",
        "count",
        "times sampling restarted with a smaller batch after running out of memory; else absent",
        True,
    ),
    Metric(
        "memory/train_retries",
        "count",
        "times an update restarted with micro-batches of half the tokens; else absent",
        True,
    ),
    Metric(
        "eval/<task>/mean",
        "reward",
        "mean reward on the held-out split, over eval.samples completions per prompt",
    ),
    Metric(
        "eval/<task>/pass_at_k",
        "share",
        "held-out prompts solved by at least one of k = eval.samples completions",
    ),
    Metric("eval/<task>/response_length", "tokens", "mean length of a held-out completion"),
    Metric("eval/<task>/clip_ratio", "share", "held-out completions cut off at the token limit"),
    Metric("eval/<task>/failures", "count", "held-out completions that could not be scored"),
    Metric(
        "sft/loss",
        "nats",
        "mean next-token loss of a supervised update on answer tokens; of a reward model, mean "
        "Bradley-Terry loss per pair",
    ),
    Metric("sft/grad_norm", "norm", "global gradient norm before clipping, supervised update"),
    Metric("sft/lr", "1/update", "learning rate of the supervised update"),
    Metric("sft/tokens", "tokens", "answer tokens of the supervised update"),
    Metric(
        "reward_model/accuracy",
        "share",
        "pairs of an update in which the better completion scored higher, before the update",
    ),
    Metric(
        "reward_model/margin",
        "score",
        "mean score of the better minus that of the worse completion",
    ),
    Metric(
        "reward_model/skipped_updates",
        "count",
        "1 if the update was skipped because of a NaN or infinite loss or gradient",
    ),
    Metric("reward_model/eval_accuracy", "share", "held-out pairs in the right order"),
)

KNOWN_AS: dict[str, dict[str, str]] = {
    "verl": {
        "reward/mean": "critic/score/mean",
        "dynamic_sampling/rounds": "train/num_gen_batches",
        "response_length/mean": "response_length/mean",
        "response_length/clip_ratio": "response_length/clip_ratio",
        "policy/entropy": "actor/entropy",
        "policy/kl_ref": "actor/kl_loss (times kl_loss_coef: kl_coef)",
        "policy/clip_fraction": "actor/pg_clipfrac",
        "policy/grad_norm": "actor/grad_norm",
        "policy/loss": "actor/pg_loss",
        "policy/lr": "actor/lr",
        "correction/weight_mean": "rollout_corr/rollout_is_mean",
        "correction/touched_fraction": "rollout_corr/rollout_rs_masked_fraction (of the masks)",
        "critic/clip_fraction": "critic/vf_clipfrac",
        "critic/grad_norm": "critic/grad_norm",
        "critic/value_mean": "critic/values/mean",
        "critic/return_mean": "critic/returns/mean",
        "critic/explained_variance": "critic/vf_explained_var",
        "mismatch/mean_abs_logprob_diff": "training/rollout_probs_diff_mean (of probabilities)",
        "mismatch/max_abs_logprob_diff": "training/rollout_probs_diff_max (of probabilities)",
        "mismatch/k3_kl": "rollout_corr/k3_kl",
        "timing/rollout_s": "timing_s/gen",
        "timing/reward_s": "timing_s/reward",
        "timing/update_s": "timing_s/update_actor",
        "timing/checkpoint_s": "timing_s/save_checkpoint",
        "timing/eval_s": "timing_s/testing",
        "timing/step_s": "timing_s/step",
        "throughput/train_tokens_per_s": "perf/throughput (of the whole step, per GPU)",
        "memory/peak_gib": "perf/max_memory_allocated_gb",
        "eval/<task>/mean": "val-core/*/mean@N",
    },
    "NeMo RL": {
        "policy/entropy": "approx_entropy",
        "policy/clip_fraction": "probs_ratio_clamped (the clipped ratio itself)",
        "mismatch/k3_kl": "gen_kl_error",
        "mismatch/token_mult_prob_error": "token_mult_prob_error",
    },
    "TRL": {
        "reward/mean": "reward",
        "reward/std": "reward_std",
        "reward/zero_std_groups": "frac_reward_zero_std",
        "reward/kl_penalty": "objective/non_score_reward (its negative)",
        "response_length/mean": "completions/mean_length",
        "response_length/clip_ratio": "completions/clipped_ratio",
        "policy/entropy": "entropy",
        "policy/kl_ref": "kl",
        "policy/clip_fraction": "clip_ratio/*",
        "policy/grad_norm": "grad_norm",
        "policy/loss": "loss",
        "policy/lr": "learning_rate",
        "correction/weight_mean": "importance_sampling_ratio/mean",
        "correction/weight_max": "importance_sampling_ratio/max",
        "mismatch/mean_abs_logprob_diff": "sampling/sampling_logp_difference/mean",
        "mismatch/max_abs_logprob_diff": "sampling/sampling_logp_difference/max",
        "timing/step_s": "step_time",
        "reward_model/accuracy": "accuracy",
        "reward_model/margin": "margin",
    },
    "prime-rl": {
        "reward/mean": "reward/all/mean",
        "policy/entropy": "entropy/all/mean",
        "policy/grad_norm": "optim/grad_norm",
        "policy/loss": "loss/mean",
        "policy/lr": "optim/lr",
        "mismatch/k3_kl": "mismatch_kl/all/mean",
        "timing/step_s": "time/step",
        "memory/peak_gib": "perf/peak_memory",
        "eval/<task>/mean": "eval/<env>/avg@k",
        "eval/<task>/pass_at_k": "eval/<env>/pass@k",
    },
    "others": {
        "mismatch/mean_abs_logprob_diff": "slime train/train_rollout_logprob_abs_diff; SkyRL "
        "policy/rollout_train_logprobs_abs_diff_mean; TitanRL bit_wise/logprob_diff/mean",
        "mismatch/max_abs_logprob_diff": "TitanRL bit_wise/logprob_diff/max",
    },
}
"""Names of metrics in other systems, by system; in brackets what they measure differently."""


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
