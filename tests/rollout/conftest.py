"""A tiny policy for the tests of the engine: 2 layers, one token a character."""

from __future__ import annotations

import pytest
import torch

from jetrl.models.policy import Policy
from jetrl.models.tiny import character_tokenizer
from jetrl.precision.plan import PrecisionPlan

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 98,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,  # logits far from uniform, so that a wrong one shows
    "eos_token_id": 1,
}


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Matrices this small only get slower on more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
