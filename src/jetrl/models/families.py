"""The model families as data: the differences between Qwen3, Llama 3, Mistral, ...

All are the same pre-norm decoder. A layer has a mixer (mixer.py: grouped-query attention with
rotary positions) and a block (block.py). `FAMILIES` has the differences between families; the sizes
of a model are in its Hugging Face config.json. rope.py has rotary frequencies for long contexts.

A config.json with an unsupported feature (another architecture, a sliding window, an attention
bias, another activation) raises a UserError that names it. Keys for dropout, caching and
initialization are ignored. Missing keys have transformers' defaults.

Checkpoints store Q, K and V separately, and also gate and up. In jetrl they are one matrix, for one
GEMM: a parameter concatenates one or more stored tensors along dimension 0.

    layers.0.qkv.weight [(Hq + 2 Hkv) Dh, D]  =  model.layers.0.self_attn.{q,k,v}_proj.weight
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from pydantic import TypeAdapter
from transformers import CONFIG_MAPPING

from jetrl.errors import UserError
from jetrl.files import checked, printable, shown_value
from jetrl.models.block import Block, DenseShape, LayerHalf, Shapes
from jetrl.models.config_schema import HF_CONFIG, NAMED, HfConfig, Named
from jetrl.models.experts_shape import Glm4Experts, OlmoeExperts, Qwen2Experts, Qwen3Experts
from jetrl.models.mixer import AttentionShape, Mixer, WideNormAttention
from jetrl.models.rope import TYPES, Scaling, read_rope, rotary_channels
from jetrl.models.vision_shape import DeepShape, TiledShape, VisionShape, WindowShape, mrope_of
from jetrl.settings.section import MOST_LAYERS
from jetrl.types import Json


@dataclass(frozen=True)
class Family:
    """The features that all models of a family share.

    Attributes:
        architecture: The class in transformers, as in config.json's `architectures`.
        attention: The mixer of layers that are not in `mixers`.
        mixers: The mixers other than attention, by their names in `layer_types`.
        qkv_bias: Attention has a bias; None: if config.json's `attention_bias` says so.
        qk_norm: Attention has norms of query and key heads; None: if `use_qk_norm` says so.
        rotates_in_part: Heads may rotate in part (`partial_rotary_factor`).
        fused: Checkpoints store Q, K and V as one tensor, and gate and up as another.
        heads_fill_width: Heads make up `hidden_size`, and another `head_dim` is refused.
        language: The family of the language model of a model with images, in `text_config`.
        vision: The record of the image tower of a model with images.
        prefix: The module of the language model in checkpoints.
        loads_as: The same module in transformers, if its name is another one.
        window_in_use: `sliding_window` applies even without `use_sliding_window`.
        rope_types: The supported values of `rope_type`. In phi3, `yarn` is an old name of longrope,
            which is not supported. In Qwen2.5-VL, `mrope` is an old name of `default`.
    """

    architecture: str
    block: type[Block] = DenseShape
    attention: type[AttentionShape] = AttentionShape
    mixers: Mapping[str, type[Mixer]] = field(default_factory=dict)
    qkv_bias: bool | None = False
    qk_norm: bool | None = False
    rotates_in_part: bool = False
    fused: bool = False
    window_in_use: bool = False
    heads_fill_width: bool = False
    rope_types: tuple[str, ...] = TYPES
    vision: type[VisionShape] | None = None
    language: str | None = None
    prefix: str = "model"
    loads_as: str | None = None

    @property
    def language_module(self) -> str:
        """The module of the language model in transformers, and so in adapters of PEFT."""
        return self.loads_as or self.prefix

    @property
    def records(self) -> tuple[type[LayerHalf], ...]:
        """The block and mixers, whose fields are keys of config.json."""
        return (self.block, *self.mixers.values())


FAMILIES: dict[str, Family] = {
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", window_in_use=True),
    "smollm3": Family("SmolLM3ForCausalLM"),
    "phi3": Family("Phi3ForCausalLM", fused=True, window_in_use=True, rope_types=("default",)),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", Qwen3Experts, qk_norm=True),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", Qwen2Experts, qkv_bias=True),
    "olmoe": Family(
        "OlmoeForCausalLM", OlmoeExperts, WideNormAttention, qk_norm=True, heads_fill_width=True
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM", Glm4Experts, qkv_bias=None, qk_norm=None, rotates_in_part=True
    ),
    "idefics3": Family(
        "Idefics3ForConditionalGeneration",
        vision=TiledShape,
        language="llama",
        prefix="model.text_model",
    ),
    "smolvlm": Family(
        "SmolVLMForConditionalGeneration",
        vision=TiledShape,
        language="llama",
        prefix="model.text_model",
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VLForConditionalGeneration",
        qkv_bias=True,
        heads_fill_width=True,
        rope_types=("default", "mrope", "yarn"),
        vision=WindowShape,
        language="qwen2_5_vl_text",
        loads_as="model.language_model",
    ),
    "qwen3_vl": Family(
        "Qwen3VLForConditionalGeneration",
        qk_norm=True,
        rope_types=("default", "yarn"),
        vision=DeepShape,
        language="qwen3_vl_text",
        prefix="model.language_model",
    ),
}
Head = Literal["lm", "score"]
"""The output of the decoder: token logits (ForCausalLM), or one number per token
(ForSequenceClassification with one label)."""

_LM, _SCORE = "ForCausalLM", "ForSequenceClassification"  # suffixes of `architectures`
_ATTENTION = "full_attention"  # in `layer_types`
_SMALL_TABLE = 2**29  # bytes of rotary positions that are always allowed
_MOST_TOKENS = 2**31  # in a vocabulary
_DEFAULTED = {"rms_norm_eps", "rope_theta", "hidden_act"}
_FLAT = (  # order of `ModelConfig.flat`; "layers" stands for the keys of blocks and other mixers
    *("family", "vocab_size", "hidden_size", "layers", "num_layers", "num_heads", "num_kv_heads"),
    *(
        "head_dim",
        "rotary_dim",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "tie_word_embeddings",
    ),
    *("qkv_bias", "qk_norm", "max_position_embeddings", "eos_token_ids", "raw", "head"),
    *("layers_without_rope", "vision"),
)


@dataclass(frozen=True)
class LayerShape:
    """A layer of the decoder; `rotates`: its attention has rotary positions."""

    mixer: Mixer
    block: Block
    rotates: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and features of a decoder.

    All layers with attention have the same number and size of heads, since they share KV pages.

    Attributes:
        family: A key of `FAMILIES`.
        rotary_dim: The leading channels of a head that rotate; mostly all.
        eos_token_ids: The ids in config.json; `hf.eos_token_ids` adds those of other files.
        raw: All of config.json, `quantization_config` and unknown keys included.
        vision: The image tower; None for a model that reads text only.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerShape, ...]
    rotary_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Scaling | None
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    raw: Json = field(repr=False, compare=False)
    head: Head = "lm"
    vision: VisionShape | None = None

    @property
    def architecture(self) -> str:
        """The class in transformers, as in config.json's `architectures`."""
        causal = FAMILIES[self.family].architecture
        return causal if self.head == "lm" else causal.removesuffix(_LM) + _SCORE

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> AttentionShape:
        """The attention of the first layer that has it, whose sizes all layers share."""
        return next(x.mixer for x in self.layers if isinstance(x.mixer, AttentionShape))

    @property
    def layers_with_keys(self) -> tuple[int, ...]:
        """The indices of layers with attention, which have keys and values in the KV cache."""
        mixers = enumerate(layer.mixer for layer in self.layers)
        return tuple(i for i, mixer in mixers if isinstance(mixer, AttentionShape))

    @property
    def layers_of_all_kinds(self) -> int:
        """The minimum number of leading layers with every kind of mixer and block."""
        kinds = [(type(layer.mixer), type(layer.block)) for layer in self.layers]
        return 1 + max(map(kinds.index, kinds))

    @property
    def num_heads(self) -> int:
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def place_tokens(self) -> frozenset[int]:
        """The tokens of images and videos, which only prompts with images have."""
        if self.vision is None:
            return frozenset()
        return self.vision.video_tokens | {self.vision.image_token_id}

    @property
    def layers_without_rope(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.layers) if not layer.rotates)

    def flat(self) -> Json:
        """Return the fields as stored in checkpoints, including those of blocks and mixers."""
        names = ("num_layers", "layers_without_rope")
        values = dataclasses.asdict(self) | {name: getattr(self, name) for name in names}
        del values["layers"], values["vision"]
        if self.vision is not None:  # absent in checkpoints of models of text
            values["vision"] = self.vision.model_dump()
        if self.rotary_dim == self.head_dim:  # absent in checkpoints of earlier versions
            del values["rotary_dim"]
        for layer in self.layers:
            values |= layer.block.model_dump() | layer.mixer.model_dump()
        place = {name: index for index, name in enumerate(_FLAT)}
        return {n: values[n] for n in sorted(values, key=lambda n: place.get(n, place["layers"]))}

    def first_layers(self, count: int) -> ModelConfig:
        """Return the configuration with only the first `count` layers."""
        return dataclasses.replace(self, layers=self.layers[:count])

    def with_scalar_head(self) -> ModelConfig:
        """Return the configuration with a scalar head."""
        return dataclasses.replace(self, head="score", tie_word_embeddings=False)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Return the configuration in a config.json of transformers 4 or 5.

        Raises UserError for a missing or wrong key, and for an unsupported feature.
        """
        family, head = _family(checked(NAMED, config, "config.json"), config)
        shared, vision, where = FAMILIES[family], None, "config.json"
        contents = dict(config)
        if shared.vision is not None:
            contents = _language_config(config, family)
            given = {**config, **mrope_of(contents)}
            vision = checked(TypeAdapter(shared.vision), given, where)
            where = f"{where}: text_config" if "text_config" in config else where
        values = {**defaults(family), **contents}
        hf = checked(HF_CONFIG, values, where)
        if vision is not None and vision.image_token_id >= hf.vocab_size:
            raise UserError(
                f"config.json: image_token_id = {vision.image_token_id} is no token of a "
                f"vocabulary of {hf.vocab_size}"
            )
        window = hf.sliding_window
        if shared.window_in_use and window is not None and window < hf.max_position_embeddings:
            raise UserError(
                f"config.json: sliding_window = {window} is below max_position_embeddings = "
                f"{hf.max_position_embeddings}; set it to null (absent, it is transformers' "
                "default) if full attention is meant"
            )
        layers = _layers(hf, values, family)
        head_dim = next(x.mixer for x in layers if isinstance(x.mixer, AttentionShape)).head_dim
        rope_theta, rope_scaling = read_rope(hf, shared.rope_types)
        model = cls(
            family=family,
            vocab_size=hf.vocab_size,
            hidden_size=hf.hidden_size,
            layers=layers,
            rotary_dim=rotary_channels(hf, head_dim, shared.rotates_in_part),
            rms_norm_eps=hf.rms_norm_eps,
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=head == "lm" and bool(hf.tie_word_embeddings),
            max_position_embeddings=hf.max_position_embeddings,
            eos_token_ids=token_ids(contents.get("eos_token_id"), "config.json: eos_token_id"),
            raw=dict(config),
            head=head,
            vision=vision,
        )
        _check_positions(model)
        misfit = None
        if vision is not None:
            misfit = vision.misfit(model.hidden_size, model.head_dim, model.num_layers)
        if misfit is not None:
            raise UserError(f"config.json: {misfit}")
        return model


@functools.cache
def defaults(family: str) -> Json:
    """Return transformers' defaults for the keys that a family's config.json may omit.

    A missing key differs from null: a Mistral without `sliding_window` has a window of 4,096
    tokens.
    """
    kind = CONFIG_MAPPING[FAMILIES[family].language or family]
    known: Json = {}
    for base in reversed(kind.__mro__):
        parameters = inspect.signature(base.__init__).parameters.items()  # type: ignore[misc]
        known |= {name: p.default for name, p in parameters if p.default is not p.empty}
    rope = kind().rope_parameters
    known |= {key: rope.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    fields = dict(HfConfig.model_fields)
    for record in FAMILIES[family].records:
        fields |= record.model_fields
    # Sizes are required, although transformers has defaults: a file without them is damaged.
    sizes = {key for key, field in fields.items() if field.is_required()} - _DEFAULTED
    return {key: known[key] for key in known.keys() & fields.keys() - sizes}


def parameter_shapes(config: ModelConfig) -> Shapes:
    """Return the shapes of all parameters in forward order; linear weights are [out, in]."""
    hidden = config.hidden_size
    shapes: Shapes = {"embed.weight": (config.vocab_size, hidden)}
    for number, layer in enumerate(config.layers):
        for half in (layer.mixer, layer.block):
            own = half.parameter_shapes(hidden).items()
            shapes |= {f"layers.{number}.{name}": shape for name, shape in own}
    shapes["norm.weight"] = (hidden,)
    if config.head == "score":
        shapes["score.weight"] = (1, hidden)
    elif not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def num_parameters(config: ModelConfig) -> int:
    """Return the number of parameters in elements; tied embeddings count once, buffers do not."""
    buffers = buffer_names(config)
    shapes = parameter_shapes(config).items()
    return sum(math.prod(shape) for name, shape in shapes if name not in buffers)


def token_ids(value: Any, where: str) -> tuple[int, ...]:
    """Return the token ids of a field that is absent, one id or a list.

    Raises UserError, with `where` in front, for another value.
    """
    values = [] if value is None else value if isinstance(value, list | tuple) else [value]
    for item in values:
        if type(item) is not int or not 0 <= item < _MOST_TOKENS:
            raise UserError(
                f"{where} = {shown_value(value)}: give a token id or a list of token ids"
            )
    return tuple(values)


def _family(named: Named, config: Mapping[str, Any]) -> tuple[str, Head]:
    """Return the family and head, from `architectures` or `model_type` in config.json."""
    model_type, architecture = named.model_type, (named.architectures or [""])[0]
    scores = architecture.endswith(_SCORE)
    causal = architecture.removesuffix(_SCORE) + _LM if scores else architecture
    fitting = (
        name
        for name, entry in FAMILIES.items()
        if model_type in (None, name) and causal in ("", entry.architecture)
    )
    family = next(fitting, None) if architecture or model_type else None
    if family is None:
        supported = ", ".join(f"{name} ({entry.architecture})" for name, entry in FAMILIES.items())
        near = [name for name in FAMILIES if str(model_type).startswith(name)]
        near = ["mistral"] if model_type == "mixtral" else near
        raise UserError(
            f"config.json: {printable(architecture) or 'no architecture'} (model_type "
            f"{printable(str(model_type))}) is not supported{_in_the_way(config)}; "
            + (f"the nearest supported family is {near[0]}; " if near else "")
            + f"supported: {supported}; to add a family: CONTRIBUTING.md, under 'How to add'"
        )
    if scores:
        labels = config.get("id2label")
        count = len(labels) if isinstance(labels, Mapping) else config.get("num_labels", 2)
        if count != 1:
            raise UserError(
                f"config.json: {count} labels; a reward model or critic has one (num_labels = 1)"
            )
    return family, "score" if scores else "lm"


def _language_config(config: Mapping[str, Any], family: str) -> Json:
    """Return the configuration of the language model of a model with images.

    As in transformers, whether the head is tied is a key of the whole model. Qwen2.5-VL also reads
    the language model's key, and has its other keys in `text_config` or next to `vision_config`.
    """
    language, vision = FAMILIES[family].language, FAMILIES[family].vision
    assert vision is not None, "a family with images"
    text: Any = config.get("text_config")
    if vision.flat and text is None:
        text = {**config, "model_type": language}
    kind = text.get("model_type", language) if isinstance(text, Mapping) else None
    if not isinstance(text, Mapping) or kind != language:
        raise UserError(
            f"config.json: text_config has model_type {shown_value(kind)}; should be {language!r}"
        )
    tied = vision.flat and text.get("tie_word_embeddings", False)
    whole = {"tie_word_embeddings": tied}
    own = {key: config[key] for key in ("tie_word_embeddings", "eos_token_id") if config.get(key)}
    return {**text, **whole, **own}


_OBSTACLES = {  # keys of config.json, and model types
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
    "images or audio": ("vision_config", "audio_config"),
    "recurrent layers": ("linear_num_key_heads", "mamba_d_state", "ssm_cfg", "state_size"),
    "a sliding window": ("sliding_window",),
    "an encoder": ("is_encoder_decoder",),
    "latent attention": ("kv_lora_rank",),
    "an activation other than SiLU": ("hidden_act", "hidden_activation"),
    "scaled embeddings or logits": ("embedding_multiplier", "logits_scaling", "logit_scale"),
    "capped logits": ("final_logit_softcapping",),
    "rotary positions in a part of each head": ("partial_rotary_factor", "glm", "glm4"),
    "rotary positions in interleaved pairs": ("glm", "glm4"),
    "norms after attention and after the MLP": (
        *("glm4", "olmo2", "olmo3", "exaone4"),
        *("gemma2", "gemma3", "gemma3_text"),
    ),
    "norms over all heads of queries or keys together": ("olmo2", "olmo3"),
}


def _in_the_way(config: Mapping[str, Any]) -> str:
    """Return words for the unsupported features of a config.json, for an error message."""
    inner = config.get("text_config")
    parts = [config, inner] if isinstance(inner, Mapping) else [config]
    found = [
        what
        for what, keys in _OBSTACLES.items()
        if any(_asks(part, key) or part.get("model_type") == key for part in parts for key in keys)
    ]
    return f", and it has {', '.join(found)}, which this decoder does not compute" if found else ""


def _asks(part: Mapping[str, Any], key: str) -> bool:
    """Return whether a key requires an unsupported feature; a scale of 1.0 does not."""
    value = part.get(key)
    if key == "sliding_window" and part.get("use_sliding_window") is False:
        return False
    as_here = value == "silu" or (type(value) in (int, float) and value == 1)
    return bool(value) and not as_here


def _layers(hf: HfConfig, values: Json, family: str) -> tuple[LayerShape, ...]:
    """Return the layers; `values` is config.json with the family's defaults filled in."""
    shared, count = FAMILIES[family], hf.num_hidden_layers
    block = checked(TypeAdapter(shared.block), values, "config.json")
    attention = _attention(hf, shared)
    mixers: dict[str, Mixer] = {_ATTENTION: attention}
    for kind, record in shared.mixers.items():
        is_attention = issubclass(record, AttentionShape)  # its sizes have other names in the file
        given = {**values, **attention.model_dump()} if is_attention else values
        mixers[kind] = checked(TypeAdapter(record), given, "config.json")
    kinds, without_rope = hf.layer_types or [], _layers_without_rope(hf, family)
    for number, kind in enumerate(kinds):
        if kind not in mixers:
            raise UserError(
                f"config.json: layer_types.{number} = {shown_value(kind)}: should be "
                f"{' or '.join(map(repr, mixers))}"
            )
    every = [*kinds, *[_ATTENTION] * count][:count]
    return tuple(
        LayerShape(mixers[kind], block.of_layer(number), number not in without_rope)
        for number, kind in enumerate(every)
    )


