"""Writing a Hugging Face model directory that transformers, vLLM and jetrl read.

A directory appears whole or not at all: it is written next to its place under a hidden name and
moved there at the end. FP8 directories hold the weights of the decoder layers' linears as
float8_e4m3fn with one float32 scale for each 128 x 128 block (`weight_scale_inv`, the factor a code
is multiplied by: what our quantizer stores as `scales`), all else in BF16, and say so in
config.json.

In a run of several processes rank 0 writes. Tensors are gathered and rounded one after the other,
so that one whole tensor at a time is on a GPU; rank 0 holds a file's in CPU memory. An error of
rank 0 is raised by all ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file as save_safetensors
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from jetrl.distributed.world import world
from jetrl.errors import StorageError, UserError, is_of_disk
from jetrl.models.families import FP8_BLOCK, SCALE_SUFFIX, ModelConfig, StoredTensor, stored_tensors
from jetrl.models.hf_files import sync
from jetrl.precision.quantize import quantize

SaveDtype = Literal["bfloat16", "float32", "fp8"]


def save_model(
    path: str | Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    dtype: SaveDtype = "bfloat16",
    tokenizer: PreTrainedTokenizerBase | None = None,
    generation_config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5 << 30,
    *,
    bf16_layers: Collection[int] = (),
    scales: Literal["fp32", "pow2"] = "fp32",
    overwrite: bool = False,
) -> None:
    """Write a model directory; every rank of a run calls this function, and rank 0 writes.

    The directory has config.json, safetensors (with an index when there is more than one), the
    tokenizer with its chat template, and generation_config.json.

    Args:
        weights: Every parameter of the config under our names, any floating dtype and device; read
            once each, in the config's order.
        dtype: The dtype of the tensors written; fp8 as the module says.
        tokenizer: The tokenizer to write, or None.
        generation_config: The contents of generation_config.json, or None.
        max_shard_bytes: The bytes of tensors in a file at most, unless one tensor is larger.
        bf16_layers: Decoder layers whose linears stay BF16 in an FP8 directory.
        scales: The quantizer's rule for the scales of an FP8 directory.
        overwrite: Replace a model directory that is already at `path`, which stays as it was until
            the new one is complete.
    """
    if dtype not in ("bfloat16", "float32", "fp8"):
        raise ValueError(f"save_model: dtype = {dtype!r}; one of bfloat16, float32, fp8")
    _check_names(config, weights)
    plan = _ShardPlan(config, dtype, frozenset(bf16_layers), scales, max_shard_bytes)
    target = Path(path)
    scratch = world().from_first(
        "a folder to write into", lambda: begin_directory(target, overwrite)
    )

    def finish() -> None:
        write_json(scratch / "config.json", plan.config_json())
        if tokenizer is not None:
            save_tokenizer(scratch, tokenizer)
        if generation_config:
            write_json(scratch / "generation_config.json", dict(generation_config))
        publish_directory(scratch, target)

    with filling(scratch, target):
        plan.write(scratch, weights)
        world().from_first("the end of a model directory", finish)


@contextlib.contextmanager
def filling(scratch: Path, target: Path) -> Iterator[None]:
    """Remove the folder of `begin_directory` after the block, which fills and publishes it."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{target}: not written: {error}. Make room there and type the command again; a run "
            "goes on with --resume"
        ) from error
    finally:
        if world().is_first:
            shutil.rmtree(scratch, ignore_errors=True)


def begin_directory(target: Path, overwrite: bool) -> Path:
    """Return a new hidden folder beside a directory that can be written."""
    _check_target(target, overwrite)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    except OSError as error:
        message = f"{target}: cannot write there: {error.strerror or error}"
        kind = StorageError if is_of_disk(error) else UserError
        raise kind(message) from error


