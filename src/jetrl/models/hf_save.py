"""Write a Hugging Face model directory for transformers, vLLM and jetrl.

Writing is atomic: files go to a hidden directory next to the target, which is renamed at the end.
In an FP8 directory, the linear weights of decoder layers are float8_e4m3fn with one float32 scale
per 128 x 128 block (`weight_scale_inv`; value = code * scale). Other parameters are BF16.
config.json describes this layout.

With several processes, rank 0 writes. Tensors are gathered and rounded one at a time: a GPU holds
one whole tensor, and rank 0 holds the tensors of one file in CPU memory. All ranks raise an error
of rank 0.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file as save_safetensors
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from jetrl.distributed.world import world
from jetrl.errors import NonFiniteError, StorageError, UserError, is_of_disk
from jetrl.models.families import (
    FP8_BLOCK,
    FURTHER_LAYERS,
    SCALE_SUFFIX,
    ModelConfig,
    StoredTensor,
    further_layers,
    stored_tensors,
)
from jetrl.models.hf_files import sync
from jetrl.models.vision import tower_shapes
from jetrl.precision.quantize import dithered_bf16, quantize
from jetrl.settings.presets import DEFAULT_SCALES, ScaleRule
from jetrl.types import Json

SaveDtype = Literal["bfloat16", "float32", "fp8"]


@dataclass(frozen=True)
class Encoding:
    """The number formats of the tensors in a model directory.

    Attributes:
        bf16_layers: Decoder layers (from 0) whose linear weights are BF16 if `dtype` is "fp8".
        scales: The format of FP8 scales.
        dithered: The weights to round to BF16 stochastically, with fixed seeds
            (`quantize.dithered_bf16`).
        tower: The names of an image tower's tensors to encode, to nearest as the tower reads them;
            its others are written as they are.
    """

    dtype: SaveDtype = "bfloat16"
    bf16_layers: Collection[int] = ()
    scales: ScaleRule = DEFAULT_SCALES
    dithered: Literal["none", "linears", "matrices"] = "none"
    tower: Collection[str] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of tensors not in FP8."""
        return torch.float32 if self.dtype == "float32" else torch.bfloat16

    def is_fp8(self, part: StoredTensor) -> bool:
        return self.dtype == "fp8" and part.linear_weight and part.layer not in self.bf16_layers

    def is_dithered(self, part: StoredTensor) -> bool:
        if self.dithered == "matrices":
            wanted = len(part.shape) == 2 and part.name not in self.tower
        else:
            wanted = (
                self.dithered == "linears"
                and part.linear_weight
                and part.layer not in self.bf16_layers
            )
        return wanted and self.torch_dtype == torch.bfloat16

    def encode(self, parameter: str, part: StoredTensor, rows: Tensor) -> dict[str, Tensor]:
        """Return the tensors to write for one part of a parameter, by name."""
        if self.is_fp8(part):
            quantized = quantize(rows.float(), FP8_BLOCK, scales=self.scales)
            return {
                part.name: quantized.codes.cpu().contiguous(),
                part.name + SCALE_SUFFIX: quantized.scales.cpu().contiguous(),
            }
        dtype = torch.float32 if part.buffer else self.torch_dtype
        if self.is_dithered(part):
            rows = dithered_bf16(rows.float(), parameter.removesuffix(".weight"), part.first_row)
        # Rounded before the copy to the CPU, to halve its bytes. A copy in any case, since
        # safetensors refuses tensors that share memory.
        return {part.name: rows.to(dtype, copy=True).cpu().contiguous()}

    def num_bytes(self, part: StoredTensor) -> int:
        numbers = math.prod(part.shape)
        if not self.is_fp8(part):
            return numbers * (4 if part.buffer else self.torch_dtype.itemsize)
        if any(size % block for size, block in zip(part.shape, FP8_BLOCK, strict=True)):
            raise UserError(
                f"{part.name} {list(part.shape)} is not made of whole 128 x 128 blocks, and vLLM "
                "reads no others in FP8; save it as bfloat16"
            )
        return numbers + 4 * numbers // math.prod(FP8_BLOCK)


