"""From a task's prompts to scored completions: sampling, rewards, environments, evaluation."""
