"""Warnings about a run, from its metrics: it does not learn, or a metric is out of bounds.

`Learning` checks rewards, groups and answers over STEPS steps; a run that learns never triggers it.
`Anomalies` compares metrics with earlier steps, so nothing needs tuning per model. Fixed bounds:
sampling/surprise_z, exceeded by chance in fewer than 1 of 130,000 steps, and the means of
mismatch/k3_kl and policy/kl_ref over the RECENT newest steps. No study run under `mixed` reached a
mismatch of APART nats. A mismatch above LEAST_APART also counts if each of the RECENT newest steps
has APART_RATIO times the earlier median, which no study run had.

A spike is SPIKE robust standard deviations (1.4826 times the median absolute deviation) from the
median of the last WINDOW steps, and much larger than it. Entropy of the RECENT newest steps is
compared with the older half of the window, and only if the reward did not rise: low entropy is
normal once a task is learned. A reward collapses if the mean of the RECENT newest steps is
below half the median before, by more than the noise of single steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from statistics import median

from jetrl.runs.format import number, percent
from jetrl.runs.history import mean
from jetrl.runs.metrics import part_metric
from jetrl.types import Metrics


class Watch:
    """Reports each warning about a run's RL steps once, when it starts.

    Warnings depend only on metrics, so a resumed run and the report show the same ones.
    """

    window: int

    def __init__(self, history: Iterable[Metrics] = ()) -> None:
        self._steps: deque[Metrics] = deque(maxlen=self.window)
        self._lasting: set[str] = set()
        for metrics in history:
            self.see(metrics)

    def see(self, metrics: Metrics) -> list[str]:
        """Add a step's metrics; return the warnings that start at this step."""
        warnings = self.warnings(metrics)
        if warnings is None:
            return []
        new = [text for kind, text in warnings.items() if kind not in self._lasting]
        self._lasting = set(warnings)
        return new

    def warnings(self, metrics: Metrics) -> dict[str, str] | None:
        """Add a step; return its warnings by kind, or None if the step does not count."""
        raise NotImplementedError


STEPS = 5
SAME = 0.9  # fraction of zero-advantage groups
CUT_OFF = 0.5  # share of completions
UNRECOGNISED = 0.02  # fraction of completions with an answer
LOOK = "look at completions and their rewards (in rollouts/, or with jetrl train --preflight)"
ANSWERED = part_metric("answered")  # score part: the text contains an answer


class Learning(Watch):
    window = STEPS

    def warnings(self, metrics: Metrics) -> dict[str, str] | None:
        if "reward/mean" not in metrics:
            return None
        self._steps.append(metrics)
        if len(self._steps) < STEPS:
            return None
        return problems(self._steps, f"over {STEPS} steps", LOOK)


def problems(steps: Collection[Metrics], when: str, look: str) -> dict[str, str]:

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
            f"{when}: {percent(answered)} of the completions have an answer in the expected form: "
            f"{look}, describe the form in task.system_prompt, or warm up (sft.steps)"
        )
    if cut_off >= CUT_OFF:
        texts["truncated"] = (
            f"{when}: {percent(cut_off)} of the completions were truncated at rollout.max_tokens: "
            "raise it, or make sure that completions end (stop strings, a chat template)"
        )
    if spread == 0.0 and len({step["reward/mean"] for step in steps}) == 1:
        advice = "If the task is solved, the run is done; otherwise the score is too coarse"
        if reward <= 0:
            advice = f"{look}; warm up (sft.steps), or choose easier prompts"
        texts["one reward"] = f"{when}: every completion got the reward {number(reward)}: {advice}"
    elif same >= SAME:
        texts["same rewards"] = (
            f"{when}: in {percent(same)} of the groups all completions got the same reward, which "
            "teaches nothing: choose prompts that are sometimes solved (data.order=pass_rate), "
            "raise rollout.samples_per_prompt, or turn on algorithm.dynamic_sampling"
        )
    return texts


