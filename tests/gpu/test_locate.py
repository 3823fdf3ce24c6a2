"""On a GPU too, `locate` names the operation: with the kernels of decode, prefill and training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import config
from torch import Tensor

from jetrl import Policy
from jetrl.precision import PrecisionPlan
from jetrl.session.parity import locate, measure, random_prompts

pytestmark = pytest.mark.gpu


def policy(preset: str) -> Policy:
    return Policy.from_config(config(), PrecisionPlan.preset(preset), seed=0, device="cuda")


@pytest.mark.parametrize("preset", ["unified", "jet"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_nothing_is_found_where_nothing_differs(preset: str, temperature: float) -> None:
    p = policy(preset)
    for prompt, completion in (([9], [4]), ([7] * 70, [1, 2, 3])):
        assert locate(p, prompt, completion, temperature) is None


def test_what_mixed_differs_in_first() -> None:
    p = policy("mixed")
    result = measure(p, prompts=random_prompts(p, 4, 80, seed=2), samples=1, max_tokens=8)
    assert result.first_different is not None
    found = locate(p, *result.first_different)
    assert found is not None
    assert found.operation == "layers.0.input_norm"


def test_a_fault_of_decode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode that does not see the newest token's keys."""
    import jetrl.kernels.attention.hopper as kernels

    for name in ("attend_decode", "attend_decode_quantized"):

        def wrong(
            q: Tensor, pages: Any, tables: Tensor, lengths: Tensor, *rest: Any, true: Any
        ) -> Any:
            return true(q, pages, tables, (lengths - 1).clamp(min=1), *rest)

        true = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *rest, true=true: wrong(*rest, true=true))
    p = policy("unified")
    result = measure(p, prompts=[[7] * 70], samples=1, max_tokens=8)
    assert result.different > 0
    assert result.first_different is not None
    prompt, completion = result.first_different
    found = locate(p, prompt, completion)
    assert found is not None
    assert (found.operation, found.position) == ("layers.0.attention", len(prompt))
    torch.cuda.synchronize()
