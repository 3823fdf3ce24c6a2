"""Read a Hugging Face model directory: config.json, weights, tokenizer and generation settings.

A path can also be a hub name (`hf_files`), which is read from the hub's cache. Code in a model
directory is never run. Errors name the file, and the missing or unexpected tensor. `hf_save` writes
model directories.

Parameters have jetrl's names and are read one at a time from memory-mapped safetensors files, so
loading needs memory for one parameter. FP8 weights are dequantized on read; NVFP4 codes
(`nvfp4_files`) are read unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from jetrl.errors import UserError
from jetrl.models import families, hf_files, nvfp4_files
from jetrl.models.coded_weights import CodedWeights, MadeWeights
from jetrl.models.hf_save import Encoding as Encoding
from jetrl.models.hf_save import save_model as save_model
from jetrl.models.tokenizer import check_tokenizer_files, check_vocabulary
from jetrl.models.vision import tower_shapes
from jetrl.precision.nvfp4 import NVFP4_GROUP, NVFP4Tensor, dequantize_nvfp4, stacked_nvfp4
from jetrl.precision.quantize import QTensor, dequantize
from jetrl.types import Json

_GENERIC_TOKENIZERS = ("None", "PreTrainedTokenizer", "TokenizersBackend")  # no code of their own
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # buffers in old checkpoints; recomputed here
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)


def read_config(path: str | Path) -> Json:
    """Return the contents of config.json. Raises UserError for an adapter's directory."""
    directory = hf_files.model_directory(path)
    if (directory / "adapter_config.json").is_file() and not (directory / "config.json").is_file():
        raise UserError(
            f"{directory}: an adapter, not a whole model: use it by adapter.kind=lora and "
            "adapter.path, or write a whole model with `jetrl export --merge`"
        )
    return hf_files.read_object(directory / "config.json")


def model_config(path: str | Path) -> families.ModelConfig:
    """Return the configuration of a model. Raises UserError if jetrl does not support it."""
    contents = read_config(path)
    sidecar = hf_files.model_directory(path) / nvfp4_files.SIDECAR
    if "quantization_config" not in contents and sidecar.exists():
        said = hf_files.read_object(sidecar).get("quantization")
        if not isinstance(said, dict):
            raise UserError(f"{sidecar}: no object `quantization`, which ModelOpt writes there")
        of_modelopt = {"quant_method": "modelopt", "quantization": said}
        contents = {**contents, "quantization_config": of_modelopt}
    try:
        nvfp4_files.check_quantization(contents.get("quantization_config"))
        config = families.ModelConfig.from_hf(contents)
        if config.vision is not None and nvfp4_files.layout_of(config) is not None:
            raise UserError("config.json: a model with images is read in 16 bits or FP8 only")
        return config
    except UserError as error:  # which begins with config.json
        raise UserError(f"{path}/{error}") from None


def read_generation_config(path: str | Path) -> Json:
    """Return the contents of generation_config.json, an empty dict without that file."""
    file = hf_files.model_directory(path) / "generation_config.json"
    return hf_files.read_object(file) if file.exists() else {}


