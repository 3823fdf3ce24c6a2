"""Models by the names of the Hugging Face hub: from its cache on this disk, or downloaded into it.

    Qwen/Qwen3-8B              the branch `main`
    Qwen/Qwen3-8B@b968826d9c   a branch, a tag or a commit

What the cache holds is used as it is, without asking the network: a run that is resumed reads what
it began with, and a machine without network works. A name that the cache does not hold, or not
wholly, is downloaded by huggingface_hub, which shows its progress and goes on where an earlier
download stopped. Only configuration, tokenizer and safetensors weights are ever fetched, and first
the small files: `--dry-run` needs no weights.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from pathlib import Path
from typing import Literal

import huggingface_hub
from huggingface_hub import constants, errors

from jetrl.errors import UserError

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
Part = Literal["small", "weights"]
_PATTERNS: dict[Part, tuple[str, ...]] = {
    "small": (
        *("config.json", "generation_config.json", "chat_template*", "merges.txt"),
        "hf_quant_config.json",
        *("special_tokens_map.json", "added_tokens.json", *TOKENIZER_FILES),
    ),
    "weights": ("model.safetensors", "model-*.safetensors", INDEX),
}
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(?:@[\w./-]{1,200})?")


def is_hub_name(path: str | Path) -> bool:
    """Return whether a path that is not on this disk can be a name of the hub.

    A path into a folder that exists (`models/NAME` beside a folder `models`) is a mistyped path.
    """
    name = str(path)
    if not _NAME.fullmatch(name) or ".." in name or Path(name).exists():
        return False
    return not Path(name.partition("/")[0]).is_dir()


@functools.cache
def snapshot(name: str, part: Part) -> Path:
    """Return the folder of the hub's cache that holds a model, downloading what it lacks.

    Raises:
        UserError: The model is not in the cache and cannot be downloaded; says why and what to do.
    """
    repository, _, revision = name.partition("@")
    cached = _cached(repository, revision or None)
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
        raise UserError(f"{name}: no such directory here, and {_why(name, error)}") from error
    return Path(folder)


def _cached(repository: str, revision: str | None) -> Path | None:
    """Return a model's folder in the cache, complete or not; None where the cache has none."""
    try:
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns="config.json", local_files_only=True
        )
    except (OSError, ValueError):
        return None
    return Path(folder)


def _is_whole(folder: Path, part: Part) -> bool:
    """Return whether a folder of the cache holds all files of a part."""
    if part == "small":
        tokenizer = any((folder / file).is_file() for file in TOKENIZER_FILES)
        return (folder / "config.json").is_file() and tokenizer
    if (folder / "model.safetensors").is_file():
        return True
    try:
        shards = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        return all((folder / str(shard)).is_file() for shard in set(shards))
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def _why(name: str, error: Exception) -> str:
    """Return why a model of the hub cannot be read, and what to do."""
    repository, _, revision = name.partition("@")
    page = f"https://huggingface.co/{repository}"
    cache = f"its cache ({constants.HF_HUB_CACHE})"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"the hub gives {repository} to those who accept its terms: {page}, then set HF_TOKEN"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"it has no revision {revision or 'main'!r} on the hub: see {page}/tree/main"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"the hub has no model {repository} that this user may see; check the name, or set "
            "HF_TOKEN if it is private"
        )
    if constants.HF_HUB_OFFLINE:
        return (
            f"{cache} does not hold it, and HF_HUB_OFFLINE is set: unset it, or run "
            f"`hf download {repository}` where there is network and copy the cache"
        )
    reason = str(error).strip().splitlines()
    return (
        f"{cache} does not hold it, and the hub cannot be reached ({type(error).__name__}: "
        f"{reason[0][:200] if reason else ''}): give a directory, check the network, or run "
        f"`hf download {repository}` where there is one and copy the cache"
    )