def save_model(
    path: str | Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    encoding: Encoding,
    tokenizer: PreTrainedTokenizerBase | None = None,
    side_files: Mapping[str, Json] = MappingProxyType({}),
    max_shard_bytes: int = 5 << 30,
    overwrite: bool = False,
) -> None:
    """Write a model directory. All ranks call this function; rank 0 writes.

    The directory has config.json, safetensors files (with an index if there are several), the
    tokenizer with its chat template, and side files.

    Args:
        weights: All parameters by jetrl's names (`families.parameter_shapes`), in any floating
            dtype, and the tensors of an image tower by their names in files, written as they are.
            Each is read once.
        side_files: The contents of other JSON files by their names; empty ones are left out.
        max_shard_bytes: Maximum size of a file in bytes; a larger tensor has its own file.
        overwrite: Replace a model directory at `path` when the new one is complete.

    Raises:
        UserError: an unknown dtype, a `path` that cannot be written, or FP8 weights whose
            dimensions are not multiples of 128.
        NonFiniteError: a tensor with a NaN or an infinity.
        StorageError: an error of the disk.
    """
    if encoding.dtype not in (known := get_args(SaveDtype)):
        raise UserError(f"dtype {encoding.dtype!r}: one of {', '.join(map(repr, known))}")
    parameters = stored_tensors(config)
    tower = {*weights} - parameters.keys()
    assert len(weights) == len(parameters) + len(tower), parameters.keys() - {*weights}
    if bool(tower) != (config.vision is not None):
        raise UserError(
            f"{path}: {config.architecture} is written only whole, with its image tower"
        )
    if config.vision is not None and encoding.tower:
        sizes = tower_shapes(config.vision, config.hidden_size)
        trained = {n: (StoredTensor(n, sizes[n], None, False),) for n in encoding.tower}
        parameters, tower = {**parameters, **trained}, tower - trained.keys()
    shards = _shards(parameters, encoding, max_shard_bytes)

    def finish() -> None:
        write_json(scratch / "config.json", _config_json(config, encoding))
        for name, contents in side_files.items():
            if contents:
                write_json(scratch / name, dict(contents))

    with new_directory(path, overwrite, tokenizer) as scratch:
        _write_shards(scratch, shards, encoding, weights, sorted(tower))
        world().from_first("config.json", finish)


@contextlib.contextmanager
def new_directory(
    path: str | Path, overwrite: bool, tokenizer: PreTrainedTokenizerBase | None
) -> Iterator[Path]:
    """Yield a hidden directory to fill; rank 0 then adds the tokenizer and renames it to `path`.

    Raises UserError if `path` cannot be written, and StorageError for an error of the disk.
    """
    target = Path(path)
    what = "a folder to write into"
    scratch = world().from_first(what, lambda: _begin_directory(target, overwrite))

    def publish() -> None:
        if tokenizer is not None:
            _save_tokenizer(scratch, tokenizer)
        publish_directory(scratch, target)

    try:
        yield scratch
        world().from_first("the end of a model directory", publish)
    except OSError as error:
        raise StorageError(
            f"{target}: not written: {error}. Make room there and type the command again; a run "
            "continues with --resume"
        ) from error
    finally:
        if world().is_first:
            shutil.rmtree(scratch, ignore_errors=True)


def _begin_directory(target: Path, overwrite: bool) -> Path:
    """Make and return a hidden directory next to the target."""
    _check_target(target, overwrite)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    except OSError as error:
        message = f"{target}: cannot write there: {error.strerror or error}"
        kind = StorageError if is_of_disk(error) else UserError
        raise kind(message) from error


Shards = list[list[tuple[str, StoredTensor]]]  # per file: (parameter, part)


def _shards(
    parameters: Mapping[str, Sequence[StoredTensor]], encoding: Encoding, most: int
) -> Shards:
    """Return the tensors per file. This reads no tensor."""
    shards: Shards = [[]]
    used = 0
    for name, parts in parameters.items():
        for part in parts:
            size = encoding.num_bytes(part)
            if shards[-1] and used + size > most:
                shards.append([])
                used = 0
            shards[-1].append((name, part))
            used += size
    return shards


def _write_shards(
    directory: Path,
    shards: Shards,
    encoding: Encoding,
    weights: Mapping[str, Tensor],
    tower: Sequence[str],
) -> None:
    """Write the safetensors files, and an index if there are several; the last has the tower."""
    weight_map: dict[str, str] = {}
    count = len(shards) + bool(tower)

    def file_name(number: int) -> str:
        return (
            f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
        )

    name, whole = "", torch.empty(0)
    for number, shard in enumerate(shards, start=1):
        file = file_name(number)
        tensors: dict[str, Tensor] = {}
        for parameter, part in shard:
            if parameter != name:  # parts of a parameter may be in two files
                whole = rows = torch.empty(0)  # free it before the next one is read
                name, whole = parameter, weights[parameter].detach()
            rows = whole.narrow(0, part.first_row, part.shape[0])
            assert tuple(rows.shape) == part.shape, f"{name} is {list(whole.shape)}"
            if world().is_first:
                tensors |= encoding.encode(name, part, rows)
        world().from_first("a file of weights", partial(save_file, tensors, directory / file))
        weight_map |= dict.fromkeys(tensors, file)
    if count == 1:
        return
    total = sum(encoding.num_bytes(part) for shard in shards for _, part in shard)

    def finish() -> None:
        kept = {name: weights[name].contiguous() for name in tower}
        if tower:
            save_file(kept, directory / file_name(count))
        size = total + sum(tensor.nbytes for tensor in kept.values())
        every = weight_map | dict.fromkeys(tower, file_name(count))
        index = {"metadata": {"total_size": size}, "weight_map": every}
        write_json(directory / "model.safetensors.index.json", index)

    world().from_first("the index of the files", finish)