def _attention(hf: HfConfig, shared: Family) -> AttentionShape:
    """Return the sizes of attention; head_dim is hidden_size / num_attention_heads by default."""
    hidden_size, num_heads = hf.hidden_size, hf.num_attention_heads
    num_kv_heads = hf.num_key_value_heads or num_heads
    if num_heads % num_kv_heads:
        raise UserError(
            f"config.json: num_attention_heads = {num_heads} is not a multiple of "
            f"num_key_value_heads = {num_kv_heads}"
        )
    if hf.head_dim is None and hidden_size % num_heads:
        raise UserError(
            f"config.json: hidden_size = {hidden_size} is not a multiple of "
            f"num_attention_heads = {num_heads}, and head_dim is not given"
        )
    head_dim = hf.head_dim or hidden_size // num_heads
    if head_dim % 2:
        raise UserError(f"config.json: head_dim = {head_dim} is odd; rotary positions need pairs")
    if shared.heads_fill_width and num_heads * head_dim != hidden_size:
        raise UserError(
            f"config.json: num_attention_heads = {num_heads} heads of {head_dim} are not "
            f"hidden_size = {hidden_size}, which {shared.architecture} divides among its heads"
        )
    if hf.attention_bias and shared.qkv_bias is not None:
        raise UserError("config.json: attention_bias = True: should be False or None")
    return shared.attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        qkv_bias=bool(hf.attention_bias if shared.qkv_bias is None else shared.qkv_bias),
        qk_norm=bool(hf.use_qk_norm if shared.qk_norm is None else shared.qk_norm),
    )


