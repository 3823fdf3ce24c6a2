"""The files of a Hugging Face model directory: finding, downloading, opening and flushing them.

    Qwen/Qwen3-8B              the branch `main` of a hub model
    Qwen/Qwen3-8B@b968826d9c   a branch, a tag or a commit

The hub's cache is used without asking the network: a resumed run reads what it began with, and a
machine without network works. huggingface_hub downloads a name that the cache lacks or holds in
part: only configuration, tokenizer and safetensors weights, the small files first, since
`--dry-run` needs no weights. Errors name the missing or damaged file and say what to do.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
from huggingface_hub import constants
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from jetrl.errors import UserError
from jetrl.files import open_regular, read_json

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
Part = Literal["small", "weights"]
_PATTERNS: dict[Part, tuple[str, ...]] = {
    "small": (
        *("config.json", "generation_config.json", "chat_template*", "merges.txt"),
        *("hf_quant_config.json", "preprocessor_config.json", "processor_config.json"),
        *("special_tokens_map.json", "added_tokens.json", *TOKENIZER_FILES),
    ),
    "weights": ("model.safetensors", "model-*.safetensors", INDEX),
}
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(?:@[\w./-]{1,200})?")


def is_hub_name(path: str | Path) -> bool:
    """Return whether a path that is not on this disk can be a hub name.

    A path into a folder that exists (`models/NAME` next to a folder `models`) is a mistyped path.
    """
    name = str(path)
    if not _NAME.fullmatch(name) or ".." in name or Path(name).exists():
        return False
    return not Path(name.partition("/")[0]).is_dir()


_SMALL_IS_ENOUGH = (
    "; a dry run needs only config.json and the tokenizer's files: put them in a folder DIR, "
    "and set model.path=none model.config=DIR/config.json model.tokenizer=DIR"
)


@functools.cache
def snapshot(name: str, part: Part) -> Path:
    """Return the folder of the hub's cache that holds a model, downloading what it lacks."""
    repository, _, revision = name.partition("@")
    cached: Path | None = None
    with contextlib.suppress(OSError, ValueError):
        folder = huggingface_hub.snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns="config.json",
            local_files_only=True,
        )
        cached = Path(folder)
    if cached is not None and _is_whole(cached, part):
        return cached
    if not constants.HF_HUB_OFFLINE:
        logger.info("downloading %s (%s) into %s", name, part, constants.HF_HUB_CACHE)
    try:
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision or None, allow_patterns=list(_PATTERNS[part])
        )
    except Exception as error:  # of huggingface_hub, its HTTP library and the disk: no common base
        # A model without a tokenizer is whole for what needs none, such as a reward model.
        if cached is not None and part == "small" and (cached / "config.json").is_file():
            return cached
        hint = _SMALL_IS_ENOUGH if part == "small" else ""
        offline = ", and HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
        raise UserError(
            f"{name}: no such directory here, and the hub's cache ({constants.HF_HUB_CACHE}) does "
            f"not hold it{offline}: {type(error).__name__}: {first_line(error)[:200]}; set "
            "HF_TOKEN for a private or gated model, or run `hf download "
            f"{repository}` where there is network and copy the cache{hint}"
        ) from error
    return Path(folder)


def _is_whole(folder: Path, part: Part) -> bool:
    """Return whether a folder of the cache holds all files of a part."""
    if part == "small":
        tokenizer = any((folder / file).is_file() for file in TOKENIZER_FILES)
        return (folder / "config.json").is_file() and tokenizer
    try:
        return bool(tensor_files(folder))
    except UserError:
        return False


_CONTENTS = (
    "a Hugging Face model directory has config.json, model.safetensors (or "
    "model.safetensors.index.json and its shards) and tokenizer.json"
)


def tensor_files(directory: Path) -> dict[str, Path]:
    """Return the file of each tensor by the tensor's name, from the single file or the index."""
    single, index = directory / "model.safetensors", directory / INDEX
    if single.exists():
        with open_tensors(single) as handle:
            return dict.fromkeys(handle.keys(), single)
    if not index.exists():
        raise UserError(
            f"{directory}: no weights: no model.safetensors and no {INDEX}; convert pickled "
            "ones by AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
        )
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: no weight_map; download the file again")
    files: dict[str, Path] = {}
    for file in sorted({str(file) for file in weight_map.values()}):
        if file in ("", ".", "..") or "/" in file or "\0" in file:
            raise UserError(f"{index}: {file[:80]!r} is not the name of a file next to it")
        if not (directory / file).exists():
            raise UserError(f"{directory / file}: missing, but {INDEX} names it; download it again")
        with open_tensors(directory / file) as handle:
            files |= dict.fromkeys(handle.keys(), directory / file)
    return files | {n: directory / str(file) for n, file in weight_map.items() if n in files}


@contextlib.contextmanager
def _reading_tensors(file: Path) -> Iterator[None]:
    """Turn an error of reading a safetensors file into a UserError that explains it."""
    try:
        open_regular(file).close()
        yield
    except OSError as error:  # a file on a failing disk may be whole: only what the error says
        raise UserError(f"{file}: {error.strerror or first_line(error)}") from None
    except SafetensorError as error:
        raise UserError(
            f"{file}: truncated or not a safetensors file ({first_line(error)}); download or "
            "write it again"
        ) from error


def open_tensors(file: Path) -> Any:
    """Open a safetensors file, memory-mapped: a context with `keys`, `get_slice`, `get_tensor`."""
    with _reading_tensors(file):
        return safe_open(str(file), framework="pt", device="cpu")


def load_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, in CPU memory."""
    with _reading_tensors(file):
        return load_file(file)


def model_directory(path: str | Path, part: Part = "small") -> Path:
    """Return a model's directory: the path itself, or the cache's for OWNER/NAME[@REVISION].

    The `part` of a hub model that is read is downloaded if it is not cached.
    """
    directory = Path(path)
    if is_hub_name(path):
        return snapshot(str(path), part)
    if not directory.is_dir():
        what = "is a file, not a directory" if directory.exists() else "no such directory"
        if directory.suffix == ".gguf":
            what += "; transformers reads it, and benchmarks/smollm2.py writes one as a directory"
        raise UserError(f"{directory}: {what}; {_CONTENTS}")
    return directory


def read_object(file: Path) -> dict[str, Any]:
    try:
        contents = read_json(file)
    except FileNotFoundError:
        of_run = file.parent / "model"
        hint = f"did you mean {of_run}?" if (of_run / file.name).is_file() else _CONTENTS
        raise UserError(f"{file}: no such file; {hint}") from None
    if not isinstance(contents, dict):
        raise UserError(f"{file}: a JSON object is expected")
    return contents


def first_line(error: BaseException) -> str:
    """Return an error's first line, without the advice that libraries append."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def sync(path: Path) -> None:
    """Flush a file's contents, or the names in a directory, to disk.

    Some file systems (SMB, 9p, some in user space) cannot flush a directory; that error is ignored.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.EBADF)):
            raise
    finally:
        os.close(handle)
