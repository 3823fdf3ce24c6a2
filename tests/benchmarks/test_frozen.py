"""`jetrl bench frozen`: the reference is the base, and its plan changes log-probs and the KL."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import frozen
from jetrl.errors import UserError
from jetrl.models.policy import Policy

WORDS = ["--shape", "tiny", "--layers", "1", "--device", "cpu", "--prompts", "2", "--samples", "2"]
SHORT = ["--prompt-length", "8", "--response-length", "12", "--rounds", "1"]


def rows_of(monkeypatch: pytest.MonkeyPatch, *more: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(frozen, "print_table", found.extend)
    frozen.main([*WORDS, *SHORT, "--tokens-per-micro-batch", "48", *more])
    return found


def test_plans_of_a_reference_are_compared_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[list[torch.Tensor]] = []

    def kl_term(policy: torch.Tensor, reference: torch.Tensor) -> float:
        kept.append([policy.double(), reference.double()])
        return plain(policy, reference)

    plain = frozen.kl_term
    monkeypatch.setattr(frozen, "kl_term", kl_term)
    plans = ["--plan", "bf16", "--plan", "int8", "--plan", "bf16"]
    first, other, again = rows_of(monkeypatch, *plans)
    assert (first["tokens"], first["sampled_tokens"]) == (80, 48)
    assert first["mean_abs_logprob_change"] == again["mean_abs_logprob_change"] == 0
    assert again["kl"] == again["kl_of_first"] == first["kl"] == first["kl_of_first"] > 0
    assert other["mean_abs_logprob_change"] > 0
    assert other["weights_gib"] <= first["weights_gib"]
    # By hand, from the log-probs: those of the policy and of the reference under int8.
    policy, reference = kept[2]
    d = reference - policy
    assert other["kl"] == pytest.approx(float((d.exp() - d - 1).mean()), rel=1e-5)
    change = 100 * (other["kl"] / first["kl"] - 1)
    assert other["kl_change_percent"] == pytest.approx(change, abs=0.01)
    assert float((reference - kept[0][1]).abs().mean()) == other["mean_abs_logprob_change"]


def test_a_policy_without_a_change_has_no_kl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters whose B is zero are the base, so the KL term is 0 under the same plan only."""

    def untrained(*given: Any) -> Policy:
        policy = plain(*given)
        with torch.no_grad():
            for name, master in policy.master_weights().items():
                master.mul_(0.0 if name.endswith("lora_B") else 1.0)
        policy.requantize()
        return policy

    plain = frozen.make_policy
    monkeypatch.setattr(frozen, "make_policy", untrained)
    same, other = rows_of(monkeypatch, "--plan", "int8", "--plan", "bf16")
    assert same["kl"] == other["kl"] == 0
    assert same["kl_change_percent"] is None
    assert other["kl_of_first"] > 0


def test_a_reference_needs_adapters_next_to_it() -> None:
    with pytest.raises(UserError, match="--adapter-rank must be at least 1"):
        frozen.main([*WORDS, "--adapter-rank", "0"])
