"""Whether a run can learn at all, in words: what its rewards, groups and answers say.

Each rule looks at the mean over the newest `STEPS` steps and names what to do. A warning is said
when it begins, and again only if it went away in between; a run that learns is never warned. What
is said is a function of the steps' metrics alone, so a resumed run, and the report, say the same.
Numbers that go out of bounds (spikes, entropy) are anomalies.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from statistics import fmean

from jetrl.runs.format import number, percent

STEPS = 5
SAME = 0.9  # share of groups without variance
CUT_OFF = 0.5  # share of completions
UNRECOGNISED = 0.02  # share of completions with an answer
LOOK = "look at completions and their rewards (in rollouts/, or by jetrl train --preflight)"
ANSWERED = "reward/part/answered"  # tasks report under this name whether they found an answer


class Learning:
    """Watches a run. history: the metrics of the RL steps so far, in order."""

    def __init__(self, history: Iterable[Mapping[str, float]] = ()) -> None:
        self._steps: deque[Mapping[str, float]] = deque(maxlen=STEPS)
        self._going_on: set[str] = set()
        for metrics in history:
            self.see(metrics)

    def see(self, metrics: Mapping[str, float]) -> list[str]:
        """Takes in a step; one without rewards (an evaluation) says nothing. Returns warnings."""
        if "reward/mean" not in metrics:
            return []
        self._steps.append(metrics)
        if len(self._steps) < STEPS:
            return []
        found = problems(self._steps, f"over {STEPS} steps", LOOK)
        new = [text for name, text in found.items() if name not in self._going_on]
        self._going_on = set(found)
        return new


def problems(steps: Collection[Mapping[str, float]], when: str, look: str) -> dict[str, str]:
    """What keeps these steps from teaching, by kind, in words.

    steps: their metrics, at least one. when, look: for the messages, over what, and where
        completions can be looked at.
    """

    def mean(name: str) -> float | None:
        values = [step[name] for step in steps if name in step]
        return fmean(values) if values else None

    found: dict[str, str] = {}
    reward = fmean(step["reward/mean"] for step in steps)
    spread = max(step.get("reward/std", 0.0) for step in steps)
    same = mean("reward/zero_std_groups") or 0.0
    cut_off = mean("response_length/clip_ratio") or 0.0
    answered = mean(ANSWERED)
    if answered is not None and answered <= UNRECOGNISED:
        found["format"] = (
            f"{when}: {percent(answered)} of the completions hold an answer in the form that the "
            f"task looks for: {look}, say the form in the prompt or in task.system_prompt, warm up "
            "on worked answers (sft.steps), or change the task's checker"
        )
    if cut_off >= CUT_OFF:
        found["cut off"] = (
            f"{when}: {percent(cut_off)} of the completions were cut off at rollout.max_tokens, "
            "most likely before their answer: raise it, or see to it that completions end (the "
            "model's end-of-sequence token, the task's stop strings, a chat template)"
        )
    if spread == 0.0 and len({step["reward/mean"] for step in steps}) == 1:
        found["one reward"] = (
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
        found["same rewards"] = (
            f"{when}: in {percent(same)} of the groups all completions got the same reward (the "
            f"mean is {number(reward)}), which teaches nothing: take prompts that are solved "
            "sometimes (data.order=pass_rate, other data), raise rollout.samples_per_prompt, or "
            "use an algorithm with dynamic sampling (algorithm.dynamic_sampling=true)"
        )
    return found
