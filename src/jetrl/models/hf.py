"""Reading a Hugging Face model directory: config.json, weights, tokenizer, generation settings.

A path may be a name of the hub (hub.py), whose files are in its cache; no code from a model
directory is ever run. What a directory lacks or has too much of is an error that names the file and
the tensor. Weights are read in hf_weights.py; `save_model` (hf_save.py) writes what is read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from jetrl.errors import UserError
from jetrl.models.families import ModelConfig, token_ids
from jetrl.models.hf_files import TOKENIZER_FILES, first_line, model_directory, read_object
from jetrl.models.hf_save import save_model
from jetrl.models.hf_weights import open_weights
from jetrl.models.nvfp4_files import SIDECAR, nvfp4_layout
from jetrl.models.tokenizer import check_tokenizer_files, check_vocabulary

__all__ = [
    "eos_token_ids",
    "load_tokenizer",
    "model_config",
    "open_weights",
    "read_config",
    "read_generation_config",
    "save_model",
]

_GENERIC_TOKENIZERS = ("None", "PreTrainedTokenizer", "TokenizersBackend")  # tokenizer.json alone


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the contents of `path`/config.json."""
    directory = model_directory(path)
    if (directory / "adapter_config.json").is_file() and not (directory / "config.json").is_file():
        raise UserError(
            f"{directory}: an adapter, not a whole model: train or sample with it by "
            "adapter.kind=lora and adapter.path, or write a whole model with `jetrl export --merge`"
        )
    return read_object(directory / "config.json")


def model_config(path: str | Path) -> ModelConfig:
    """Return the model of `path`/config.json."""
    contents = read_config(path)
    sidecar = model_directory(path) / SIDECAR
    if "quantization_config" not in contents and sidecar.exists():
        contents = {**contents, "quantization_config": _of_modelopt(sidecar)}
    try:
        nvfp4_layout(contents.get("quantization_config"))
        return ModelConfig.from_hf(contents)
    except UserError as error:  # which begins with config.json
        raise UserError(f"{path}/{error}") from None


def _of_modelopt(sidecar: Path) -> dict[str, Any]:
    """Return what is read of ModelOpt's file beside config.json, as a quantization_config."""
    contents = read_object(sidecar)
    if not isinstance(contents.get("quantization"), dict):
        raise UserError(f"{sidecar}: no object `quantization`, which ModelOpt writes there")
    return {"quant_method": "modelopt", "quantization": contents["quantization"]}


def read_generation_config(path: str | Path) -> dict[str, Any]:
    """Return the contents of `path`/generation_config.json, or nothing without that file."""
    file = model_directory(path) / "generation_config.json"
    return read_object(file) if file.exists() else {}


def eos_token_ids(
    config: ModelConfig,
    generation_config: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> tuple[int, ...]:
    """Return the ids that end a text."""
    ids = token_ids(generation_config.get("eos_token_id"), "generation_config.json: eos_token_id")
    own = None if tokenizer is None else tokenizer.eos_token_id
    return tuple(dict.fromkeys((*ids, *config.eos_token_ids, *([] if own is None else [own]))))


def has_tokenizer(path: str | Path) -> bool:
    """Return whether a directory holds tokenizer files."""
    return any((model_directory(path) / name).exists() for name in TOKENIZER_FILES)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a local directory.

    tokenizer.json describes a tokenizer completely. transformers' AutoTokenizer nevertheless puts a
    class of its own instead of the one a directory declares for some model types (of `qwen2` it
    makes a Qwen2Tokenizer, which splits text in Qwen's way whatever tokenizer.json says); where it
    does that, tokenizer.json alone is read.
    """
    directory = model_directory(path)
    tokenizer = _load_tokenizer(directory)
    check_vocabulary(tokenizer, directory)
    files = tokenizer.vocab_files_names.values()
    if files and not any((directory / file).is_file() for file in files):
        # transformers makes one of the settings alone, which encodes every text to nothing
        raise UserError(
            f"{directory}: its tokenizer has no vocabulary: none of {', '.join(sorted(files))}; "
            "copy the model's tokenizer.json into it"
        )
    return tokenizer


def _load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Return a directory's tokenizer, of the class that the directory declares."""
    if not has_tokenizer(directory):
        raise UserError(
            f"{directory}: no tokenizer ({', '.join(TOKENIZER_FILES)}); copy the tokenizer files "
            "of the model into it, or set model.tokenizer to a directory that has them"
        )
    check_tokenizer_files(directory)
    settings_file = directory / "tokenizer_config.json"
    settings = read_object(settings_file) if settings_file.exists() else {}
    declared = str(settings.get("tokenizer_class")).removesuffix("Fast")
    complete = (directory / "tokenizer.json").exists()
    try:
        if not (complete and declared in _GENERIC_TOKENIZERS):
            tokenizer = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
            if not complete or type(tokenizer).__name__.removesuffix("Fast") == declared:
                return tokenizer
        return PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # the tokenizer libraries raise bare Exception for damaged files
        raise UserError(f"{directory}: the tokenizer does not load: {first_line(error)}") from error
