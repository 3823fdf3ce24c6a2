"""Write the weights of a model or a run as a Hugging Face directory.

For example:

    jetrl export runs/demo models/demo                      BF16, for transformers and vLLM
    jetrl export models/qwen3-8b models/q-fp8 --dtype fp8   block-scaled FP8 (e4m3, 128 x 128)
    jetrl export runs/lora adapters/mine                    a run's adapter, in PEFT's format
    jetrl export runs/lora models/mine --merge              a whole model, with the adapter merged
    jetrl export runs/lora adapters/mine --base models/b    the adapter and its random base
    jetrl export runs/judge models/judge                    a reward model, in FP32
    jetrl export runs/demo models/demo --push-to-hub me/demo --private   upload it, too
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jetrl.cli.arguments import DEVICES, add_trust_argument
from jetrl.errors import UserError

if TYPE_CHECKING:
    from jetrl.models.families import ModelConfig
    from jetrl.models.policy import Policy
    from jetrl.models.scalar_model import ScalarModel

# Keys of generation_config.json, each with the value that changes no distribution.
_PLAIN = {
    "temperature": 1,
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help="a Hugging Face directory, an adapter, a run directory or a checkpoint",
    )
    add("out", metavar="OUT", help="the directory to write")
    words = "weight format (default: bfloat16; of a reward model float32)"
    add("--dtype", choices=("bfloat16", "float32", "fp8"), help=words)
    add("--merge", action="store_true", help="merge the adapter into a whole model")
    add("--base", metavar="DIR", help="write the random base of the adapter to DIR, in float32")
    add("--overwrite", action="store_true", help="replace an existing model at OUT")
    add("--push-to-hub", metavar="NAME", help="upload OUT as USER/MODEL, with a model card")
    add("--private", action="store_true", help="make a new repository private")
    add("--device", choices=DEVICES, default="cpu", help="device to use")
    add_trust_argument(parser)


def run(args: argparse.Namespace) -> int:
    if args.private and args.push_to_hub is None:
        raise UserError("--private is for --push-to-hub")
    if args.push_to_hub is None:
        _export(args)
        return 0
    from jetrl.cli.hub import check_hub, push, write_card

    check_hub(args.push_to_hub)  # before minutes of work
    _export(args)
    write_card(Path(args.out), args.model, args.dtype)
    print(f"uploaded to {push(Path(args.out), args.push_to_hub, args.private)}")
    return 0


def _export(args: argparse.Namespace) -> None:
    _write(args)
    _name_sampling(Path(args.out))


def _name_sampling(folder: Path) -> None:
    """Report how others sample from a model that was written, if not from its distribution."""
    from jetrl.models import hf

    config = hf.read_generation_config(folder)
    other = [key for key, plain in _PLAIN.items() if config.get(key) not in (None, plain)]
    if other:
        words = ", ".join(f"{key} {config[key]}" for key in other)
        print(
            f"transformers and vLLM sample with {words} unless told otherwise: "
            f"{folder / 'generation_config.json'} says so, as that of the base model; jetrl does "
            "not read it"
        )


def _write(args: argparse.Namespace) -> None:
    from jetrl.cli.opening import find_model, open_model
    from jetrl.models import hf
    from jetrl.models.nvfp4_files import is_nvfp4
    from jetrl.models.peft import experts_among_others

    if args.merge and args.base is not None:
        raise UserError("--base goes with an adapter, but --merge writes a whole model")
    if args.merge:
        _merge(args)
        return
    path = find_model(Path(args.model)).path
    if (path / "config.json").is_file() and is_nvfp4(hf.model_config(path)):
        _widen(args, path)
        return
    policy = open_model(args.model, None, args.device, fallback="fp32")
    if policy.lora is not None and args.dtype not in (None, "bfloat16"):
        raise UserError(
            f"--dtype {args.dtype} is for a whole model, and {args.model} has an adapter: add "
            "--merge"
        )
    _name_base(args, policy)
    _choose_dtype(args, policy.config)
    policy.save_pretrained(args.out, dtype=args.dtype, overwrite=args.overwrite)
    print(f"wrote {args.out} ({args.dtype if policy.lora is None else 'an adapter, float32'})")
    if policy.lora is not None and experts_among_others(policy.config, policy.master_weights()):
        print("peft 0.21 drops a part of these files without an error: use --merge instead")


def _choose_dtype(args: argparse.Namespace, config: ModelConfig) -> None:
    """Set the default of --dtype: in BF16, scores that are close would change their order."""
    args.dtype = args.dtype or ("float32" if config.head == "score" else "bfloat16")


def _name_base(args: argparse.Namespace, policy: Policy | ScalarModel) -> None:
    """Write the random base of an adapter, so that the adapter's files can name its path."""
    from jetrl.models import hf

    source = policy.base_source
    if source is None or source.origin is not None:
        if args.base is not None:
            known = f"its base is {source.origin}" if source else "it has no adapter"
            raise UserError(f"--base is for an adapter on a random base; of {args.model}, {known}")
        return
    if args.base is None:
        raise UserError(
            f"{args.model} has an adapter on a random base, which no directory holds: add --base "
            "DIR to write the base too, or --merge to write a whole model"
        )
    hf.save_model(
        path=args.base,
        config=source.config,
        weights=source.with_tower(source.weights(policy.device)),
        encoding=hf.Encoding("float32"),
        tokenizer=policy.tokenizer,
        side_files=source.side_files,
        overwrite=args.overwrite,
    )
    print(f"wrote {args.base} (float32, the random base)")
    policy.base_source = replace(source, origin=str(Path(args.base).resolve()))


