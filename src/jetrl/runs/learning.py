"""Warnings about a run that cannot learn, from its rewards, groups and answers.

Each rule looks at the mean over the newest `STEPS` steps and names a remedy. A run that learns is
never warned. Numbers that go out of bounds (spikes, entropy) are in anomalies.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from jetrl.runs.format import number, percent
from jetrl.runs.history import mean
from jetrl.runs.metrics import part_metric
from jetrl.runs.watch import Watch

STEPS = 5
SAME = 0.9  # share of groups without variance
CUT_OFF = 0.5  # share of completions
UNRECOGNISED = 0.02  # share of completions with an answer
LOOK = "look at completions and their rewards (in rollouts/, or by jetrl train --preflight)"
ANSWERED = part_metric("answered")  # tasks give this part: whether the text holds an answer


class Learning(Watch):
    """A watch for problems that keep a run from learning."""

    window = STEPS

    def warnings(self, metrics: Mapping[str, float]) -> dict[str, str] | None:
        """Take in a step, and return its problems; a step without rewards has no effect."""
        if "reward/mean" not in metrics:
            return None
        self._steps.append(metrics)
        if len(self._steps) < STEPS:
            return None
        return problems(self._steps, f"over {STEPS} steps", LOOK)


def problems(steps: Collection[Mapping[str, float]], when: str, look: str) -> dict[str, str]:
    """Return the problems that keep steps from teaching, by kind, in words."""

    def mean_of(name: str) -> float | None:
        values = [step[name] for step in steps if name in step]
        return mean(values) if values else None

    texts: dict[str, str] = {}
    reward = mean(step["reward/mean"] for step in steps)
    spread = max(step.get("reward/std", 0.0) for step in steps)
    same = mean_of("reward/zero_std_groups") or 0.0
    cut_off = mean_of("response_length/clip_ratio") or 0.0
    answered = mean_of(ANSWERED)
    if answered is not None and answered <= UNRECOGNISED:
        texts["format"] = (
            f"{when}: {percent(answered)} of the completions hold an answer in the form that the "
            f"task looks for: {look}, say the form in the prompt or in task.system_prompt, warm up "
            "on worked answers (sft.steps), or change the task's checker"
        )
    if cut_off >= CUT_OFF:
        texts["cut off"] = (
            f"{when}: {percent(cut_off)} of the completions were cut off at rollout.max_tokens, "
            "most likely before their answer: raise it, or see to it that completions end (the "
            "model's end-of-sequence token, the task's stop strings, a chat template)"
        )
    if spread == 0.0 and len({step["reward/mean"] for step in steps}) == 1:
        texts["one reward"] = (
            f"{when}: every completion got the reward {number(reward)}: there is nothing to learn "
            "from"
            + (
                f": {look}; warm up on worked answers (sft.steps), take easier prompts, or a "
                "reward with parts"
                if reward <= 0
                else ". If the task is solved the run is done; else its score tells nothing apart"
            )
        )
    elif same >= SAME:
        texts["same rewards"] = (
            f"{when}: in {percent(same)} of the groups all completions got the same reward (the "
            f"mean is {number(reward)}), which teaches nothing: take prompts that are solved "
            "sometimes (data.order=pass_rate, other data), raise rollout.samples_per_prompt, or "
            "use an algorithm with dynamic sampling (algorithm.dynamic_sampling=true)"
        )
    return texts