def _layers_without_rope(config: HfConfig, family: str) -> tuple[int, ...]:
    """Return the indices of layers without rotary positions (SmolLM3: 0 in `no_rope_layers`)."""
    if family != "smollm3":
        return ()
    rotated, num_layers = config.no_rope_layers, config.num_hidden_layers
    if rotated is None:
        every = config.no_rope_layer_interval
        return tuple(range(every - 1, num_layers, every))
    if len(rotated) < num_layers:
        raise UserError(f"config.json: no_rope_layers has fewer than {num_layers} numbers")
    return tuple(index for index in range(num_layers) if not rotated[index])


def _check_positions(model: ModelConfig) -> None:
    """Raise a UserError if the table of rotary positions is larger than the weights."""
    size = 4 * model.max_position_embeddings * model.rotary_dim
    if size > max(_SMALL_TABLE, 4 * num_parameters(model)):
        raise UserError(
            f"config.json: max_position_embeddings = {model.max_position_embeddings}: the table of "
            f"rotary positions would take {size / 2**30:.1f} GiB; lower it to the longest sequence"
        )


FP8_BLOCK = (128, 128)  # elements of a weight that share a scale, in checkpoints and in the policy
FURTHER_LAYERS = "num_nextn_predict_layers"  # of config.json
SCALE_SUFFIX = "_scale_inv"  # for the scales of an FP8 weight: value = code * scale

