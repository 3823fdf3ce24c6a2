"""Random weights, and tiny complete model directories for demos and tests.

The initialization is fixed, since runs depend on its bits. Matrices and biases are normal with mean
0 and standard deviation `initializer_range` (0.02 if config.json has none). For projections into
the residual stream (`o`, and the block's last) the standard deviation is divided by
sqrt(2 * num_layers), so that the stream does not grow with depth. Norm weights are 1. One seeded
generator fills all parameters in the order of `families.parameter_shapes`.

On a CPU the generator gives uniform float32 values u, and each block of 16 of them, the last one
padded with draws that are dropped, becomes normal values by Box and Muller's rule in float64:

    radius    = sqrt(-2 * log(1 - u[i]))                        i = 0 to 7
    c, s      = cos_and_sin(2 pi * u[i + 8])
    x[i]      = float32(radius * c * std),  x[i + 8] = float32(radius * s * std)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Tokenizer

from jetrl.errors import UserError
from jetrl.files import shown_value
from jetrl.models.coded_weights import CodedWeights
from jetrl.models.families import FAMILIES, ModelConfig, parameter_shapes
from jetrl.models.hf_save import Encoding, SaveDtype, save_model
from jetrl.models.vision import READERS, tower_shapes
from jetrl.models.vision_patches import VIDEO
from jetrl.precision.angles import cos_and_sin
from jetrl.precision.exact import log_positive, square_root
from jetrl.types import Json

_DEFAULT_STD = 0.02
PRINTABLE = "\n" + "".join(map(chr, range(32, 127)))  # printable ASCII and the newline


class RandomWeights(CodedWeights):
    """Random parameters of a model by jetrl's names, float32, each drawn on access.

    Values do not depend on the order of access: the state of the generator before each parameter is
    saved. A seed gives the same weights on every CPU, but others on a GPU, where 8B parameters take
    a second instead of minutes. On "meta", parameters have no values. Raises UserError unless the
    seed has 64 bits.
    """

    def __init__(self, config: ModelConfig, seed: int, device: str | torch.device = "cpu") -> None:
        if not -(2**63) <= seed < 2**64:
            raise UserError(f"seed {shown_value(seed)}: a seed has 64 bits")
        self._std = float(config.raw.get("initializer_range") or _DEFAULT_STD)
        self._num_layers = len(config.layers)
        halves = [half for x in config.layers for half in (x.mixer, x.block)]
        self._residual = tuple({f".{half.linears[-1]}.weight" for half in halves})
        self.names = self._shapes = parameter_shapes(config)
        self._device = device
        outline = torch.device(device).type == "meta"
        self._generator = torch.Generator("cpu" if outline else device).manual_seed(seed)
        self._unmade = list(reversed(self._shapes))
        self._states: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        values: Tensor | None = None
        # Earlier parameters are drawn and dropped, to get the generator's state.
        while name not in self._states:
            following = self._unmade.pop()
            self._states[following] = self._generator.get_state()
            values = self._make(following)
        if values is None:
            later = self._generator.get_state()
            self._generator.set_state(self._states[name])
            values = self._make(name)
            self._generator.set_state(later)
        return values

    def _make(self, name: str) -> Tensor:
        """Return a parameter drawn from the current state of the generator."""
        values = torch.empty(self._shapes[name], device=self._device)
        if values.is_meta or name.endswith("norm.weight"):
            return values.fill_(1.0)
        std = self._std
        if name.endswith(self._residual):  # these write into the residual stream
            std /= math.sqrt(2 * self._num_layers)
        # Biases too, so that tests cover them.
        if not values.is_cpu:
            return values.normal_(0.0, std, generator=self._generator)
        return _normal(values.numel(), std, self._generator).view(values.shape)


def random_tower(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Return the random tensors of an image tower, float32 on the CPU, by their names in files."""
    assert config.vision is not None, "a model with images"
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in tower_shapes(config.vision, config.hidden_size).items():
        is_norm = "norm" in name and name.endswith("weight")
        drawn = _normal(math.prod(shape), _DEFAULT_STD, generator).view(shape)
        tensors[name] = torch.ones(shape) if is_norm else drawn
    return tensors


