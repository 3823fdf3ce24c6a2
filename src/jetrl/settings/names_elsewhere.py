"""Settings by the names that they have in TRL, unsloth, verl and prime-rl.

Somebody who comes from there types the name that they know; the error for an unknown setting then
says what it is called here. docs/coming-from.md has the same names with what differs.
"""

from __future__ import annotations

NAMES_ELSEWHERE = {
    "adv_estimator": "algorithm.name",
    "batch_size": "rollout.prompts_per_step",
    "beta": "algorithm.kl",
    "clip_ratio": "algorithm.clip",
    "clip_ratio_c": "algorithm.dual_clip",
    "clip_ratio_high": "algorithm.clip_high",
    "clip_ratio_low": "algorithm.clip",
    "delta": "algorithm.dual_clip",
    "epsilon": "algorithm.clip",
    "epsilon_high": "algorithm.clip_high",
    "eval_steps": "eval.every",
    "gradient_accumulation_steps": "train.tokens_per_micro_batch",
    "gradient_checkpointing": "train.activation_checkpointing",
    "kl_coef": "algorithm.kl",
    "kl_loss_coef": "algorithm.kl",
    "learning_rate": "train.lr",
    "logger": "trackers.names",
    "lora_alpha": "adapter.alpha",
    "lora_rank": "adapter.rank",
    "loss_agg_mode": "algorithm.aggregation",
    "loss_type": "algorithm.name",
    "lr_scheduler_type": "train.schedule",
    "max_completion_length": "rollout.max_tokens",
    "max_grad_norm": "train.grad_clip",
    "max_new_tokens": "rollout.max_tokens",
    "max_response_length": "rollout.max_tokens",
    "max_steps": "loop.steps",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "num_generations": "rollout.samples_per_prompt",
    "output_dir": "run.dir",
    "per_device_train_batch_size": "train.tokens_per_micro_batch",
    "ppo_mini_batch_size": "train.updates_per_step",
    "report_to": "trackers.names",
    "rollouts_per_example": "rollout.samples_per_prompt",
    "save_freq": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "scale_rewards": "algorithm.normalize_std",
    "steps_per_generation": "train.updates_per_step",
    "target_modules": "adapter.targets",
    "test_freq": "eval.every",
    "total_training_steps": "loop.steps",
    "train_batch_size": "rollout.prompts_per_step",
    "use_rslora": "adapter.rslora",
}
