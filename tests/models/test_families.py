"""config.json -> ModelConfig: what is read, from which layout, and what is refused."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from transformers import CONFIG_MAPPING, LlamaConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jetrl.errors import UserError
from jetrl.models.config_schema import HfConfig
from jetrl.models.families import FAMILIES, ModelConfig
from jetrl.models.rope import TYPES, RopeScaling, YarnScaling, frequencies_of

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
TEXT = [name for name, family in FAMILIES.items() if family.language is None]


def config_json(family: str = "qwen3", **changes: object) -> dict[str, object]:
    """A small transformers 4 config.json; a change to None removes the key."""
    config: dict[str, object] = {
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        "vocab_size": 100,
        "hidden_size": 64,
        **FAMILIES[family].block.tiny(),
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": [7, 9],
    }
    config |= changes
    return {key: value for key, value in config.items() if value is not None}


WIDE = {  # no value is a default
    "hidden_size": 512,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 3e-4,
    "rope_theta": 5e4,
    "num_hidden_layers": 7,
    "no_rope_layer_interval": 3,
}
SIZES = {"vocab_size", "hidden_size", "num_hidden_layers"}
SIZES |= {"num_attention_heads", "max_position_embeddings"}


@pytest.mark.parametrize("family", TEXT)
@pytest.mark.parametrize("key", [None, *HfConfig.model_fields, "intermediate_size"])
def test_an_absent_key_has_the_value_that_transformers_gives_it(
    family: str, key: str | None
) -> None:
    full = config_json(family, **WIDE, tie_word_embeddings=family != "smollm3")
    full = {"sliding_window": None, "use_sliding_window": False, **full}
    file = {name: value for name, value in full.items() if name != key}
    if key in SIZES | FAMILIES[family].block.tiny().keys():
        with pytest.raises(UserError, match=f"{key} is missing"):
            ModelConfig.from_hf(file)
        return
    theirs = CONFIG_MAPPING[family].from_dict(file)
    windows = FAMILIES[family].window_in_use and theirs.sliding_window is not None
    if windows:
        with pytest.raises(UserError, match="sliding_window = 4096 is below"):
            ModelConfig.from_hf(file)
        return
    config = ModelConfig.from_hf(file)
    head_dim = getattr(theirs, "head_dim", None) or 512 // 32
    assert (config.head_dim, config.num_kv_heads) == (head_dim, theirs.num_key_value_heads)
    assert (config.rms_norm_eps, config.hidden_size) == (theirs.rms_norm_eps, theirs.hidden_size)
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]
    assert config.rope_scaling is None
    assert config.tie_word_embeddings is theirs.tie_word_embeddings
    rotated = getattr(theirs, "no_rope_layers", [1] * 7)
    assert config.layers_without_rope == tuple(i for i in range(7) if not rotated[i])


def test_the_flat_form_has_the_fields_of_checkpoints() -> None:
    found = ModelConfig.from_hf(config_json("smollm3", num_hidden_layers=4)).flat()
    assert found.pop("raw")["model_type"] == "smollm3"
    assert found == {
        "family": "smollm3",
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 384,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "qkv_bias": False,
        "qk_norm": False,
        "max_position_embeddings": 512,
        "eos_token_ids": (7, 9),
        "head": "lm",
        "layers_without_rope": (3,),
    }


@pytest.mark.parametrize("family", TEXT)
@pytest.mark.parametrize("kind", ["llama3", "yarn", "longrope"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_a_rotary_rule_is_the_one_that_transformers_makes_of_its_name(
    family: str, kind: str, key: str
) -> None:
    rope = {key: kind, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    file = {**config_json(family, **WIDE), "rope_scaling": rope, "sliding_window": None}
    try:
        theirs = CONFIG_MAPPING[family].from_dict(copy.deepcopy(file)).rope_parameters
    except Exception as error:  # of several kinds
        theirs = {"rope_type": str(error)}
    if theirs["rope_type"] != kind or kind not in TYPES:
        with pytest.raises(UserError, match=f"rope type '{kind}'; supported for this family"):
            ModelConfig.from_hf(file)
        return
    scaling = ModelConfig.from_hf(file).rope_scaling
    assert isinstance(scaling, {"llama3": RopeScaling, "yarn": YarnScaling}[kind])
    original = theirs["original_max_position_embeddings"]
    assert scaling.original_max_position_embeddings == original


def test_rope_of_transformers_4_and_5_read_the_same() -> None:
    old = config_json("llama", rope_theta=5e5, rope_scaling=LLAMA3)
    new = config_json("llama", rope_theta=None, rope_parameters={"rope_theta": 5e5, **LLAMA3})
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new)
    assert ModelConfig.from_hf(old).rope_theta == 5e5
    assert ModelConfig.from_hf(old).rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    "changes",
    [
        {"factor": 8.0, "beta_fast": 16, "beta_slow": 2},
        {"attention_factor": 1.25, "truncate": False},
        {"mscale": 1.0, "mscale_all_dim": 0.5},
        {"original_max_position_embeddings": 8},  # both bounds at the same pair
    ],
)
def test_yarn_is_that_of_transformers(changes: dict[str, object]) -> None:
    rope = {**YARN, **changes}
    theirs = Qwen3Config(
        head_dim=128, rope_theta=1e6, rope_scaling=rope, max_position_embeddings=131072
    )
    expected, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    config = ModelConfig.from_hf(config_json(head_dim=128, rope_scaling=rope))
    assert isinstance(config.rope_scaling, YarnScaling)
    assert config.rope_scaling.attention_factor == attention_factor
    # one rounding more than llama3: the blend's weight
    frequencies = frequencies_of(config.head_dim, config.rope_theta, config.rope_scaling)
    tolerance = _FLOAT32_TOLERANCE + 2.0**-24
    np.testing.assert_allclose(frequencies, expected.numpy(), rtol=tolerance)


def test_a_window_as_long_as_the_context_is_none() -> None:
    assert ModelConfig.from_hf(config_json("phi3", sliding_window=512)).family == "phi3"
    assert ModelConfig.from_hf(config_json("mistral", sliding_window=None)).family == "mistral"
    with pytest.raises(UserError, match="sliding_window = 511 is below"):
        ModelConfig.from_hf(config_json("mistral", sliding_window=511))
    assert ModelConfig.from_hf(config_json("qwen2", sliding_window=4)).family == "qwen2"


# transformers computes in float32: theta ** (2 i / d) is exp(x log theta) with log theta < 14, so
# an input error of half an ulp is amplified 14 times; a division, and six roundings of the scaling.
_FLOAT32_TOLERANCE = (14 + 1 + 6) * 2.0**-24


@pytest.mark.parametrize("head_dim, theta", [(64, 1e4), (128, 5e5)])
def test_llama3_frequencies_are_those_of_transformers(head_dim: int, theta: float) -> None:
    theirs = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=dict(LLAMA3),
        max_position_embeddings=131072,
    )
    expected, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](theirs)
    config = ModelConfig.from_hf(theirs.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    frequencies = frequencies_of(config.head_dim, config.rope_theta, config.rope_scaling)
    assert attention_factor == 1.0
    assert frequencies.dtype == np.float64
    np.testing.assert_allclose(frequencies, expected.numpy(), rtol=_FLOAT32_TOLERANCE)


REFUSED = [
    ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
     "GPT2LMHeadModel .model_type gpt2. is not supported; supported: qwen3"),
    ({"architectures": None, "model_type": "bert"}, "model_type bert. is not supported; supported"),
    ({"architectures": None, "model_type": None}, "no architecture .model_type None"),
    ({"model_type": "llama"}, "Qwen3ForCausalLM .model_type llama"),
    ({"hidden_size": "64"}, "hidden_size = '64': should be a valid integer"),
    ({"num_key_value_heads": 3}, "4 is not a multiple of num_key_value_heads = 3"),
    ({"model_type": "llama", "architectures": None, "num_attention_heads": 6, "head_dim": None},
     "hidden_size = 64 is not a multiple of"),
    ({"head_dim": 15}, "head_dim = 15 is odd"),
    ({"use_sliding_window": True}, "use_sliding_window = True: should be False"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types.1 = 'sliding"),
    ({"attention_bias": True}, "attention_bias = True"),
    ({"mlp_bias": True}, "mlp_bias = True"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu': should be 'silu'"),
    ({"rope_scaling": {"type": "yarn"}}, "yarn.: factor is missing"),
    ({"rope_scaling": YARN | {"beta_fast": 1.0}}, "beta_fast must be larger than beta_slow"),
    ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor must be larger"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differs by layer type"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
]  # fmt: skip


@pytest.mark.parametrize("changes, message", REFUSED)
def test_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ModelConfig.from_hf(config_json(**changes))


@pytest.mark.parametrize(
    "config, words",
    [
        ({"model_type": "qwen3_next", "num_experts": 512}, "experts, .*supported family is qwen3;"),
        ({"model_type": "qwen2_vl", "vision_config": {"depth": 2}}, "images or audio, .*qwen2;"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 256, "kv_lora_rank": 512}, "latent att"),
        ({"model_type": "gemma3", "text_config": {"sliding_window": 512}}, "a sliding window"),
        ({"model_type": "mamba", "state_size": 16}, "recurrent layers"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "an encoder"),
        ({"model_type": "gemma", "hidden_act": "gelu"}, "it has an activation other than SiLU, wh"),
        ({"model_type": "granite", "logits_scaling": 8.0}, "it has scaled embeddings or logits, "),
        (
            {"model_type": "olmo", "logits_scaling": 1.0, "hidden_act": "silu"}
            | {"sliding_window": 4096, "use_sliding_window": False, "partial_rotary_factor": 1.0},
            "is not supported; supported: ",
        ),
        ({"model_type": "olmo"}, "is not supported; .*to add a family: CONTRIBUTING"),
        ({"model_type": "olmo2"}, "has norms after attention .* MLP, norms over all heads"),
        ({"model_type": "glm4"}, "in a part of each head, .* interleaved pairs, norms after att"),
    ],
)
def test_an_unsupported_family_is_told_what_stands_in_the_way(config, words):
    with pytest.raises(UserError, match=words):
        ModelConfig.from_hf(config)