def _normal(count: int, std: float, generator: torch.Generator) -> Tensor:
    """Return normal values, float32 [count], with the same bits on every CPU."""
    uniform = torch.empty(-(-count // 16) * 16).uniform_(generator=generator).double()
    first, second = uniform.view(-1, 2, 8).unbind(1)
    radius = square_root(-2.0 * log_positive(1.0 - first))
    cos, sin = (torch.from_numpy(x) for x in cos_and_sin((2.0 * math.pi * second).numpy()))
    pairs = torch.stack([radius * cos * std, radius * sin * std], dim=1)
    return pairs.float().flatten()[:count].clone()


def make_tiny(
    out: str | Path,
    family: str = "qwen3",
    hidden_size: int = 128,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    vocab_size: int | None = None,
    tokenizer: Literal["characters", "bpe"] = "characters",
    text_files: str | Path | Sequence[str | Path] = (),
    seed: int = 0,
    *,
    alphabet: str = PRINTABLE,
    tie_word_embeddings: bool = True,
    max_position_embeddings: int = 4096,
    rope_theta: float = 10000.0,
    initializer_range: float = _DEFAULT_STD,
    dtype: SaveDtype = "float32",
    overwrite: bool = False,
    **block: int,
) -> Path:
    """Write a model directory with random weights, for transformers and jetrl; return its path.

    Sizes have their names in config.json. A llama has the scaled rotary frequencies of Llama 3.1.

    Args:
        head_dim: 64 by default; hidden_size / num_heads for families whose heads fill the width.
        vocab_size: Rows of the embedding, and maximum vocabulary of 'bpe'. Default: the tokenizer's
            vocabulary, for 'bpe' at most 4,096 tokens.
        tokenizer: 'characters' (one token per character of `alphabet`) or 'bpe' (trained on
            `text_files`, with a chat template).
        block: Sizes of blocks and mixers, by their keys in config.json.

    Raises:
        UserError: an argument that is not supported, or a directory that cannot be written.
    """
    if family not in FAMILIES:
        raise UserError(f"family {family!r}: one of {', '.join(FAMILIES)}")
    text_files = [text_files] if isinstance(text_files, str | Path) else text_files
    if tokenizer == "bpe":
        made: PreTrainedTokenizerBase = train_bpe_tokenizer(text_files, vocab_size or 4096)
    elif text_files or tokenizer != "characters":
        raise UserError(f"tokenizer {tokenizer!r}: 'characters', or 'bpe' trained on text files")
    else:
        made = character_tokenizer(alphabet)
    language, vision = FAMILIES[family].language, FAMILIES[family].vision
    if vision is not None:
        reader = READERS[vision]
        made.add_special_tokens({"additional_special_tokens": [*reader.tokens]})
        template = _CHATML_IMAGES.replace("<image>", reader.place)
        made.chat_template = template if tokenizer == "bpe" else None
    if vocab_size is not None and vocab_size < len(made):
        raise UserError(f"vocab_size = {vocab_size}: the tokenizer has {len(made)} tokens")
    end_ids = {made.eos_token_id, made.pad_token_id if tokenizer == "bpe" else made.eos_token_id}
    records, mixers = FAMILIES[family].records, FAMILIES[family].mixers
    keys = {name: key for record in records for name, key in record.keys().items()}
    for name in sorted(block.keys() - keys.keys()):
        fields = {key: field for record in records for key, field in record.model_fields.items()}
        own = [f"{key} ({field.description})" for key, field in fields.items() if field.examples]
        raise UserError(f"{family} has no {name}; it has {', '.join(own)}")
    raw: dict[str, Any] = {
        "architectures": [FAMILIES[family].architecture],
        "model_type": language or family,
        "vocab_size": vocab_size or len(made),
        "hidden_size": hidden_size,
        **{key: value for record in records for key, value in record.tiny().items()},
        **{keys[name]: value for name, value in block.items()},
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 64 if head_dim is None else head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": rope_theta,
        "max_position_embeddings": max_position_embeddings,
        "initializer_range": initializer_range,
        "tie_word_embeddings": tie_word_embeddings,
        "eos_token_id": made.eos_token_id,
        "pad_token_id": made.pad_token_id,
        "bos_token_id": None,
    }
    if FAMILIES[family].heads_fill_width and head_dim is None:
        raw["head_dim"] = hidden_size // max(1, num_heads)
    if family == "llama":
        raw["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": max(1, max_position_embeddings // 4),
        }
    if FAMILIES[family].window_in_use:
        raw["sliding_window"] = None  # without the key, transformers has a window
    if mixers:
        raw["layer_types"] = list(islice(cycle((*mixers, "full_attention")), num_layers))
    if vision is not None:
        of_images: Json = vision.tiny(hidden_size, raw["head_dim"])
        raw = {
            "architectures": raw.pop("architectures"),
            "model_type": family,
            **of_images,
            "text_config": {**raw, **of_images.get("text_config", {})},
            "image_token_id": made.convert_tokens_to_ids(reader.mark),
            "tie_word_embeddings": tie_word_embeddings,
        }
        if VIDEO in reader.tokens:
            raw["video_token_id"] = made.convert_tokens_to_ids(VIDEO)
    config = ModelConfig.from_hf(raw)
    generation_config = {"eos_token_id": sorted(end_ids), "pad_token_id": made.pad_token_id}
    weights: Mapping[str, Tensor] = RandomWeights(config, seed)
    side_files: dict[str, Json] = {"generation_config.json": generation_config}
    if config.vision is not None:
        weights = {**weights, **random_tower(config, seed)}
        side_files["preprocessor_config.json"] = reader.settings(config.vision)
    save_model(
        path=out,
        config=config,
        weights=weights,
        encoding=Encoding(dtype),
        tokenizer=made,
        side_files=side_files,
        overwrite=overwrite,
    )
    return Path(out)


_CHARACTER_SPECIAL = ("<pad>", "<eos>")  # the first two tokens of a tokenizer of characters
_BPE_PAD, _BPE_START, _BPE_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_CHATML_IMAGES = _CHATML.replace(
    "message['content']",
    "'' }}{% for part in message['content'] %}{{ "
    "'<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{{ ''",
)


def character_tokenizer(alphabet: str = PRINTABLE) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character: <pad> is 0, <eos> is 1, then the alphabet.

    Encoding a character outside the alphabet is an error: there is no unknown token. Decoding joins
    characters without spaces. Raises UserError for an empty alphabet or a repeated character.
    """
    if not alphabet or len(set(alphabet)) < len(alphabet):
        raise UserError(f"alphabet {alphabet!r:.200}: empty, or it repeats a character")
    if any("\ud800" <= character <= "\udfff" for character in alphabet):
        raise UserError(f"alphabet {alphabet!r:.200}: a surrogate is no character")
    vocabulary = {token: index for index, token in enumerate((*_CHARACTER_SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )


def alphabet_of(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """Return the alphabet of a tokenizer from `character_tokenizer`; None for others."""
    special = list(_CHARACTER_SPECIAL)
    if tokenizer is None or tokenizer.convert_ids_to_tokens([0, 1]) != special:
        return None
    ids = tokenizer.get_vocab()
    characters = sorted(ids, key=ids.__getitem__)[len(special) :]
    return "".join(characters) if {*map(len, characters)} == {1} else None


def train_bpe_tokenizer(text_files: Sequence[str | Path], vocab_size: int) -> Qwen2Tokenizer:
    """Return a byte-level BPE tokenizer like Qwen's, trained on files; each digit is a token.

    It has at most `vocab_size` tokens, at least 259. All 256 bytes are tokens, so any text encodes
    and decodes to itself in Unicode's NFC form. The padding token is <|endoftext|> (0), the
    end-of-sequence token <|im_end|> (2), and the chat template ChatML. In a `.jsonl` file, all
    string values are training text. Raises UserError for a file that cannot be read.
    """
    special = [_BPE_PAD, _BPE_START, _BPE_END]
    smallest = 256 + len(special)
    if vocab_size < smallest:
        raise UserError(f"vocab_size = {vocab_size}: byte-level BPE needs at least {smallest}")
    if not text_files:
        raise UserError("a BPE tokenizer is trained on text: give at least one text file")
    qwen = Qwen2Tokenizer().backend_tokenizer  # for its rule of splitting text
    trained = Tokenizer(models.BPE())
    trained.normalizer, trained.pre_tokenizer = qwen.normalizer, qwen.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator([text for file in text_files for text in _texts_of(file)], trainer)
    model = json.loads(trained.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],  # type: ignore[misc]  # its stub says str
        eos_token=_BPE_END,
        pad_token=_BPE_PAD,
        unk_token=_BPE_PAD,
        extra_special_tokens=[_BPE_START],
        clean_up_tokenization_spaces=False,
        chat_template=_CHATML,
    )


def _texts_of(file: str | Path) -> list[str]:
    """Return all strings in a `.jsonl` file, or the contents of another file."""
    file = Path(file)
    try:
        contents = file.read_text(encoding="utf-8-sig")  # may start with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: {getattr(error, 'strerror', None) or error}") from None
    texts = [contents]
    if file.suffix == ".jsonl":
        texts = []
        for number, line in enumerate(contents.split("\n"), start=1):
            try:
                found = list(_strings(json.loads(line))) if line.strip() else []
                "".join(found).encode()  # fails on a lone surrogate
            except (ValueError, RecursionError) as error:
                raise UserError(f"{file}, line {number}: not JSON in UTF-8: {error}") from None
            texts += found
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise UserError(f"{file}: no text in it")
    return texts


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, except keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)
