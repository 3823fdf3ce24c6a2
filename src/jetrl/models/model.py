"""A model under a precision plan: its weights, and a decoder that reads them.

The optimizer changes master weights, and `requantize` rounds them into the quantized weights that
both sides of the flow read (`models.weights`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from jetrl.errors import UserError
from jetrl.models import hf, key_smoothing
from jetrl.models.adapter import Adapter, LoRA, base_digest
from jetrl.models.attention import KeyValues, PackedKeyValues
from jetrl.models.coded_weights import CodedWeights, MadeWeights
from jetrl.models.decoder import Decoder
from jetrl.models.experts_shape import ExpertsShape
from jetrl.models.families import Head, ModelConfig
from jetrl.models.hf_save import SaveDtype
from jetrl.models.nvfp4_files import check_base
from jetrl.models.packed import ForwardInputs, ImageRows, Stems, as_token_ids, upload
from jetrl.models.peft import save_adapter
from jetrl.models.source import ModelSource
from jetrl.models.vision import ImageTower
from jetrl.models.vision_trained import TrainedTower
from jetrl.models.weights import Weights
from jetrl.precision.backend import REFERENCE, Backend, backend_elsewhere, backend_for, has_kernels
from jetrl.precision.formats import key_and_value_formats, number_format
from jetrl.precision.plan import PrecisionPlan, Side
from jetrl.settings.sections import TowerPart
from jetrl.types import ImageSpan


class Model:
    """A decoder with weights; `Policy` and `ScalarModel` define the use of the head.

    Args:
        source: The parts of the model (`models.source`).
        device: The CPU or a supported GPU; on "meta", everything is checked without weights.
        frozen: Store only weights that the trainer's forward reads. A frozen model cannot be
            trained, sampled from or saved.
        trains: Returns by name whether a parameter is trained. None: all are, or the adapter's
            choice. Other parameters are rounded once and have no master weights.
        key_exponents: The factors of smoothed keys, from another model or a checkpoint. None: they
            are computed from the weights, if the plan smooths keys (`models.key_smoothing`).

    Attributes:
        plain_text: Texts of a task whose special tokens are encoded as text.
        base_source: The source of the adapter's base; None without an adapter.
        base_digest: The digest of the adapter's base; empty without an adapter.
        tower: The image tower; None if the model reads text only.
        trained_tower: The part of the tower that is trained.
        captured: If set, runs the decoder of the trainer's forwards with gradients
            (`training.graphs`).

    Raises:
        UserError: a model with another head; a device or model without kernels; an adapter trained
            on another base; a damaged file or tensor.
    """

    head: ClassVar[Head]

    def __init__(
        self,
        source: ModelSource,
        plan: PrecisionPlan,
        device: str | torch.device = "cpu",
        frozen: bool = False,
        trains: Callable[[str], bool] | None = None,
        key_exponents: Tensor | None = None,
    ) -> None:
        self.plan, self.device, adapter = plan, torch.device(device), source.adapter
        self.config = config = source.config if adapter is None else adapter.shape(source.config)
        check_device(config, plan, self.device, adapted=adapter is not None)
        if plan.saved != "off" and not frozen:
            _check_saved(config, plan)
        _check_emulated(config, plan)
        if config.head != self.head:
            heads = {"lm": "tokens (ForCausalLM)", "score": "scores (ForSequenceClassification)"}
            has, needs = heads[config.head], heads[self.head]
            where = source.origin or "config.json"
            raise UserError(f"{where}: {config.architecture} has a head for {has}, not for {needs}")
        _check_images(config, plan)
        if source.origin is not None:
            check_base(config, plan, source.origin)
        self.tokenizer, self.plain_text = source.tokenizer, source.plain_text
        self.generation_config = dict(source.generation_config)
        self._offloaded = False
        self.captured: Callable[[ForwardInputs, KeyValues], Tensor] | None = None
        # After all checks, weights are downloaded and read.
        self.weights = Weights(source, plan, self.device, frozen, trains)
        self.base_digest = ""
        if adapter is not None and self.device.type != "meta":
            self.base_digest = base_digest(config, self.weights.tensors)
            adapter.check_base(self.base_digest)
        self.key_exponents, exponents = key_exponents, None
        if plan.smooths_keys and key_exponents is None:
            self.key_exponents = key_smoothing.key_exponents(
                self.weights.tensors, config, self.device
            )
        if self.key_exponents is not None:
            exponents = key_smoothing.head_exponents(self.key_exponents, config.attention.num_heads)
            exponents = exponents.to(self.device)
        self.decoder = Decoder(config, self.weights, exponents)
        # Without the function that holds or reads the weights.
        self._source = replace(source, weights=_read_before)
        self.tower: ImageTower | None = None
        if config.vision is not None and source.tower is not None:
            kind = TrainedTower if self.weights.of_tower else ImageTower
            self.tower = kind(
                config.vision,
                config.hidden_size,
                processor=source.image_processor or {},
                tensors=None if self.device.type == "meta" else source.tower(),
                device=self.device,
                dtype=self.weights.dtype,
            )
            if isinstance(self.tower, TrainedTower):
                self.tower.join(self.weights)
        self.trained_tower: TowerPart = "frozen" if frozen else source.trained_tower
        self.lora: LoRA | None = None
        self.base_source: ModelSource | None = None
        self._replaced: dict[str, Tensor] = {}
        if adapter is None:
            return
        self.lora, self.base_source = adapter.lora, replace(source, adapter=None)
        masters = self.weights.masters
        self._replaced = {n: t for n, t in adapter.replaced.items() if n not in masters}

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        plan: PrecisionPlan | str,
        device: str | torch.device = "cpu",
        frozen: bool = False,
        adapter: Adapter | None = None,
        trains: Callable[[str], bool] | None = None,
        key_exponents: Tensor | None = None,
    ) -> Self:
        """Return the model of a Hugging Face directory or hub name.

        `plan` is a plan or the name of a preset; other arguments and errors are those of the class.
        """
        return cls(
            source=ModelSource.from_path(path, adapter),
            plan=PrecisionPlan.preset(plan),
            device=device,
            frozen=frozen,
            trains=trains,
            key_exponents=key_exponents,
        )

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        plan: PrecisionPlan | str,
        seed: int = 0,
        device: str | torch.device = "cpu",
        tokenizer: PreTrainedTokenizerBase | None = None,
        adapter: Adapter | None = None,
    ) -> Self:
        """Return a model with random weights, which differ between a CPU and a GPU.

        `config` has the contents of a config.json; `plan` is a plan or the name of a preset.
        """
        source = ModelSource.from_seed(ModelConfig.from_hf(config), seed, tokenizer, adapter)
        return cls(source, PrecisionPlan.preset(plan), device)

    def save_pretrained(
        self, path: str | Path, dtype: SaveDtype = "bfloat16", overwrite: bool = False
    ) -> None:
        """Write a Hugging Face directory. All ranks call this method; rank 0 writes.

        With an adapter, only the adapter is written, in float32 and PEFT's format.

        Args:
            dtype: "float32" writes the master weights. "bfloat16" rounds weights to nearest if both
                sides read them in BF16, and others stochastically with fixed seeds, which preserves
                small updates on average. "fp8" has 128 x 128 blocks, for vLLM and transformers, and
                BF16 for layers that the plan keeps in BF16.
            overwrite: Replace a model directory at `path` when the new one is complete.

        Raises:
            UserError: a `path` that cannot be written, or a model without 128 x 128 blocks in FP8.
            NonFiniteError: a weight with a NaN or an infinity.
            StorageError: an error of the disk.
        """
        assert not self.weights.frozen, "a frozen model has no master weights to save"
        plan, num_layers = self.plan, self.config.num_layers
        if self.lora is not None and self.base_source is not None:
            save_adapter(
                path=path,
                config=self.config,
                lora=self.lora,
                masters=self.adapter_tensors(),
                base=self.base_source.origin,
                digest=self.base_digest,
                tokenizer=self.tokenizer,
                overwrite=overwrite,
            )
            return
        bf16_layers = [i for i in range(num_layers) if plan.keeps_bf16(i, num_layers)]
        decoder = self.whole_masters()
        if dtype == "fp8" and plan.dithered_in_files == "none":
            # Both sides read BF16 weights, so FP8 is rounded from these, not from master weights.
            decoder = MadeWeights(decoder, lambda name: self.weights.whole(name).bfloat16())
        tower = self.weights.of_tower
        weights = MadeWeights(
            [*decoder, *tower], lambda n: self.weights.whole(n) if n in tower else decoder[n]
        )
        encoding = hf.Encoding(dtype, bf16_layers, plan.scales, plan.dithered_in_files, tower)
        hf.save_model(
            path=path,
            config=self.config,
            weights=self._source.with_tower(weights),
            encoding=encoding,
            tokenizer=self.tokenizer,
            side_files=self._source.side_files | {"generation_config.json": self.generation_config},
            overwrite=overwrite,
        )

    def adapter_tensors(self) -> dict[str, Tensor]:
        """Return the whole master weights, and replaced parameters that are not trained."""
        return {**self._replaced, **{n: self.weights.whole(n) for n in self.master_weights()}}

    def master_weights(self) -> dict[str, nn.Parameter]:
        """Return the FP32 parameters that the optimizer updates; own rows if divided."""
        return self.weights.masters

    def whole_masters(self) -> Mapping[str, Tensor]:
        """Return the decoder's whole FP32 master weights by name, each gathered on access.

        All ranks must access the same names in the same order.
        """
        assert self.lora is None, "of a model with an adapter the base has no master weights"
        masters, of_tower = self.weights.masters, self.weights.of_tower
        return MadeWeights([n for n in masters if n not in of_tower], self.weights.whole)

    def restore_key_exponents(self, text: str | None, where: str) -> None:
        """Restore the factors of smoothed keys from a checkpoint's state.

        Does nothing if the plan does not smooth keys. Raises UserError, with `where` in front, for
        missing or wrong factors.
        """
        if self.key_exponents is None:
            return
        if text is None:
            raise UserError(f"{where}: key_exponents is missing, and the plan smooths keys")
        self.key_exponents = key_smoothing.from_text(text, self.key_exponents.shape, where)
        exponents = key_smoothing.head_exponents(
            self.key_exponents, self.config.attention.num_heads
        )
        assert self.decoder.exponents is not None, "the plan smooths keys"
        self.decoder.exponents.copy_(exponents)  # in place: captured CUDA graphs read them

    def weight_scales(self) -> dict[str, Tensor]:
        """Return the float32 scales of each FP8 weight by its layer's name."""
        return self.weights.scales()

    def check_backend(self) -> None:
        """Raise a UserError if the process has since selected kernels of another kind of plan."""
        if has_kernels(self.device):
            backend_for(self.device).check_plan(self.plan.defined, self.plan.integer_attention)

    def requantize(self) -> None:
        """Round the master weights into the quantized weights, in place.

        Call this after every change of master weights.
        """
        self.weights.requantize()

    def packed_hidden(
        self,
        inputs: ForwardInputs,
        cu_seqlens: Tensor,
        rows: Tensor,
        activation_checkpointing: bool = False,
        stems: Stems | None = None,
        side: Side = "train",
    ) -> Tensor:
        """Return a side's decoder output [R, D] at `rows` of a packed batch.

        `inputs`, of T tokens, and `rows`, int64 [R], are on the model's device. `cu_seqlens`,
        int64 [S + 1], may be on the CPU, which saves a host sync. `stems` holds the rows to compute
        if sequences share their first tokens; None: all.
        """
        kv = PackedKeyValues(cu_seqlens, self.plan, self.device, stems)
        if stems is not None:
            inputs = inputs[upload(stems.rows, self.device)]
            rows = upload(stems.row_of, self.device)[rows]
        self.check_backend()
        if self.captured is not None and side == "train" and torch.is_grad_enabled():
            return self.captured(inputs, kv)[rows]
        hidden: Tensor = self.decoder(inputs, kv, side, activation_checkpointing)
        return hidden[rows]

    def image_rows(self, spans: Sequence[ImageSpan]) -> ImageRows | None:
        """Return the features of images for the tokens of a forward, on the CPU; None without any.

        Raises UserError if the model reads text only.
        """
        if not spans:
            return None
        if self.tower is None:
            raise UserError(f"{self.config.architecture} reads text only, and a prompt has images")
        return self.tower.rows(spans)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Move an offloaded model to its device for the block, then back to CPU memory."""
        if self._offloaded:
            self.decoder.move(self.device)
        try:
            yield
        finally:
            if self._offloaded:
                self.decoder.move(torch.device("cpu"))

    def offload(self) -> None:
        """Move a frozen model to CPU memory, except while it is `used`."""
        self._offloaded = self.device.type == "cuda"
        if self._offloaded:
            self.decoder.move(torch.device("cpu"))

    def check_sequences(self, sequences: Iterable[Iterable[int]]) -> list[list[int]]:
        """Return sequences as lists of token ids.

        Raises UserError for an empty sequence, one longer than the context, or an id out of range.
        """
        limit, checked = self.config.max_position_embeddings, []
        for index, sequence in enumerate(sequences):
            checked.append(as_token_ids(sequence, f"sequence {index}", self.config.vocab_size))
            if not 1 <= (size := len(checked[-1])) <= limit:
                raise UserError(f"sequence {index} has {size} tokens; the model takes 1 to {limit}")
        return checked


def _read_before(device: torch.device) -> CodedWeights:
    raise AssertionError("the weights of a model are read once")


def check_device(
    config: ModelConfig,
    plan: PrecisionPlan,
    device: torch.device,
    *,
    elsewhere: bool = False,
    adapted: bool = False,
) -> None:
    """Raise a UserError if a device, or a model on that device, has no kernels.

    Args:
        elsewhere: Check for a GPU of the selected backend, which need not be on this machine.
        adapted: Whether the model has an adapter.
    """
    if device.type in ("cpu", "meta"):
        return
    backend = backend_elsewhere(plan.defined) if elsewhere else backend_for(device)
    if backend is REFERENCE:
        return
    backend.check_plan(plan.defined, plan.integer_attention)
    _check_expert_formats(config, plan, backend)
    if backend.defined and plan.scales != "fp32":
        raise UserError(
            f"precision.scales = {plan.scales}: no kernel of a GPU rounds queries in INT8 with it; "
            "leave it out, or use run.device=cpu"
        )
    formats = set(key_and_value_formats(plan.kv))
    for layer in range(config.num_layers):
        formats.update(plan.linear_formats(layer, config.num_layers).values())
    if config.head == "lm":
        formats.add(number_format(plan.lm_head))
    gradients = plan.backward_format
    if gradients not in formats and not backend.takes(gradients.dtype):
        raise UserError(
            f"precision.grad_output = {plan.grad_output}: {backend.gpus} has no kernels for "
            f"{gradients.words}; use precision.grad_output=int8, or run.device=cpu"
        )
    backend.check_formats({format.words: format.dtype for format in formats})
    if adapted and not backend.adapters:
        raise UserError(
            f"{backend.gpus} has no kernels for an adapter under precision.preset = {plan.name}: "
            "use precision.preset = int8, or run.device=cpu"
        )
    if not plan.keys_in_fp32:
        backend.check_attention(config.head_dim, config.num_heads // config.num_kv_heads)
    if config.rotary_dim != config.head_dim:
        raise UserError(
            f"{backend.gpus} has no kernels for heads that rotate in part ({config.rotary_dim} of "
            f"{config.head_dim} channels): use run.device=cpu, or run.backend=reference (slow)"
        )


def _check_images(config: ModelConfig, plan: PrecisionPlan) -> None:
    """Raise a UserError for what models with images do not support."""
    if config.vision is None:
        return
    if config.head == "score":
        raise UserError(f"{config.architecture}: a critic or reward model reads text only")
    if plan.defined:
        raise UserError(
            f"precision.preset = {plan.name}: the bits of an image tower are not defined; use "
            "another preset, such as int8"
        )


def _check_saved(config: ModelConfig, plan: PrecisionPlan) -> None:
    """Raise a UserError if a layer does not save activations as codes."""
    for number, layer in enumerate(config.layers):
        for half in (layer.block, layer.mixer):
            if half.saved_codes is None:
                raise UserError(
                    f"precision.saved = {plan.saved} is for dense layers, and layer {number} of "
                    f"{config.architecture} is {type(half).__name__}: leave it out"
                )


def _check_emulated(config: ModelConfig, plan: PrecisionPlan) -> None:
    """Raise a UserError if no layer has the emulated format of a plan."""
    layers = range(config.num_layers)
    kept = all(plan.keeps_bf16(layer, config.num_layers) for layer in layers)
    if kept and plan.emulated:
        raise UserError(
            f"precision.first_layers_bf16 = {plan.first_layers_bf16} and last_layers_bf16 = "
            f"{plan.last_layers_bf16} keep all {config.num_layers} layers in BF16: set both to 0, "
            "or use precision.preset=bf16"
        )


def _check_expert_formats(config: ModelConfig, plan: PrecisionPlan, backend: Backend) -> None:
    """Raise a UserError if a GPU has no kernels for the formats of experts or their gradients."""
    trained_in_codes = False
    for number, layer in enumerate(config.layers):
        if not isinstance(layer.block, ExpertsShape):
            continue
        formats = plan.linear_formats(number, config.num_layers)
        for format in formats.values():
            if format.reads_masters:
                raise UserError(
                    f"layer {number} has experts in {format.words}, for which {backend.gpus} has "
                    "no kernels: use another precision.preset, or run.device=cpu"
                )
        trained_in_codes |= formats["train"].coded
    if trained_in_codes and (plan.widens_wgrad or not plan.gradient.coded):
        raise UserError(
            f"{backend.gpus} has no kernels for experts with gradients in {plan.gradient.words}, "
            f"wgrad_input {plan.wgrad_input}: use precision.grad_output=e4m3, or run.device=cpu"
        )
