"""The states of a run's parts in a checkpoint are checked before a part takes them over."""

from __future__ import annotations

import json

import pytest

from jetrl.errors import UserError
from jetrl.session.checkpoints import NAMES, check_extra

MEMBER = [7, [1, 2], [-0.5, -1.0], "cancelled", "a\ud800b", [1, 1]]
EXTRA = {
    "seed": 3,
    "metrics": {"reward/mean": 0.5, "policy/loss": float("nan")},
    "states": {
        "data": "0123456789abcdef",
        "digest": {"run": "0123456789abcdef" * 4, "weights": "0123456789abcdef"},
        "prompts": {"p": [1.5, 2.0]},
        "partial rollouts": [["p", [MEMBER]]],
        "micro_batches": {"tokens": 8, "setting": 16},
        "rollout_sizes": {"asked": [8, 16, None], "now": [4, 8, 3]},
        "guard": {"in_a_row": 0},
        "sft_guard": {"in_a_row": 2},
        "critic_guard": {"in_a_row": 0},
        "clip": {"steps": 4, "low": 0.8, "high": 1.2},
        "text": {"digest": "0123456789abcdef", "place": [1, 0, 3, 64]},
    },
}


def test_what_the_parts_write_fits():
    check_extra(json.loads(json.dumps(EXTRA)), "state.json")
    assert set(EXTRA["states"]) == NAMES
    check_extra({"states": {}}, "state.json")


ODD = [
    ({"guard": None, "clip": {"steps": 1, "low": float("nan"), "high": 1}}, "clip.low = nan"),
    ({"data": "0123"}, "data = '0123'"),
    ({"digest": {"run": "0123456789abcdef"}}, "digest.run = '0123456789abcdef'"),
    ({"prompts": {"p": ["1", 2]}}, "prompts.p.0 = '1'"),
    ({"rollout_sizes": {"asked": [1, 1, 1], "now": [None, 1, 1]}}, "rollout_sizes"),
    ({"partial rollouts": [["p", [[*MEMBER[:1], [1], *MEMBER[2:]]]]]}, "log-probs of other tokens"),
    ({"partial rollouts": [["p", [[1, [1], [0.0], "odd", "", []]]]]}, "= 'odd'"),
    ({"text": {"digest": "0123456789abcdef", "place": [0, 0, -1, 0]}}, "text.place.2 = -1"),
    ([], "states = "),
]


@pytest.mark.parametrize("states, message", ODD, ids=range(len(ODD)))
def test_odd_states_name_file_and_field(states, message):
    with pytest.raises(UserError, match=r"^state\.json: extra: ") as caught:
        check_extra({"states": states}, "state.json")
    assert message in str(caught.value)