class _ShardPlan:
    """The file of each tensor of a directory, decided from shapes alone."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: SaveDtype,
        bf16_layers: frozenset[int],
        scales: Literal["fp32", "pow2"],
        max_shard_bytes: int,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.bf16_layers = bf16_layers
        self.scales = scales
        self.torch_dtype = torch.float32 if dtype == "float32" else torch.bfloat16
        self._parameters = stored_tensors(config)
        self.total_bytes = 0
        # a shard: (our parameter, first row of the part in it, the part)
        self.shards: list[list[tuple[str, int, StoredTensor]]] = [[]]
        used = 0
        for name, parts in self._parameters.items():
            row = 0
            for part in parts:
                size = self._num_bytes(part)
                if self.shards[-1] and used + size > max_shard_bytes:
                    self.shards.append([])
                    used = 0
                self.shards[-1].append((name, row, part))
                used += size
                self.total_bytes += size
                row += part.shape[0]

    def is_fp8(self, part: StoredTensor) -> bool:
        """Return whether a tensor is written as FP8 codes and scales."""
        return self.dtype == "fp8" and part.linear_weight and part.layer not in self.bf16_layers

    def write(self, directory: Path, weights: Mapping[str, Tensor]) -> None:
        """Write the safetensors files, and an index where they are several."""
        weight_map: dict[str, str] = {}
        name, whole = "", torch.empty(0)
        for number, shard in enumerate(self.shards, start=1):
            file = "model.safetensors"
            if len(self.shards) > 1:
                file = f"model-{number:05d}-of-{len(self.shards):05d}.safetensors"
            tensors: dict[str, Tensor] = {}
            for parameter, row, part in shard:
                if parameter != name:  # whose parts may be in two files
                    whole = torch.empty(0)  # one at a time is in memory
                    name, whole = parameter, self._whole(weights, parameter)
                if world().is_first:
                    tensors |= self._encode(part, whole[row : row + part.shape[0]])
            path = directory / file
            world().from_first("a file of weights", partial(save_file, tensors, path))
            weight_map |= dict.fromkeys(tensors, file)
        if len(self.shards) > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            index_file = directory / "model.safetensors.index.json"
            world().from_first("the index of the files", partial(write_json, index_file, index))

    def _whole(self, weights: Mapping[str, Tensor], name: str) -> Tensor:
        """Return one of the weights, of the shape that the config has."""
        parts, weight = self._parameters[name], weights[name].detach()
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        if tuple(weight.shape) != shape:
            raise ValueError(f"save_model: {name} is {list(weight.shape)}, not {list(shape)}")
        return weight

    def config_json(self) -> dict[str, Any]:
        """Return config.json with these weights' dtype and, for FP8, their layout."""
        contents = dict(self.config.raw)
        contents["architectures"] = [self.config.architecture]
        contents["model_type"] = self.config.family
        contents["tie_word_embeddings"] = self.config.tie_word_embeddings
        named = "float32" if self.dtype == "float32" else "bfloat16"
        contents["dtype"] = contents["torch_dtype"] = named  # transformers 5 and 4
        contents.pop("quantization_config", None)
        if self.config.head == "score":
            contents |= {"num_labels": 1, "id2label": {"0": "score"}, "label2id": {"score": 0}}
        if self.dtype == "fp8":
            kept = [
                part.name.removesuffix(".weight")
                for parts in self._parameters.values()
                for part in parts
                if part.linear_weight and part.layer in self.bf16_layers
            ]
            contents["quantization_config"] = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "weight_block_size": list(FP8_BLOCK),
                "activation_scheme": "dynamic",
                "modules_to_not_convert": ["lm_head", *kept],
            }
            if kept:  # what vLLM calls it: there are versions of it that read no other name
                contents["quantization_config"]["ignored_layers"] = kept
        return contents

    def _encode(self, part: StoredTensor, rows: Tensor) -> dict[str, Tensor]:
        """Return the tensors to write, by name, for one part of a parameter."""
        if not self.is_fp8(part):
            # a copy: safetensors refuses tensors that share memory with each other; rounded where
            # the weights are, so that half the bytes travel
            return {part.name: rows.to(self.torch_dtype, copy=True).cpu().contiguous()}
        quantized = quantize(rows.float(), FP8_BLOCK, scales=self.scales)
        return {
            part.name: quantized.codes.cpu().contiguous(),
            part.name + SCALE_SUFFIX: quantized.scales.cpu().contiguous(),
        }

    def _num_bytes(self, part: StoredTensor) -> int:
        """Return the bytes that a tensor takes in a file."""
        if not self.is_fp8(part):
            return part.num_elements * self.torch_dtype.itemsize
        blocks = [divmod(size, block) for size, block in zip(part.shape, FP8_BLOCK, strict=True)]
        if any(rest for _, rest in blocks):
            raise UserError(
                f"{part.name} {list(part.shape)} is not made of whole 128 x 128 blocks, which FP8 "
                "checkpoints need; save it as bfloat16"
            )
        return part.num_elements + 4 * blocks[0][0] * blocks[1][0]


def save_tokenizer(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the tokenizer's files as transformers 4 and 5 read them.

    transformers 5 writes a class TokenizersBackend and a list of extra_special_tokens (4 has an
    object), on which 4 fails; it reads what 4 would have written as well.
    """
    tokenizer.save_pretrained(str(directory))
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    for key in ("backend", "is_local", "local_files_only"):  # of how it was loaded
        settings.pop(key, None)
    write_json(file, settings)


def _check_names(config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    """Raise where weights are not the config's parameters, by name."""
    names = set(stored_tensors(config))
    if names != set(weights):
        missing, extra = sorted(names - set(weights)), sorted(set(weights) - names)
        raise ValueError(f"save_model: missing {missing[:5]}, not of this config {extra[:5]}")


def save_file(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file."""
    try:
        save_safetensors(tensors, str(file), metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _check_target(target: Path, overwrite: bool) -> None:
    """Raise where something is in the way of the directory."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not target.is_dir():
        raise UserError(f"{target}: a file is there already; name another directory")
    if not overwrite:
        raise UserError(
            f"{target}: exists and is not empty; name another directory, or say --overwrite "
            "(overwrite=True)"
        )
    if not any((target / name).exists() for name in ("config.json", "adapter_config.json")):
        raise UserError(f"{target}: not a model directory (no config.json); it is not overwritten")


def publish_directory(scratch: Path, target: Path) -> None:
    """Move the finished directory into place; an earlier one goes only after that.

    Whoever may read a new file may read these: safetensors makes its files for only their owner.
    """
    scratch.chmod(0o777 & ~_umask())
    for file in scratch.rglob("*"):  # several chat templates are in a folder
        file.chmod((0o777 if file.is_dir() else 0o666) & ~_umask())
        sync(file)
    sync(scratch)
    if not target.exists():
        scratch.rename(target)
    elif not any(target.iterdir()):
        target.rmdir()
        scratch.rename(target)
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


def _umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_json(file: Path, contents: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(contents, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
