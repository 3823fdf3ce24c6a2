"""The weights of a Hugging Face model directory, read tensor by tensor under our names.

They come from safetensors files, mapped into memory, so that loading reads each byte once and holds
little. A directory's FP8 weights are dequantized as they are read; of NVFP4 weights
(`nvfp4_files`) the codes are read as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from jetrl.errors import UserError
from jetrl.models.families import (
    FP8_BLOCK,
    SCALE_SUFFIX,
    ModelConfig,
    StoredTensor,
    parameter_shapes,
    stored_tensors,
)
from jetrl.models.hf_files import INDEX, is_hub_name, model_directory, open_tensors, tensor_files
from jetrl.models.nvfp4_files import (
    CodedWeights,
    NVFP4Layout,
    left_in_16_bits,
    nvfp4_layout,
    read_nvfp4,
)
from jetrl.precision.nvfp4 import NVFP4_GROUP, NVFP4Tensor, dequantize_nvfp4, stacked_nvfp4
from jetrl.precision.quantize import QTensor, dequantize

_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # buffers that old checkpoints kept; recomputed here
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@contextmanager
def open_weights(
    path: str | Path, config: ModelConfig, device: str | torch.device = "cpu"
) -> Iterator[CodedWeights]:
    """Yield the parameters of a model directory by our names (`families.parameter_shapes`), fused.

    Each is read when it is asked for, straight to the device, and not kept: a model is never whole
    in CPU memory on its way to a GPU.

    Values keep their stored dtype (float32, bfloat16, float16, float64), except FP8 weights, which
    are dequantized to float32 with their `weight_scale_inv` of [ceil(N / 128), ceil(K / 128)], and
    NVFP4 weights, whose float32 values are a code times its scales. The codes of these are
    `CodedWeights.codes`. On the CPU a parameter stored as one tensor stays mapped to its file.

    Args:
        device: The device that tensors are put on; with "meta" they have shapes only, and of a
            name of the hub no file of weights is needed.
    """
    try:
        layout = check_quantization(config.raw.get("quantization_config"))
    except UserError as error:  # which begins with the file's name
        raise UserError(f"{path}/{error}") from None
    outline = torch.device(device).type == "meta"
    if outline and is_hub_name(path):
        yield _Outline(config, layout)
        return
    directory = model_directory(path, "weights")
    files = tensor_files(directory)
    with ExitStack() as stack:
        opened = sorted(set(files.values()))
        handles = {file: stack.enter_context(open_tensors(file)) for file in opened}
        weights = _StoredWeights(directory, files, handles, torch.device(device), config, layout)
        weights.check_complete()
        yield _Outline(config, layout) if outline else weights


class _Outline(CodedWeights):
    """The parameters of a model directory as its config.json has them, without memory."""

    def __init__(self, config: ModelConfig, layout: NVFP4Layout | None) -> None:
        self._shapes, self._wide = parameter_shapes(config), left_in_16_bits(config)
        parts = {} if layout is None else stored_tensors(config)
        self._coded = {name for name in parts if parts[name][0].linear_weight} - self._wide

    def codes(self, name: str) -> NVFP4Tensor | None:
        if name not in self._coded:
            return None
        rows, columns = self._shapes[name]
        codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device="meta")
        scales = torch.empty(rows, columns // NVFP4_GROUP, device="meta")
        return NVFP4Tensor(codes, scales, torch.empty((), device="meta"))

    def left_wide(self, name: str) -> bool:
        return name in self._wide

    def __getitem__(self, name: str) -> Tensor:
        return torch.empty(self._shapes[name], device="meta")

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


class _StoredWeights(CodedWeights):
    """The parameters of a checkpoint by our names, each read from open files when asked for."""

    def __init__(
        self,
        directory: Path,
        files: dict[str, Path],
        handles: dict[Path, Any],
        device: torch.device,
        config: ModelConfig,
        layout: NVFP4Layout | None,
    ) -> None:
        self._layout = layout
        self.directory, self.files, self.handles, self.device = directory, files, handles, device
        self._parts, self._tied = stored_tensors(config), config.tie_word_embeddings

    def codes(self, name: str) -> NVFP4Tensor | None:
        """Return a parameter's codes and scales; None where it has 16 or 32 bits, or FP8."""
        parts, layout = self._parts[name], self._layout
        coded = [part for part in parts if self._has_codes(part)]
        if layout is None or not coded:
            return None
        if len(coded) < len(parts):
            plain = next(part for part in parts if part not in coded)
            raise UserError(
                f"{self.files[plain.name]}: {plain.name} is not in NVFP4, and {coded[0].name} is; "
                "they are multiplied as one matrix here, so both have to be"
            )
        return stacked_nvfp4([read_nvfp4(layout, part, self.files, self._tensor) for part in parts])

    def left_wide(self, name: str) -> bool:
        """Return whether a parameter has 16 or 32 bits in a directory with others in NVFP4."""
        return self._layout is not None and not any(map(self._has_codes, self._parts[name]))

    def _has_codes(self, part: StoredTensor) -> bool:
        """Return whether the files have any NVFP4 tensor of a stored weight."""
        if self._layout is None:
            return False
        names = {name for name in self._layout.names(part.name) if name in self.files}
        if names != {part.name}:
            return bool(names)
        stored = self.handles[self.files[part.name]].get_slice(part.name)
        return bool(stored.get_dtype() == "U8")  # without its scales

    def __getitem__(self, name: str) -> Tensor:
        coded = self.codes(name)
        if coded is not None:
            return dequantize_nvfp4(coded)
        tensors = [self._read(part) for part in self._parts[name]]
        weight = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        if self._tied and name == "embed.weight":
            self._check_tied_head(weight)
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def check_complete(self) -> None:
        """Raise for a tensor that is missing, and for tensors that no parameter needs."""
        # A tied checkpoint may hold the embedding a second time.
        used = {"lm_head.weight"} if self._tied else set()
        for part in chain(*self._parts.values()):
            if self._layout is not None and self._has_codes(part):
                used |= self._coded_names(part, self._layout)
                continue
            if part.name not in self.files:
                self._refuse_without(part)
            used |= {part.name, part.name + SCALE_SUFFIX}
        unread = () if self._layout is None else self._layout.unread
        ignored = (*_IGNORED_SUFFIXES, *unread)
        extra = sorted(name for name in set(self.files) - used if not name.endswith(ignored))
        if extra:
            shown = ", ".join(extra[:5]) + (f" and {len(extra) - 5} more" if extra[5:] else "")
            raise UserError(
                f"{self.directory}: tensors that config.json has no place for: {shown}; are "
                "config.json and the weights of the same model?"
            )

    def _coded_names(self, part: StoredTensor, layout: NVFP4Layout) -> set[str]:
        """Return the names of a weight's tensors in NVFP4, or raise for one that is missing."""
        names = layout.names(part.name)
        there = next(name for name in names if name in self.files)
        for name in names:
            if name not in self.files:
                raise UserError(
                    f"{self.files[there]}: there is {there}, but no tensor {name}: NVFP4 in "
                    f"{layout.tool}'s layout has {', '.join(names)}"
                )
        return set(names)

    def _refuse_without(self, part: StoredTensor) -> None:
        """Raise the error of a tensor that the files' lists of contents lack."""
        hint = ""
        if part.name == "lm_head.weight":
            hint = " (if the model ties it to the embeddings, set tie_word_embeddings to true)"
        source = next(iter(self.handles)) if len(self.handles) == 1 else self.directory / INDEX
        raise UserError(
            f"{source}: tensor {part.name} {list(part.shape)} is missing; config.json asks for "
            f"it{hint}"
        )

    def _read(self, part: StoredTensor) -> Tensor:
        """Return a stored tensor on the device, dequantized if it is FP8."""
        tensor = self._tensor(part.name, part.shape)
        if tensor.dtype == torch.float8_e4m3fn:
            return self._dequantized(part, tensor)
        if tensor.dtype not in _DTYPES:
            raise UserError(
                f"{self.files[part.name]}: tensor {part.name} is {tensor.dtype}; supported: "
                "float32, bfloat16, float16, float64, and float8_e4m3fn with scales"
            )
        if part.name + SCALE_SUFFIX in self.files:
            raise UserError(
                f"{self.files[part.name]}: tensor {part.name} is {tensor.dtype}, and "
                f"{part.name}{SCALE_SUFFIX} beside it is for FP8 weights"
            )
        return tensor

    def _check_tied_head(self, embedding: Tensor) -> None:
        """Check that a checkpoint with tied embeddings has no lm_head unlike its embedding."""
        if "lm_head.weight" not in self.files:
            return
        head = self._tensor("lm_head.weight", tuple(embedding.shape))
        if head.dtype != embedding.dtype or not torch.equal(head, embedding):
            raise UserError(
                f"{self.files['lm_head.weight']}: lm_head.weight differs from "
                "model.embed_tokens.weight, but config.json has tie_word_embeddings = true; set it "
                "to false to use both"
            )

    def _tensor(self, name: str, *shapes: tuple[int, ...]) -> Tensor:
        """Return a tensor of the files on the device, checked to have one of the shapes."""
        file = self.files[name]
        try:
            stored = tuple(self.handles[file].get_slice(name).get_shape())
            if stored not in shapes:
                expected = " or ".join(str(list(shape)) for shape in shapes)
                raise UserError(
                    f"{file}: tensor {name} has shape {list(stored)}, config.json expects "
                    f"{expected}"
                )
            # Opened for only this tensor: a mapping keeps every page that was read through it, and
            # one for the whole load would end with the directory's size in this process's memory.
            with open_tensors(file) as handle:
                tensor: Tensor = handle.get_tensor(name)
            return tensor.to(self.device)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file}: tensor {name} cannot be read: {error}") from error

    def _dequantized(self, part: StoredTensor, codes: Tensor) -> Tensor:
        """Return FP8 codes times the scales that are stored beside them."""
        name = part.name + SCALE_SUFFIX
        file = self.files[part.name]
        if len(part.shape) != 2 or name not in self.files:
            raise UserError(f"{file}: {part.name} is float8_e4m3fn, but there is no tensor {name}")
        grid = tuple(-(-size // block) for size, block in zip(part.shape, FP8_BLOCK, strict=True))
        scales = self._tensor(name, grid)
        if scales.dtype not in (torch.float32, torch.bfloat16):
            raise UserError(f"{file}: {name} is {scales.dtype}; supported: float32, bfloat16")
        return dequantize(QTensor(codes, scales.float(), FP8_BLOCK))


def check_quantization(quantization: Any) -> NVFP4Layout | None:
    """Return the layout of NVFP4 weights that config.json's quantization_config describes.

    None without a quantization, and of FP8 in blocks; every other one is refused.
    """
    if quantization is None:
        return None
    where = "config.json: quantization_config"
    if not isinstance(quantization, Mapping):
        raise UserError(f"{where} = {quantization!r}: an object is expected")
    layout = nvfp4_layout(quantization)
    if layout is not None:
        return layout
    method = quantization.get("quant_method")
    if method != "fp8":
        raise UserError(
            f"{where}.quant_method = {method!r} is not supported; use a 16-bit or 32-bit "
            "checkpoint of the model, or 'fp8' with 128 x 128 weight blocks, or as a frozen base "
            "NVFP4 of 'modelopt' or 'compressed-tensors'"
        )
    block = quantization.get("weight_block_size")
    if block is None or tuple(block) != FP8_BLOCK:
        raise UserError(f"{where}.weight_block_size = {block!r}; supported: [128, 128]")
    return None