WINDOW = 32  # steps
ENOUGH = 12  # minimum steps before the first warning
RECENT = 4  # steps
SPIKE = 10.0  # robust standard deviations
SPIKE_RATIO = 8.0  # ratio to the median gradient norm, whose tail is long with small batches
SPIKE_LOSS = 0.1  # policy losses average advantages of size 1, so ignore smaller jumps
COLLAPSED, EXPLODED = 0.25, 2.0  # fractions of the previous entropy
EXPLOSION_NATS = 0.5
SAME_REWARD = 0.05  # fraction of the reward range in the window; smaller changes are not a rise
LEFT_REWARD = 0.5  # fraction of the previous reward; below is a collapse
REWARD_NOISE = 3.0  # standard deviations of single steps
SURPRISE = 5.0  # threshold of sampling/surprise_z
APART, LEAST_APART, APART_RATIO = 0.04, 0.005, 8.0  # thresholds of mismatch/k3_kl, in nats
LEFT_REFERENCE = 1.0  # nats of policy/kl_ref, per token


class Anomalies(Watch):
    window = WINDOW

    def warnings(self, metrics: Metrics) -> dict[str, str]:
        texts = {
            "gradient": self._gradient_spike(metrics),
            "loss": self._loss_spike(metrics),
            "entropy": self._entropy(metrics),
            "reward": self._reward(metrics),
            "surprise": _surprise(metrics),
            "mismatch": self._mismatch(metrics),
            "reference": self._reference(metrics),
        }
        self._steps.append(metrics)
        return {kind: text for kind, text in texts.items() if text}

    def _values(self, name: str) -> list[float]:
        values = [float(step[name]) for step in self._steps if name in step]
        return [value for value in values if math.isfinite(value)]

    def _gradient_spike(self, metrics: Metrics) -> str:
        norm = metrics.get("policy/grad_norm", 0.0)
        before = [value for value in self._values("policy/grad_norm") if value > 0]
        usual, spread = _usual(before)
        if spread == math.inf or norm <= SPIKE_RATIO * usual or norm - usual <= SPIKE * spread:
            return ""
        return (
            f"gradient norm {number(norm)}, {number(norm / usual)} times the median of the last "
            f"{len(before)} steps; train.grad_clip limits its effect; if it recurs, lower train.lr"
        )

    def _loss_spike(self, metrics: Metrics) -> str:
        loss, before = metrics.get("policy/loss", 0.0), self._values("policy/loss")
        usual, spread = _usual(before)
        if spread == math.inf or abs(loss - usual) <= max(SPIKE * spread, SPIKE_LOSS):
            return ""
        return (
            f"policy loss {number(loss)}; the median of the last {len(before)} steps is "
            f"{number(usual)}: look at this step's rewards and ratios (policy/clip_fraction)"
        )

    def _entropy(self, metrics: Metrics) -> str:
        entropies = [*self._values("policy/entropy"), metrics.get("policy/entropy", math.nan)]
        rewards = [*self._values("reward/mean"), metrics.get("reward/mean", math.nan)]
        if len(entropies) < WINDOW or len(rewards) < WINDOW or not math.isfinite(entropies[-1]):
            return ""
        old, new = median(entropies[: WINDOW // 2]), mean(entropies[-RECENT:])
        rise = mean(rewards[-RECENT:]) - median(rewards[: WINDOW // 2])
        if rise > SAME_REWARD * max(map(abs, rewards)):
            return ""
        went = f"from {number(old)} to {number(new)} nats in {WINDOW} steps without a higher reward"
        if new < COLLAPSED * old:
            return (
                f"entropy collapses, {went}: the samples of a group become equal and give no "
                "signal; lower train.lr, raise algorithm.clip_high, or return to a checkpoint"
            )
        if new > EXPLODED * old and new - old > EXPLOSION_NATS:
            return (
                f"entropy explodes, {went}: the policy turns to noise; lower train.lr, set "
                "algorithm.kl, or return to a checkpoint"
            )
        return ""

    def _reward(self, metrics: Metrics) -> str:
        rewards = [*self._values("reward/mean"), metrics.get("reward/mean", math.nan)]
        if len(rewards) < ENOUGH + RECENT or not reward_collapses(rewards, RECENT):
            return ""
        before, now = median(rewards[:-RECENT]), mean(rewards[-RECENT:])
        return (
            f"reward collapses, from {number(before)} to {number(now)} in {RECENT} steps: unless "
            "scorers fail (reward/failures), return to a checkpoint, with a lower train.lr or "
            "fewer updates per step (train.updates_per_step)"
        )

    def _mismatch(self, metrics: Metrics) -> str:
        kl = metrics.get("mismatch/k3_kl", math.nan)
        before = self._values("mismatch/k3_kl")
        recent, earlier = [*before[1 - RECENT :], kl], before[: 1 - RECENT]
        usual, spread = _usual(earlier)
        grew = spread < math.inf and min(recent) > max(LEAST_APART, APART_RATIO * usual)
        if math.isnan(kl) or not (grew or mean(recent) > APART):
            return ""
        was = f"; it was {number(usual)}" if grew else ""
        return (
            f"sampler and trainer are {number(mean(recent))} nats apart (mismatch/k3_kl, mean of "
            f"{len(recent)} steps{was}): the sampler may have stale or wrong weights. To "
            "find out, run a step with precision.preset=int8 or unified, which stops at the first "
            "mismatch; `jetrl parity MODEL --locate` names the operation"
        )

    def _reference(self, metrics: Metrics) -> str:
        kl = metrics.get("policy/kl_ref", math.nan)
        recent = [*self._values("policy/kl_ref")[1 - RECENT :], kl]
        if math.isnan(kl) or mean(recent) <= LEFT_REFERENCE:
            return ""
        return (
            f"the policy is {number(mean(recent))} nats per token from its reference "
            f"(policy/kl_ref, mean of {len(recent)} steps), which is far; raise algorithm.kl, "
            "lower train.lr, or return to a checkpoint"
        )


def _surprise(metrics: Metrics) -> str:
    z = metrics.get("sampling/surprise_z", 0.0)
    if abs(z) <= SURPRISE:
        return ""
    cause = (
        "the sampler does not draw from the distribution that it reports (temperature, cutoffs, "
        "random numbers); do not trust this run's gradients until the cause is found"
    )
    if metrics.get("mismatch/num_different"):
        cause = (
            "log-probs of sampler and trainer also differ, perhaps the only cause; to find out, "
            "run a step with precision.preset=int8"
        )
    return (
        f"the sampled tokens are {'less' if z > 0 else 'more'} probable than the policy's entropy "
        f"allows, by {number(abs(z))} standard deviations (sampling/surprise_z): {cause}"
    )


def reward_collapses(rewards: Sequence[float], recent: int) -> bool:
    """Return True if the last `recent` mean rewards dropped below half, beyond noise.

    Needs two earlier rewards; mostly negative rewards never collapse.
    """
    before, now = rewards[:-recent], mean(rewards[-recent:])
    steps = [abs(new - old) for old, new in pairwise(before)]
    # Differences of neighbors are not affected by a trend. Their mean is 1.128 standard deviations,
    # their median 0.954; the median is 0 if most steps have the same reward.
    noise = median(steps) / 0.954 or mean(steps) / 1.128
    usual = median(before)
    return usual > 0 and now < LEFT_REWARD * usual and usual - now > REWARD_NOISE * noise


def _usual(before: list[float]) -> tuple[float, float]:
    """Return median and robust standard deviation; infinite with too few steps."""
    if len(before) < ENOUGH:
        return 0.0, math.inf
    middle = median(before)
    return middle, 1.4826 * median(abs(value - middle) for value in before)