def _config_json(config: ModelConfig, encoding: Encoding) -> Json:
    """Return the contents of config.json."""
    named = "float32" if encoding.dtype == "float32" else "bfloat16"
    contents = dict(config.raw) | {
        "architectures": [config.architecture],
        "model_type": config.family,
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": named,
        "torch_dtype": named,  # of transformers 4
    }
    if config.vision is not None and config.vision.flat and "text_config" in contents:
        # The language model's key ties its head too.
        tied = {"tie_word_embeddings": config.tie_word_embeddings}
        contents["text_config"] = contents["text_config"] | tied
    contents.pop("quantization_config", None)
    if further_layers(config):
        contents[FURTHER_LAYERS] = 0  # they are not read
    if config.head == "score":
        contents |= {"num_labels": 1, "id2label": {"0": "score"}, "label2id": {"score": 0}}
    if encoding.dtype == "fp8":
        parts = chain.from_iterable(stored_tensors(config).values())
        layers = (part for part in parts if part.layer is not None)
        kept = [p.module for p in layers if len(p.shape) == 2 and not encoding.is_fp8(p)]
        tower = () if config.vision is None else config.vision.modules
        contents["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": list(FP8_BLOCK),
            "activation_scheme": "dynamic",
            "modules_to_not_convert": ["lm_head", *kept, *tower],
        }
        if kept:  # some versions of vLLM read only this key
            contents["quantization_config"]["ignored_layers"] = kept
    return contents


def _save_tokenizer(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a tokenizer's files for transformers 4 and 5; 4 has no class TokenizersBackend."""
    tokenizer.save_pretrained(str(directory))
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    for key in ("backend", "is_local", "local_files_only"):  # arguments of loading
        settings.pop(key, None)
    write_json(file, settings)


def save_file(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file.

    Raises NonFiniteError for a NaN or an infinity, and OSError for an error of the disk.
    """
    for name, tensor in tensors.items():
        # A NaN in an FP8 block makes its scale NaN, so codes need no check.
        if tensor.itemsize > 1 and not bool(torch.isfinite(tensor).all()):
            raise NonFiniteError(
                f"no model is written: {name} has a NaN or an infinity; export an earlier "
                "checkpoint"
            )
    try:
        save_safetensors(tensors, str(file), metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _check_target(target: Path, overwrite: bool) -> None:
    """Raise a UserError if a directory cannot be written at the target."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    problem = None
    if not target.is_dir():
        problem = "a file is there already; name another directory"
    elif not overwrite:
        problem = "exists and is not empty; name another directory, or say --overwrite"
    elif not any((target / name).exists() for name in ("config.json", "adapter_config.json")):
        problem = "not a model directory (no config.json); it is not overwritten"
    if problem:
        raise UserError(f"{target}: {problem}")


def publish_directory(scratch: Path, target: Path) -> None:
    """Rename a complete directory to `target`, then delete the directory that it replaces.

    Files get the default permissions; safetensors creates files that only their owner can read.
    """
    mask = os.umask(0)  # reading the mask requires setting it
    os.umask(mask)
    scratch.chmod(0o777 & ~mask)
    for file in scratch.rglob("*"):  # a folder if there are several chat templates
        file.chmod((0o777 if file.is_dir() else 0o666) & ~mask)
        sync(file)
    sync(scratch)
    if not target.exists() or not any(target.iterdir()):
        scratch.rename(target)  # also if the target is an empty directory
    else:
        before = scratch.with_name(scratch.name + ".before")
        target.rename(before)
        try:
            scratch.rename(target)
        except OSError:
            before.rename(target)
            raise
        shutil.rmtree(before)
    sync(target.parent)


def write_json(file: Path, contents: Json) -> None:
    file.write_text(json.dumps(contents, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
