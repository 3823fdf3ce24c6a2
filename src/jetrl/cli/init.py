"""Create a tiny model with random weights and its own tokenizer, as a Hugging Face directory.

For example:

    jetrl init models/tiny                                        character tokenizer
    jetrl init models/tiny-qwen3-gsm8k --tokenizer bpe --text data/gsm8k/train.jsonl
"""

from __future__ import annotations

import argparse
import functools

from jetrl.models.block import DenseShape, LayerHalf
from jetrl.models.experts_shape import Glm4Experts, OlmoeExperts, Qwen2Experts, Qwen3Experts
from jetrl.models.mixer import Mixer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one option per parameter of `make_tiny`."""
    add = parser.add_argument
    add("out", metavar="OUT", help="output directory")
    add("--family", default="qwen3", help="model family, such as qwen2 or llama")
    about = "FP8 layers need multiples of 64: hidden size, heads x head_dim, MLP size"
    size = functools.partial(parser.add_argument_group("sizes", about).add_argument, type=int)
    size("--hidden-size", default=128, help="channels")
    size("--num-layers", default=2, help="decoder layers")
    size("--num-heads", default=4, help="query heads")
    size("--num-kv-heads", default=2, help="key and value heads")
    size("--head-dim", help="channels per head (default: 64; olmoe: hidden size / heads)")
    kinds: tuple[type[LayerHalf], ...]
    experts = (Glm4Experts, OlmoeExperts, Qwen2Experts, Qwen3Experts)
    kinds = (*Mixer.__subclasses__(), *experts, DenseShape)
    meanings: dict[str, dict[str, None]] = {}
    for key, field in (item for kind in kinds for item in kind.model_fields.items()):
        for usual in field.examples or ():
            meanings.setdefault(key, {})[f"{field.description} (default: {usual})"] = None
    for key, words in meanings.items():
        size("--" + key.replace("_", "-"), default=argparse.SUPPRESS, help="; or ".join(words))
    size("--vocab-size", help="vocabulary size (default: from the tokenizer; bpe: 4096)")
    size(
        "--context",
        dest="max_position_embeddings",
        default=4096,
        metavar="CONTEXT",
        help="maximum tokens per sequence",
    )
    kind = "one token per printable character, or byte-level BPE trained on --text"
    add("--tokenizer", choices=("characters", "bpe"), default="characters", help=kind)
    add(
        "--text",
        dest="text_files",
        nargs="+",
        metavar="FILE",
        default=[],
        help="text or JSON lines to train BPE on",
    )
    add(
        "--untied",
        dest="tie_word_embeddings",
        action="store_false",
        help="separate embeddings and lm_head",
    )
    add("--seed", type=int, default=0, help="seed of the weights")
    add("--dtype", choices=("bfloat16", "float32", "fp8"), default="float32", help="weight format")
    add("--overwrite", action="store_true", help="replace an existing model at OUT")


def run(args: argparse.Namespace) -> int:
    from jetrl.models.tiny import make_tiny

    print(f"wrote {make_tiny(**vars(args))}")
    return 0