def _widen(args: argparse.Namespace, path: Path) -> None:
    """Write an NVFP4 model with its dequantized weights."""
    import torch

    from jetrl.models import hf
    from jetrl.models.source import ModelSource
    from jetrl.session.building import choose_device

    source = ModelSource.from_path(path)
    _choose_dtype(args, source.config)
    hf.save_model(
        path=args.out,
        config=source.config,
        weights=source.weights(torch.device(choose_device(args.device))),
        encoding=hf.Encoding(args.dtype),
        tokenizer=source.tokenizer,
        side_files=source.side_files,
        overwrite=args.overwrite,
    )
    print(f"wrote {args.out} ({args.dtype}, dequantized from the NVFP4 of {path})")


def _merge(args: argparse.Namespace) -> None:
    """Write the base of an adapter directory or of a run's checkpoint with the adapter merged."""
    import torch

    from jetrl.cli.opening import adapter_source, find_model, open_model
    from jetrl.models import hf
    from jetrl.models.adapter import base_digest
    from jetrl.models.nvfp4_files import is_nvfp4
    from jetrl.models.peft import MergedWeights, is_adapter
    from jetrl.session.building import choose_device

    location, device = find_model(Path(args.model)), choose_device(args.device)
    if is_adapter(location.path):
        source = adapter_source(location, device, scalar=True)
        adapter = source.adapter
        assert adapter is not None, "an adapter directory has one"
        base = source.weights(torch.device(device))
        config, lora = adapter.shape(source.config), adapter.lora
        adapter.check_base(base_digest(config, base))
        trained = {**adapter.tensors, **adapter.replaced}
        tokenizer = source.tokenizer if hf.has_tokenizer(location.path) else None
    else:
        policy = open_model(args.model, None, args.device, fallback="fp32")
        if policy.lora is None or policy.base_source is None:
            raise UserError(f"--merge: {args.model} has no adapter to merge; leave --merge out")
        source, config, lora = policy.base_source, policy.config, policy.lora
        base = source.weights(torch.device(device))
        trained, tokenizer = policy.adapter_tensors(), policy.tokenizer
    _choose_dtype(args, config)
    merged = MergedWeights(config, lora, base, trained, torch.device(device))
    hf.save_model(
        path=args.out,
        config=config,
        weights=source.with_tower(merged),
        encoding=hf.Encoding(args.dtype, dithered="linears"),
        tokenizer=tokenizer,
        side_files=source.side_files if source.origin or source.tower else {},
        overwrite=args.overwrite,
    )
    print(f"wrote {args.out} ({args.dtype}, the adapter merged)")
    print(f"measured: after rounding to FP8, the merged change is off by {merged.fp8_loss():.0%}")
    if is_nvfp4(source.config):
        print("the base is in NVFP4: the adapter was added to its dequantized weights")
