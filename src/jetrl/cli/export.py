"""Write the weights of a model or a run as a Hugging Face directory.

For example:

    jetrl export runs/demo models/demo                      BF16, for transformers and vLLM
    jetrl export models/qwen3-8b models/q-fp8 --dtype fp8   block-scaled FP8 (e4m3, 128 x 128)
    jetrl export runs/lora adapters/mine                    a run's adapter, in PEFT's format
    jetrl export runs/lora models/mine --merge              a whole model, with the adapter merged
    jetrl export runs/lora adapters/mine --base models/b    the adapter and its random base
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jetrl.cli.arguments import DEVICES, add_trust_argument
from jetrl.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from jetrl.models.adapter import Adapter, LoRA
    from jetrl.models.families import ModelConfig
    from jetrl.models.policy import Policy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    model = "a Hugging Face directory, an adapter, a run directory or a checkpoint"
    add("model", metavar="MODEL", help=model)
    add("out", metavar="OUT", help="the directory to write")
    add("--dtype", choices=("bfloat16", "float32", "fp8"), default="bfloat16", help="weight format")
    add("--merge", action="store_true", help="merge the adapter into a whole model")
    add("--base", metavar="DIR", help="write the random base of the adapter to DIR, in float32")
    add("--overwrite", action="store_true", help="replace an existing model at OUT")
    add("--device", choices=DEVICES, default="cpu", help="device to use")
    add_trust_argument(parser)


def run(args: argparse.Namespace) -> int:
    from jetrl.cli.opening import find_model, open_policy
    from jetrl.models import hf
    from jetrl.models.nvfp4_files import is_nvfp4

    if args.merge and args.base is not None:
        raise UserError("--base goes with an adapter, but --merge writes a whole model")
    if args.merge:
        _merge(args)
        return 0
    path = find_model(Path(args.model)).path
    if (path / "config.json").is_file() and is_nvfp4(hf.model_config(path)):
        _widen(args, path)
        return 0
    policy = open_policy(args.model, None, args.device, fallback="fp32")
    if policy.lora is not None and args.dtype != "bfloat16":
        what = f"--dtype {args.dtype} is for a whole model"
        raise UserError(f"{what}, and {args.model} has an adapter: add --merge")
    _name_base(args, policy)
    policy.save_pretrained(args.out, dtype=args.dtype, overwrite=args.overwrite)
    print(f"wrote {args.out} ({args.dtype if policy.lora is None else 'an adapter, float32'})")
    return 0


def _name_base(args: argparse.Namespace, policy: Policy) -> None:
    """Write the random base of an adapter, so that the adapter's files can name its path."""
    from jetrl.models import hf

    if policy.lora is None or policy.base_path is not None:
        if args.base is not None:
            known = f"its base is {policy.base_path}" if policy.lora else "it has no adapter"
            raise UserError(f"--base is for an adapter on a random base; of {args.model}, {known}")
        return
    if args.base is None:
        raise UserError(
            f"{args.model} has an adapter on a random base, which no directory holds: add --base "
            "DIR to write the base too, or --merge to write a whole model"
        )
    weights = _random_weights(args, policy.base_config, policy.device)
    files = (policy.tokenizer, policy.generation_config or None)
    hf.save_model(
        args.base, policy.base_config, weights, "float32", *files, overwrite=args.overwrite
    )
    print(f"wrote {args.base} (float32, the random base)")
    policy.base_path = str(Path(args.base).resolve())


def _widen(args: argparse.Namespace, path: Path) -> None:
    """Write an NVFP4 model with its dequantized weights."""
    from jetrl.models import hf
    from jetrl.session.building import choose_device

    config = hf.model_config(path)
    tokenizer = hf.load_tokenizer(path) if hf.has_tokenizer(path) else None
    files = (tokenizer, hf.read_generation_config(path))
    weights = hf.open_weights(path, config, choose_device(args.device))
    hf.save_model(args.out, config, weights, args.dtype, *files, overwrite=args.overwrite)
    print(f"wrote {args.out} ({args.dtype}, dequantized from the NVFP4 of {path})")


class _Parts(NamedTuple):
    """The parts of a merged model; base None: random weights; adapter None: of a checkpoint."""

    config: ModelConfig
    base_config: ModelConfig
    lora: LoRA
    masters: Mapping[str, Tensor]
    base: str | None
    tokenizer: PreTrainedTokenizerBase | None
    adapter: Adapter | None = None


def _merged_parts(args: argparse.Namespace) -> _Parts:
    """Return the parts to merge, from an adapter directory or a run's checkpoint."""
    from jetrl.cli.opening import find_model, open_policy
    from jetrl.models import hf
    from jetrl.models.peft import base_of, is_adapter, is_scalar, read_adapter
    from jetrl.session.building import model_config
    from jetrl.settings.loading import load_config

    location = find_model(Path(args.model))
    if not is_adapter(location.path):
        policy = open_policy(args.model, None, args.device, fallback="fp32")
        if policy.lora is None:
            raise UserError(f"--merge: {args.model} has no adapter to merge; leave --merge out")
        shapes, masters = (policy.config, policy.base_config), policy.adapter_tensors()
        return _Parts(*shapes, policy.lora, masters, policy.base_path, policy.tokenizer)
    path, run = location.path, location.run
    base = base_of(path, optional=run is not None)
    config = hf.model_config(base) if base else model_config(load_config(f"{run}/config.toml"))
    shape = config.with_scalar_head() if is_scalar(path) and config.head == "lm" else config
    adapter = read_adapter(path, shape)
    tokenizer = hf.load_tokenizer(path) if hf.has_tokenizer(path) else None
    shapes, trained = (adapter.shape(shape), config), {**adapter.tensors, **adapter.replaced}
    return _Parts(*shapes, adapter.lora, trained, base, tokenizer, adapter)


def _merge(args: argparse.Namespace) -> None:
    import torch

    from jetrl.models import hf
    from jetrl.models.adapter import stored_base_digest
    from jetrl.models.nvfp4_files import is_nvfp4
    from jetrl.models.peft import MergedWeights
    from jetrl.session.building import choose_device

    parts, device = _merged_parts(args), torch.device(choose_device(args.device))
    base: Mapping[str, Tensor]
    if parts.base is None:
        base = _random_weights(args, parts.base_config, device)
    else:
        base = hf.open_weights(parts.base, parts.base_config, device)
    generation = None if parts.base is None else hf.read_generation_config(parts.base)
    files = (parts.tokenizer, generation)
    if parts.adapter is not None:
        parts.adapter.check_base(stored_base_digest(parts.config, base))
    merged = MergedWeights(parts.config, parts.lora, base, parts.masters, device)
    how: dict[str, Any] = {"dithered": "linears", "overwrite": args.overwrite}
    hf.save_model(args.out, parts.config, merged, args.dtype, *files, **how)
    print(f"wrote {args.out} ({args.dtype}, the adapter merged)")
    print(f"measured: after rounding to FP8, the merged change is off by {merged.fp8_loss():.0%}")
    if is_nvfp4(parts.base_config):
        print("the base is in NVFP4: the adapter was added to its dequantized weights")


def _random_weights(
    args: argparse.Namespace, config: ModelConfig, device: torch.device
) -> Mapping[str, Tensor]:
    from jetrl.cli.opening import find_model
    from jetrl.models.tiny import RandomWeights
    from jetrl.settings.loading import load_config

    run = find_model(Path(args.model)).run
    assert run is not None, "the seed of a run makes a random base"
    return RandomWeights(config, load_config(run / "config.toml").run.seed, device)
