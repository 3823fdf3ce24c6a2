"""The floor of `jetrl bench rollout`: what a decode step has to read."""

from __future__ import annotations

import itertools

from benchmarks.rollout import weight_bytes

from jetrl.models.policy import Policy
from jetrl.models.tiny import make_tiny


def test_a_step_reads_the_experts_that_its_tokens_can_choose(tmp_path) -> None:
    make_tiny(tmp_path / "m", "qwen3_moe")
    policy = Policy.from_pretrained(tmp_path / "m", "int8")
    rule, num_experts = policy.decoder.layers[0].block.shape.rule, 8
    sizes = [weight_bytes(policy, tokens) for tokens in range(1, 9)]
    full = num_experts // rule.num_chosen
    steps = [after - before for before, after in itertools.pairwise(sizes)]
    assert len(set(steps[: full - 1])) == 1
    assert steps[0] > 0
    assert not any(steps[full - 1 :])
