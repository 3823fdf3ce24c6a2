"""The model families as data: what one decoder needs to know to be Qwen3, Qwen2/2.5 or Llama 3.

All three are the same pre-norm decoder with grouped-query attention, rotary positions and SwiGLU.
What differs is three switches, read from a Hugging Face config.json:

    family   QKV bias   norm on Q and K heads   rotary scaling
    qwen3    no         yes                     none or llama3
    qwen2    yes        no                      none or llama3
    llama    no         no                      none or llama3

A config.json that asks for something this decoder does not compute (another architecture, a
sliding window, YaRN, an attention bias, another activation) is refused here, at start, by name: a
model that loads is a model whose numbers are right. Keys that only matter to dropout, caching or
initialisation are ignored. No torch in this file.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from jetrl.errors import UserError

# By family: the entry in architectures, has a QKV bias, has norms on Q and K heads.
FAMILIES: dict[str, tuple[str, bool, bool]] = {
    "qwen3": ("Qwen3ForCausalLM", False, True),
    "qwen2": ("Qwen2ForCausalLM", True, False),
    "llama": ("LlamaForCausalLM", False, False),
}
Head = Literal["lm", "score"]
"""What the decoder ends in: logits of tokens (ForCausalLM), or one number
(ForSequenceClassification with one label)."""

_LM, _SCORE = "ForCausalLM", "ForSequenceClassification"  # endings of an architecture's name
_DEFAULT_THETA = 10000.0  # of every family here when config.json names none, as in transformers
_QWEN3_HEAD_DIM = 128  # of Qwen3 when config.json names none, as in transformers


@dataclass(frozen=True)
class RopeScaling:
    """The llama3 rule (Llama 3.1), which stretches rotary positions to a longer context.

    Slow frequencies are divided by `factor`, fast ones are kept, and those between the two
    wavelength bounds are interpolated.

    Attributes:
        factor: What slow frequencies are divided by.
        low_freq_factor: Frequencies of fewer turns in the original context are slow.
        high_freq_factor: Frequencies of more turns in the original context are fast.
        original_max_position_embeddings: The original context, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and switches of a decoder.

        ModelConfig.from_hf({"model_type": "qwen3", "hidden_size": 4096, ...}).num_kv_heads  # 8

    Attributes:
        family: A key of `FAMILIES`.
        vocab_size: Rows of the embedding.
        hidden_size: Elements of the residual stream.
        intermediate_size: Elements between the two products of the feed-forward block.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key-value heads.
        head_dim: Elements of a head.
        rms_norm_eps: The epsilon of every norm.
        rope_theta: The base of the rotary frequencies.
        rope_scaling: The llama3 rule, or None.
        tie_word_embeddings: Whether lm_head is the embedding.
        qkv_bias: Whether the linear layer of Q, K and V has a bias.
        qk_norm: Whether query and key heads are normalised.
        max_position_embeddings: The context, in tokens.
        eos_token_ids: The ids of config.json that end a text; generation_config.json may add to
            them (`jetrl.models.hf.eos_token_ids`).
        raw: The config.json that the config was read from.
        head: What the decoder ends in.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    raw: Mapping[str, Any] = field(repr=False, compare=False)
    head: Head = "lm"

    @property
    def architecture(self) -> str:
        """The entry of config.json's `architectures`."""
        causal = FAMILIES[self.family][0]
        return causal if self.head == "lm" else causal.removesuffix(_LM) + _SCORE

    def with_scalar_head(self) -> ModelConfig:
        """Return the config of the same decoder with one number for a head."""
        return dataclasses.replace(self, head="score", tie_word_embeddings=False)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config.json, in the layout of transformers 4 or 5.

        Raises:
            UserError: An architecture or option this decoder does not compute, a missing key, a
                value of the wrong type, head counts that do not divide; the message names the key.
        """
        family, head = _family(config)
        _refuse_unsupported(config, family)
        _, qkv_bias, qk_norm = FAMILIES[family]
        hidden_size = _integer(config, "hidden_size")
        num_heads = _integer(config, "num_attention_heads")
        num_kv_heads = _integer(config, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise UserError(
                f"config.json: num_attention_heads = {num_heads} is not a multiple of "
                f"num_key_value_heads = {num_kv_heads}"
            )
        max_position_embeddings = _integer(config, "max_position_embeddings")
        rope_theta, rope_scaling = _rope(config, max_position_embeddings)
        return cls(
            family=family,
            vocab_size=_integer(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_integer(config, "intermediate_size"),
            num_layers=_integer(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_head_dim(config, family, hidden_size, num_heads),
            rms_norm_eps=_positive(config, "rms_norm_eps"),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=head == "lm" and _flag(config, "tie_word_embeddings"),
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            max_position_embeddings=max_position_embeddings,
            eos_token_ids=token_ids(config.get("eos_token_id"), "config.json: eos_token_id"),
            raw=dict(config),
            head=head,
        )


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Return the rotary inverse frequencies, radians a position: float64 [head_dim / 2].

    Pair i of a head turns by `position * f[i]`, f[i] = theta ** (-2 i / head_dim), with the llama3
    scaling where the config has it (the rule of transformers' ROPE_INIT_FUNCTIONS["llama3"]).
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    context = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    slow = wavelengths > context / scaling.low_freq_factor
    fast = wavelengths < context / scaling.high_freq_factor
    keep = (context / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - keep) * frequencies / scaling.factor + keep * frequencies
    return np.where(slow, frequencies / scaling.factor, np.where(fast, frequencies, between))


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return every parameter's internal name and shape, in the order of the forward pass.

    Linear weights are [out, in]; `qkv` stacks the Q, the K and the V heads, `gate_up` the gate and
    the up projection.
    """
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads = config.num_heads + 2 * config.num_kv_heads
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}"
        shapes[f"{prefix}.input_norm.weight"] = (hidden,)
        shapes[f"{prefix}.qkv.weight"] = (heads * head_dim, hidden)
        if config.qkv_bias:
            shapes[f"{prefix}.qkv.bias"] = (heads * head_dim,)
        if config.qk_norm:
            shapes[f"{prefix}.q_norm.weight"] = (head_dim,)
            shapes[f"{prefix}.k_norm.weight"] = (head_dim,)
        shapes[f"{prefix}.o.weight"] = (hidden, config.num_heads * head_dim)
        shapes[f"{prefix}.post_norm.weight"] = (hidden,)
        shapes[f"{prefix}.gate_up.weight"] = (2 * inner, hidden)
        shapes[f"{prefix}.down.weight"] = (hidden, inner)
    shapes["norm.weight"] = (hidden,)
    if config.head == "score":
        shapes["score.weight"] = (1, hidden)
    elif not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def num_parameters(config: ModelConfig) -> int:
    """Return the number of elements of the model's parameters; a tied lm_head counts once."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def token_ids(value: Any, where: str) -> tuple[int, ...]:
    """Return a token id field of a Hugging Face JSON file (absent, one id, or a list) as a tuple.

    Raises:
        UserError: Anything else; `where` names the file and key.
    """
    values = [] if value is None else value if isinstance(value, list | tuple) else [value]
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise UserError(f"{where} = {value!r}: give a token id or a list of token ids")
    return tuple(values)


def _family(config: Mapping[str, Any]) -> tuple[str, Head]:
    """Return the family and the head that config.json names, by architecture or model_type."""
    supported = ", ".join(f"{name} ({entry[0]})" for name, entry in FAMILIES.items())
    model_type = config.get("model_type")
    architectures = config.get("architectures") or []
    if model_type is None and not architectures:
        raise UserError(f"config.json: no model_type and no architectures; supported: {supported}")
    by_architecture = {entry[0]: name for name, entry in FAMILIES.items()}
    if architectures:
        architecture = str(architectures[0])
        scores = architecture.endswith(_SCORE)
        causal = architecture.removesuffix(_SCORE) + _LM if scores else architecture
        family = by_architecture.get(causal)
        if family is None or model_type not in (None, family):
            raise UserError(
                f"config.json: architecture {architecture} (model_type {model_type}) is not "
                f"supported; supported: {supported}"
            )
        if scores:
            _check_one_label(config)
        return family, "score" if scores else "lm"
    if model_type not in FAMILIES:
        raise UserError(
            f"config.json: model_type {model_type!r} is not supported; supported: {supported}"
        )
    return str(model_type), "lm"


def _check_one_label(config: Mapping[str, Any]) -> None:
    """Raise where a model with a scalar head has another number of labels than one."""
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, Mapping) else config.get("num_labels", 2)
    if count != 1:
        raise UserError(
            f"config.json: {count} labels; a reward model or critic has one (num_labels = 1, or an "
            "id2label of one entry)"
        )


def _refuse_unsupported(config: Mapping[str, Any], family: str) -> None:
    """Raise for an option of config.json that this decoder does not compute."""
    if _flag(config, "use_sliding_window"):
        raise UserError(
            "config.json: use_sliding_window is true, and sliding-window attention is not "
            "supported; set it to false if full attention is meant"
        )
    layer_types = set(config.get("layer_types") or ()) - {"full_attention"}
    if layer_types:
        raise UserError(
            f"config.json: layer_types has {', '.join(sorted(map(str, layer_types)))}; only "
            "full_attention is supported"
        )
    for key in ("attention_bias", "mlp_bias"):
        if _flag(config, key):
            raise UserError(f"config.json: {key} is true, which is not supported for {family}")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UserError(f"config.json: hidden_act = {activation!r}; only 'silu' is supported")


def _rope(config: Mapping[str, Any], max_positions: int) -> tuple[float, RopeScaling | None]:
    """Return theta and scaling, from `rope_parameters` (transformers 5) or transformers 4's keys.

    Where both are there, the choice is that of transformers.
    """
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(key) or {}
    if not isinstance(rope, Mapping):
        raise UserError(f"config.json: {key} = {rope!r}: an object is expected")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UserError(f"config.json: {key} differs by layer type, which is not supported")
    rope = {"rope_theta": config.get("rope_theta", _DEFAULT_THETA)} | dict(rope)
    theta = _positive(rope, "rope_theta", where=f"config.json ({key})")
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1, 1.0):
        raise UserError(f"config.json: partial_rotary_factor = {share!r}; only 1.0 is supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(
            f"config.json: {key} has rope type {kind!r}; supported: 'default', 'llama3'"
        )
    where = f"config.json ({key}, llama3)"
    scaling = RopeScaling(
        factor=_positive(rope, "factor", where),
        low_freq_factor=_positive(rope, "low_freq_factor", where),
        high_freq_factor=_positive(rope, "high_freq_factor", where),
        original_max_position_embeddings=_integer(
            {**rope, **config}, "original_max_position_embeddings", max_positions
        ),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise UserError(f"{where}: high_freq_factor must be larger than low_freq_factor")
    return theta, scaling


def _head_dim(config: Mapping[str, Any], family: str, hidden_size: int, num_heads: int) -> int:
    """Return the head size, which has a default of its own in each family."""
    if config.get("head_dim") is None and family == "qwen3":
        head_dim = _QWEN3_HEAD_DIM
    elif config.get("head_dim") is None:
        if hidden_size % num_heads:
            raise UserError(
                f"config.json: hidden_size = {hidden_size} is not a multiple of "
                f"num_attention_heads = {num_heads}, and head_dim is not given"
            )
        head_dim = hidden_size // num_heads
    else:
        head_dim = _integer(config, "head_dim")
    if head_dim % 2:
        raise UserError(f"config.json: head_dim = {head_dim} is odd; rotary positions need pairs")
    return head_dim


def _integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a whole number of at least 1."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise UserError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"config.json: {key} = {value!r}: a whole number of at least 1 is expected")
    return value


def _positive(config: Mapping[str, Any], key: str, where: str = "config.json") -> float:
    """Return a number above 0."""
    value = config.get(key)
    if value is None:
        raise UserError(f"{where}: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise UserError(f"{where}: {key} = {value!r}: a number above 0 is expected")
    return float(value)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    """Return true or false; false where the key is absent."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"config.json: {key} = {value!r}: true or false is expected")
    return bool(value)
