"""The device ends a sequence where the host does: `take_draws` beside `rollout.sequence`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jetrl.kernels.decode import take_draws
from jetrl.kernels.decode_state import BROKEN, NOT_DRAWN, DecodeState, Drawn
from jetrl.rollout.sequence import RunningSequence
from jetrl.rollout.stopping import StopRules
from jetrl.types import PromptInputs

SEQUENCES, FORWARDS, VOCABULARY = 64, 12, 20


@pytest.mark.parametrize("stop_ids", [(), (3, 7, 19)], ids=str)
def test_a_sequence_ends_on_the_device_with_the_hosts_last_token(stop_ids: tuple[int, ...]) -> None:
    """Sequences with length limits of their own and the same stop ids, after their first tokens."""
    chance = np.random.default_rng(len(stop_ids))
    prompts = chance.integers(1, 30, SEQUENCES)
    max_tokens = chance.integers(2, FORWARDS + 6, SEQUENCES)
    # The first token is drawn with the prompt, and one that ends the sequence is not decoded.
    first = chance.integers(8, 19, SEQUENCES)
    draws = torch.from_numpy(chance.integers(0, VOCABULARY, (FORWARDS, SEQUENCES)))

    state = DecodeState.empty(SEQUENCES, 1, torch.device("cpu"))
    state.token.copy_(torch.from_numpy(first))
    state.position.copy_(torch.from_numpy(prompts))
    state.limit.copy_(torch.from_numpy(prompts + max_tokens - 1))
    state.active.fill_(1)
    state.stops[: 1 + len(stop_ids)] = torch.tensor([len(stop_ids), *stop_ids])
    lines = torch.zeros(FORWARDS, SEQUENCES)
    out = Drawn(lines.int(), lines, torch.zeros(1).int())
    zeros, rows = torch.zeros(SEQUENCES), torch.arange(SEQUENCES)
    for tokens in draws:
        take_draws(state, rows, tokens, zeros, zeros, out)

    for row in range(SEQUENCES):
        rules = StopRules(int(max_tokens[row]), frozenset(stop_ids))
        host = RunningSequence(
            0, PromptInputs((5,) * int(prompts[row])), 0, rules, [int(first[row])], [0.0]
        )
        count = host.extend(draws[:, row].tolist(), [0.0] * FORWARDS)
        drawn = out.tokens[:, row].tolist()
        assert drawn[:count] == draws[:count, row].tolist()
        assert drawn[count:] == [NOT_DRAWN] * (FORWARDS - count)
        assert bool(state.active[row]) != host.finished


def test_broken_logits_end_a_sequence() -> None:
    state = DecodeState.empty(2, 1, torch.device("cpu"))
    state.limit.fill_(100)
    state.active.fill_(1)
    out = Drawn(torch.zeros(2, 2).int(), torch.zeros(2, 2), torch.zeros(1).int())
    rows, tokens = torch.arange(2), torch.tensor([4, 5])
    take_draws(state, rows, tokens, torch.zeros(2), torch.tensor([1.0, torch.nan]), out)
    take_draws(state, rows, tokens, torch.zeros(2), torch.zeros(2), out)
    assert out.tokens.tolist() == [[4, BROKEN], [4, NOT_DRAWN]]