_WHOLE = {  # {} is the module of the language model
    "embed.weight": "{}.embed_tokens.weight",
    "norm.weight": "{}.norm.weight",
    "lm_head.weight": "lm_head.weight",
    "score.weight": "score.weight",
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, which is a parameter or a part of one.

    Attributes:
        layer: The index of the decoder layer; None outside of layers.
        linear_weight: Whether the tensor is the weight of a linear layer in a decoder layer.
        buffer: Whether it is never trained, and in float32 in every file.
        first_row: The first row of the tensor in the parameter.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None
    linear_weight: bool
    first_row: int = 0
    buffer: bool = False

    @property
    def module(self) -> str:
        """The module's name in the checkpoint, such as model.layers.0.self_attn.q_proj."""
        return self.name.rpartition(".")[0]


@functools.lru_cache(maxsize=32)
def stored_tensors(
    config: ModelConfig, loaded: bool = False
) -> Mapping[str, tuple[StoredTensor, ...]]:
    """Return the tensors of a checkpoint that each parameter concatenates, in order.

    `loaded`: by their names in transformers, which adapters of PEFT have, instead of in files.
    """
    family, shapes = FAMILIES[config.family], parameter_shapes(config)
    prefix = family.language_module if loaded else family.prefix
    return {name: _parts(config, name, shape, prefix) for name, shape in shapes.items()}


def fused_tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    """Return the tensors of files that fuse experts, [E, N, K], by the parameter [E * N, K]."""
    shapes, found = parameter_shapes(config), {}
    for number, layer in enumerate(config.layers):
        for module, (name, count) in layer.block.fused_names.items():
            rows, columns = shapes[parameter := f"layers.{number}.{module}.weight"]
            shape = (count, rows // count, columns)
            stored = f"model.layers.{number}.{name}"
            found[parameter] = StoredTensor(stored, shape, number, module in layer.block.linears)
    return found


def further_layers(config: ModelConfig) -> tuple[str, ...]:
    """Return the prefixes of layers that predict later tokens, which follow those of the decoder.

    Files of some families have them. As in transformers, they are not read.
    """
    count, past = config.raw.get(FURTHER_LAYERS), len(config.layers)
    count = min(count, MOST_LAYERS) if isinstance(count, int) else 0
    return tuple(f"model.layers.{number}." for number in range(past, past + count))


def buffer_names(config: ModelConfig) -> frozenset[str]:
    """Return the parameters that are never trained, by jetrl's name."""
    tensors = stored_tensors(config).items()
    return frozenset(name for name, parts in tensors if parts[0].buffer)


def linear_layers(config: ModelConfig, loaded: bool = False) -> dict[str, tuple[StoredTensor, ...]]:
    """Return the stored weights of each linear layer of decoder layers, by jetrl's name.

    `loaded` is that of `stored_tensors`.
    """
    tensors = stored_tensors(config, loaded).items()
    return {name.removesuffix(".weight"): p for name, p in tensors if p[0].linear_weight}


def _parts(
    config: ModelConfig, name: str, shape: tuple[int, ...], prefix: str
) -> tuple[StoredTensor, ...]:
    if name in _WHOLE:
        return (StoredTensor(_WHOLE[name].format(prefix), shape, None, False),)
    _, number, module, kind = name.split(".")
    layer, fused = config.layers[int(number)], FAMILIES[config.family].fused
    half = next(x for x in (layer.mixer, layer.block) if module in x.stored_names(fused))
    names = half.stored_names(fused)[module]
    rows = half.stored_rows.get(module) if len(names) > 1 else None
    rows = rows or (shape[0] // len(names),) * len(names)
    linear = kind == "weight" and module in half.linears
    buffer = f"{module}.{kind}" in half.buffers
    starts = accumulate(rows, initial=0)
    return tuple(
        StoredTensor(
            name=f"{prefix}.layers.{number}.{part}.{kind}",
            shape=(count, *shape[1:]),
            layer=int(number),
            linear_weight=linear,
            first_row=first,
            buffer=buffer,
        )
        for part, count, first in zip(names, rows, starts, strict=False)
    )
