"""The document docs/metrics.md, made whole from the registry of metric names."""

from __future__ import annotations

from jetrl.runs.metrics import METRICS

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


def render_metrics_document() -> str:
    """Return docs/metrics.md: what is measured, in which unit, and what other systems call it."""
    lines = [
        "# Metrics",
        "",
        "What a run writes to `metrics.jsonl`, an object a line: `step`, `time` (Unix seconds),",
        "`phase` (`sft` in steps of the supervised warm-up, left out in RL steps), `digest`",
        "(the [digest](exactness.md#the-digest-of-a-run) after the step as `run`, and its",
        "parts), and the names below. A step has what was measured in it: an evaluation, for",
        "one, only now and then. Floats are written so that they read back bit-equal;",
        "not-a-number is written `NaN`, infinity `Infinity`. This page is made from the",
        "registry by `make docs`.",
        "",
        "| name | unit | meaning |",
        "| --- | --- | --- |",
        *(f"| `{m.name}` | {m.unit} | {_cell(m.meaning)} |" for m in METRICS),
        "",
        "`<task>` is the task's name without folders, `<name>` a part of the task's score. Times,",
        "speeds and memory depend on the machine. Everything else is the same, bit for bit, when a",
        "run is repeated, or cut and resumed, on the CPU.",
        "",
        "## Names in other systems",
        "",
        "The nearest name elsewhere; where it measures something slightly different, that is said.",
        "`token_mult_prob_error` above `1.05` is NeMo RL's alarm; here, under an exact plan, any",
        "value but 1, that is any `mismatch/num_different` but 0, stops the run.",
        "",
        "| jetrl | " + " | ".join(KNOWN_AS) + " |",
        "| --- |" + " --- |" * len(KNOWN_AS),
    ]
    for metric in METRICS:
        names = [_cell(known.get(metric.name, "")) for known in KNOWN_AS.values()]
        if any(names):
            lines.append(f"| `{metric.name}` | " + " | ".join(names) + " |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;").replace("*", "\\*")
