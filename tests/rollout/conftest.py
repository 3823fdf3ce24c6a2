"""A tiny policy for the tests of the engine: 2 layers, one token a character."""

from __future__ import annotations

import pytest
from tests.training.shared import config

from jetrl.models.policy import Policy
from jetrl.models.tiny import character_tokenizer
from jetrl.precision.plan import PrecisionPlan

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
TINY = config(
    **HEADS,
    vocab_size=98,
    num_hidden_layers=2,
    max_position_embeddings=128,
    initializer_range=0.2,  # logits far from uniform, so that a wrong one shows
    eos_token_id=1,
)


@pytest.fixture(scope="session")
def make_policy():
    """Policies by preset name, with random weights and, unless told otherwise, a tokenizer."""

    def make(preset="unified", tokenizer=True, **options):
        plan = PrecisionPlan.preset(preset).replace(**options)
        return Policy.from_config(
            TINY, plan, seed=0, tokenizer=character_tokenizer() if tokenizer else None
        )

    return make


@pytest.fixture(scope="session")
def policy(make_policy):
    """The shared one under `unified`: tests leave its weights alone."""
    return make_policy()
