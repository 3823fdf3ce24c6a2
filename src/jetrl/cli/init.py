"""Create a tiny model with random weights and its own tokenizer, as a Hugging Face directory.

For example:

    jetrl init models/tiny                                        one token per character
    jetrl init models/tiny-qwen3-gsm8k --tokenizer bpe --text data/gsm8k/train.jsonl
"""

from __future__ import annotations

import argparse

from jetrl.models.block import DenseShape

# As jetrl.models.families has them, without importing transformers for --help.
FAMILIES = ("qwen3", "qwen2", "llama", "mistral", "smollm3", "phi3")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", help="the directory to write")
    parser.add_argument("--family", choices=FAMILIES, default="qwen3", help="model family")
    sizes = parser.add_argument_group(
        "sizes", "FP8 layers need multiples of 128: hidden, heads x head_dim, MLP"
    )
    sizes.add_argument("--hidden-size", type=int, default=128, help="channels")
    sizes.add_argument("--num-layers", type=int, default=2, help="decoder layers")
    sizes.add_argument("--num-heads", type=int, default=4, help="query heads")
    sizes.add_argument("--num-kv-heads", type=int, default=2, help="key and value heads")
    sizes.add_argument("--head-dim", type=int, default=64, help="channels per head")
    for key, (size, meaning) in DenseShape.hf_sizes.items():
        option = "--" + key.replace("_", "-")
        sizes.add_argument(option, type=int, default=size, help=meaning)
    sizes.add_argument(
        "--vocab-size", type=int, help="tokens (default: the tokenizer's; bpe: 4096)"
    )
    sizes.add_argument("--context", type=int, default=4096, help="maximum tokens per sequence")
    parser.add_argument(
        "--tokenizer",
        choices=("characters", "bpe"),
        default="characters",
        help="one token per printable character, or byte-level BPE trained on --text",
    )
    parser.add_argument(
        "--text", nargs="+", metavar="FILE", default=[], help="text or JSON lines to train BPE on"
    )
    parser.add_argument("--untied", action="store_true", help="separate embeddings and lm_head")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the weights")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32", "fp8"),
        default="float32",
        help="weight format",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing model at OUT")


def run(args: argparse.Namespace) -> int:
    from jetrl.models.tiny import make_tiny

    out = make_tiny(
        args.out,
        family=args.family,
        hidden_size=args.hidden_size,
        num_layers=args.num_layers,
        num_heads=args.num_heads,
        num_kv_heads=args.num_kv_heads,
        head_dim=args.head_dim,
        vocab_size=args.vocab_size,
        tokenizer=args.tokenizer,
        text_files=args.text,
        seed=args.seed,
        tie_word_embeddings=not args.untied,
        max_position_embeddings=args.context,
        dtype=args.dtype,
        overwrite=args.overwrite,
        **{key: getattr(args, key) for key in DenseShape.hf_sizes},
    )
    print(f"wrote {out}")
    return 0