def eos_token_ids(
    config: families.ModelConfig,
    generation_config: Json,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> tuple[int, ...]:
    """Return the ids of end-of-sequence tokens in both files and the tokenizer, each once."""
    ends = generation_config.get("eos_token_id")
    ids = families.token_ids(ends, "generation_config.json: eos_token_id")
    own = None if tokenizer is None else tokenizer.eos_token_id
    return tuple(dict.fromkeys((*ids, *config.eos_token_ids, *([] if own is None else [own]))))


def has_tokenizer(path: str | Path) -> bool:
    directory = hf_files.model_directory(path)
    return any((directory / name).exists() for name in hf_files.TOKENIZER_FILES)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model. Raises UserError if it is missing or damaged.

    For some model types AutoTokenizer ignores the tokenizer class that a directory declares: for
    `qwen2` it returns a Qwen2Tokenizer, which splits text by Qwen's rule instead of the rule in
    tokenizer.json. In that case only tokenizer.json is read, which is a complete description.
    """
    directory = hf_files.model_directory(path)
    if not has_tokenizer(directory):
        raise UserError(
            f"{directory}: no tokenizer ({', '.join(hf_files.TOKENIZER_FILES)}); copy the model's "
            "there, or set model.tokenizer to a directory that has them"
        )
    longer = check_tokenizer_files(directory)
    settings_file = directory / "tokenizer_config.json"
    settings = hf_files.read_object(settings_file) if settings_file.exists() else {}
    declared = str(settings.get("tokenizer_class")).removesuffix("Fast")
    complete = (directory / "tokenizer.json").exists()
    tokenizer: PreTrainedTokenizerBase | None = None
    try:
        if not (complete and declared in _GENERIC_TOKENIZERS):
            tokenizer = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
        named = type(tokenizer).__name__.removesuffix("Fast")
        if tokenizer is None or (complete and named != declared):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(
                str(directory), local_files_only=True
            )
    except Exception as error:  # tokenizers raises bare Exception for a damaged file
        reason = hf_files.first_line(error)
        raise UserError(f"{directory}: the tokenizer does not load: {reason}") from error
    check_vocabulary(tokenizer, directory, longer)
    files = tokenizer.vocab_files_names.values()
    if files and not any((directory / file).is_file() for file in files):
        # Without a vocabulary, transformers returns a tokenizer that encodes any text to no tokens.
        raise UserError(
            f"{directory}: its tokenizer has no vocabulary: none of {', '.join(sorted(files))}; "
            "copy the model's tokenizer.json into it"
        )
    return tokenizer


def read_image_processor(path: str | Path) -> Json | None:
    """Return the settings of a model's image processor, None without any."""
    directory = hf_files.model_directory(path)
    if (file := directory / "preprocessor_config.json").is_file():
        return hf_files.read_object(file)
    if (file := directory / "processor_config.json").is_file():
        found = hf_files.read_object(file).get("image_processor")
        return found if isinstance(found, dict) else None
    return None


def open_tower(path: str | Path, config: families.ModelConfig) -> CodedWeights:
    """Return the tensors of a model's image tower by their names in its files, as stored.

    Each is read on access. Errors are those of `open_weights`.
    """
    directory = hf_files.model_directory(path, "weights")
    return _StoredWeights(directory, "cpu", config, None, _tower_tensors(config))


def _tower_tensors(config: families.ModelConfig) -> Mapping[str, Sequence[families.StoredTensor]]:
    if config.vision is None:
        return {}
    shapes = tower_shapes(config.vision, config.hidden_size)
    return {n: (families.StoredTensor(n, shape, None, False),) for n, shape in shapes.items()}


def open_weights(
    path: str | Path, config: families.ModelConfig, device: str | torch.device = "cpu"
) -> CodedWeights:
    """Return the parameters of a model by jetrl's names (`families.parameter_shapes`).

    Each is read on access, directly to the device, and not cached. Parameters keep their stored
    dtype (float32, bfloat16, float16 or float64), except for quantized weights, which are
    dequantized to float32: FP8 weights with their scales `weight_scale_inv`
    [ceil(N / 128), ceil(K / 128)] in float32, bfloat16 or E8M0, and NVFP4 weights, whose codes
    `CodedWeights.codes` returns. On a CPU, a parameter stored as one tensor stays memory-mapped. On
    "meta", tensors have no values, and the weights of a hub model are not downloaded.

    Raises UserError at once if a tensor is missing or unexpected, and on access if its shape, dtype
    or values are wrong.
    """
    layout = nvfp4_files.layout_of(config)
    outline = torch.device(device).type == "meta"
    if outline and hf_files.is_hub_name(path):
        return _outline(config, layout)
    weights = _StoredWeights(hf_files.model_directory(path, "weights"), device, config, layout)
    weights.check_complete(_tower_tensors(config))
    return _outline(config, layout) if outline else weights


def _outline(config: families.ModelConfig, layout: nvfp4_files.NVFP4Layout | None) -> CodedWeights:
    """Return parameters on device "meta"."""
    shapes, wide = families.parameter_shapes(config), nvfp4_files.left_in_16_bits(config)
    parts, meta = families.stored_tensors(config), partial(torch.empty, device="meta")

    def codes(name: str) -> NVFP4Tensor | None:
        if not parts[name][0].linear_weight or name in wide:
            return None
        rows, columns = shapes[name]
        packed = meta((rows, columns // 2), dtype=torch.uint8)
        return NVFP4Tensor(packed, meta((rows, columns // NVFP4_GROUP)), meta(()))

    return MadeWeights(shapes, lambda name: meta(shapes[name]), codes if layout else None)


class _StoredWeights(CodedWeights):
    """The parameters of a checkpoint, each read on access."""

    def __init__(
        self,
        directory: Path,
        device: str | torch.device,
        config: families.ModelConfig,
        layout: nvfp4_files.NVFP4Layout | None,
        parts: Mapping[str, Sequence[families.StoredTensor]] | None = None,
    ) -> None:
        self._directory, self._device, self._layout = directory, device, layout
        self._files = hf_files.tensor_files(directory)
        fused = families.fused_tensors(config).items()
        self._parts = parts or {
            **families.stored_tensors(config),
            **{name: (whole,) for name, whole in fused if whole.name in self._files},
        }
        self._tied = config.tie_word_embeddings
        self._further = families.further_layers(config)
        self.names, self.codes = self._parts, None if layout is None else self._codes

    def __getitem__(self, name: str) -> Tensor:
        coded = self._codes(name)
        if coded is not None:
            return dequantize_nvfp4(coded)
        tensors = [self._read(part) for part in self._parts[name]]
        weight = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        weight = weight.flatten(0, 1) if weight.dim() == 3 else weight  # fused experts
        if self._tied and name == "embed.weight" and "lm_head.weight" in self._files:
            head = self._tensor("lm_head.weight", tuple(weight.shape))
            if head.dtype != weight.dtype or not torch.equal(head, weight):
                raise UserError(
                    f"{self._files['lm_head.weight']}: lm_head.weight differs from the embedding; "
                    "set tie_word_embeddings to false in config.json to use both"
                )
        return weight

    def _codes(self, name: str) -> NVFP4Tensor | None:
        """Return the NVFP4 codes and scales of a parameter; None if it is not in NVFP4."""
        parts, layout = self._parts[name], self._layout
        coded = [part for part in parts if self._has_codes(part)]
        if layout is None or not coded:
            return None
        if len(coded) < len(parts):
            plain = next(part for part in parts if part not in coded)
            raise UserError(
                f"{self._files[plain.name]}: {plain.name} is not in NVFP4, and {coded[0].name} is; "
                "they are multiplied as one matrix here, so both have to be"
            )
        read = [nvfp4_files.read_nvfp4(layout, part, self._files, self._tensor) for part in parts]
        return stacked_nvfp4(read)

    def _has_codes(self, part: families.StoredTensor) -> bool:
        """Return whether the files have an NVFP4 tensor of a stored weight, even if incomplete."""
        if self._layout is None:
            return False
        names = {name for name in self._layout.names(part.name) if name in self._files}
        if names != {part.name}:
            return bool(names)
        with hf_files.open_tensors(self._files[part.name]) as handle:
            return bool(handle.get_slice(part.name).get_dtype() == "U8")  # codes without scales

    def check_complete(self, others: Mapping[str, Sequence[families.StoredTensor]]) -> None:
        """Raise a UserError if a tensor is missing, or if no parameter uses a tensor.

        `others` are tensors of the files that are not parameters.
        """
        # A checkpoint with tied embeddings may also store the embedding as lm_head.weight.
        used = {"lm_head.weight"} if self._tied else set()
        for part in chain(*self._parts.values(), *others.values()):
            names: tuple[str, ...] = (part.name,)
            asks = "config.json asks for it"
            if self._layout is not None and self._has_codes(part):
                names = self._layout.names(part.name)
                asks = f"NVFP4 in {self._layout.tool}'s layout has {', '.join(names)}"
            else:
                used.add(part.name + families.SCALE_SUFFIX)
            missing = [name for name in names if name not in self._files]
            if missing:
                files = {*self._files.values()}
                file = self._directory / hf_files.INDEX if len(files) > 1 else min(files)
                file = next((self._files[name] for name in names if name in self._files), file)
                tie = "; is tie_word_embeddings true?" if part.name == "lm_head.weight" else ""
                raise UserError(
                    f"{file}: tensor {missing[0]} {list(part.shape)} is missing; {asks}{tie}"
                )
            used |= {*names}
        unread = () if self._layout is None else self._layout.unread
        ignored = (*_IGNORED_SUFFIXES, *unread)
        extra = sorted(
            name
            for name in set(self._files) - used
            if not name.endswith(ignored) and not name.startswith(self._further)
        )
        if extra:
            shown = ", ".join(extra[:5]) + (f" and {len(extra) - 5} more" if extra[5:] else "")
            raise UserError(
                f"{self._directory}: tensors that config.json has no place for: {shown}; are "
                "config.json and the weights of the same model?"
            )

    def _read(self, part: families.StoredTensor) -> Tensor:
        """Return a stored tensor on the device; FP8 is dequantized to float32."""
        file, scales_name = self._files[part.name], part.name + families.SCALE_SUFFIX
        tensor, scaled = self._tensor(part.name, part.shape), scales_name in self._files
        fp8 = tensor.dtype == torch.float8_e4m3fn
        if not fp8 and (scaled or tensor.dtype not in _DTYPES):
            raise UserError(
                f"{file}: tensor {part.name} is {tensor.dtype}; supported: float32, bfloat16, "
                f"float16 and float64 without {scales_name}, and float8_e4m3fn with it"
            )
        if not fp8:
            _check_finite(tensor, f"{file}: {part.name}")
            return tensor
        if part.layer is not None and not part.linear_weight:
            raise UserError(
                f"{file}: {part.name} is in FP8: a router is read in 16 or 32 bits only; write the "
                "file again without quantizing it"
            )
        if len(part.shape) != 2 or not scaled:
            raise UserError(f"{file}: {part.name} is in FP8, but there is no tensor {scales_name}")
        sides = zip(part.shape, families.FP8_BLOCK, strict=True)
        scales = self._tensor(scales_name, tuple(-(-size // block) for size, block in sides))
        scales_file = self._files[scales_name]
        if scales.dtype not in _SCALE_DTYPES:
            raise UserError(
                f"{scales_file}: {scales_name} is {scales.dtype}: float32, bfloat16 or "
                "float8_e8m0fnu is read"
            )
        scales = scales.float()  # exact, also for the powers of two of E8M0
        if not bool(((scales >= 0) & scales.isfinite()).all()):
            raise UserError(
                f"{scales_file}: {scales_name} has scales that are negative, infinite or NaN"
            )
        if bool(((tensor.view(torch.uint8) & 0x7F) == 0x7F).any()):  # E4M3 has two NaN codes
            raise UserError(f"{file}: {part.name} has FP8 codes that are NaN")
        return dequantize(QTensor(tensor, scales, families.FP8_BLOCK))

    def _tensor(self, name: str, *shapes: tuple[int, ...]) -> Tensor:
        """Return a tensor on the device. Raises UserError if its shape is none of `shapes`."""
        file = self._files[name]
        try:
            # A mapping keeps all pages that were read in this process's memory until it is closed,
            # so it is opened for one tensor.
            with hf_files.open_tensors(file) as handle:
                stored = tuple(handle.get_slice(name).get_shape())
                if stored not in shapes:
                    expected = " or ".join(str(list(shape)) for shape in shapes)
                    raise UserError(
                        f"{file}: tensor {name} has shape {list(stored)}, config.json expects "
                        f"{expected}"
                    )
                tensor: Tensor = handle.get_tensor(name)
            return tensor.to(self._device)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file}: tensor {name} cannot be read: {error}") from error


def _check_finite(tensor: Tensor, what: str) -> None:
    """Raise a UserError if a tensor has a NaN or an infinity, also once it is float32.

    Extremes need no memory and about a tenth of the time of the conversion to float32.
    """
    if not bool(torch.stack(tensor.aminmax()).float().isfinite().all()):
        raise UserError(
            f"{what} has a NaN or an infinity: copy or download the file again, or use an earlier "
            "checkpoint of the model"
        )
