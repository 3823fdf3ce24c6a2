"""A model under a precision plan: FP32 masters, their working copies, and a decoder over both.

The optimizer changes masters, and `requantize` makes the working copies anew, in the one place
where a weight is rounded. A frozen model has working copies alone: under an FP8 plan about a byte a
parameter, where masters take four.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from jetrl.errors import UserError
from jetrl.models import hf
from jetrl.models.decoder import Decoder
from jetrl.models.families import Head, ModelConfig
from jetrl.models.tiny import random_weights
from jetrl.precision.hopper import hopper
from jetrl.precision.linear import Linear
from jetrl.precision.plan import PrecisionPlan


class Model:
    """A decoder with its weights; `Policy` and `ScalarModel` say what is read from it.

    config: what the decoder is made of. plan: what is FP8. tokenizer, generation_config: as in the
    Hugging Face directory, or None and {}. frozen: what the training side's forward reads is kept
    alone; nothing can be trained, sampled or saved.
    """

    head: ClassVar[Head]

    def __init__(
        self,
        config: ModelConfig,
        plan: PrecisionPlan,
        weights: Mapping[str, Tensor],
        device: str | torch.device = "cpu",
        tokenizer: PreTrainedTokenizerBase | None = None,
        generation_config: Mapping[str, Any] | None = None,
        frozen: bool = False,
    ) -> None:
        assert config.head == self.head, f"{type(self).__name__} has a head for {self.head}"
        self.config, self.plan, self.device = config, plan, torch.device(device)
        check_device(config, plan, self.device)
        self.tokenizer = tokenizer
        self.generation_config = dict(generation_config or {})
        self.frozen = frozen
        self._offloaded = False
        self._masters: dict[str, nn.Parameter] = {}
        if frozen:
            self.decoder = Decoder(config, plan, _Passing(weights, self.device), frozen=True)
        else:
            self._masters = {
                name: nn.Parameter(weight.to(self.device, torch.float32))
                for name, weight in weights.items()
            }
            self.decoder = Decoder(config, plan, self._masters)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        plan: PrecisionPlan,
        device: str | torch.device = "cpu",
        frozen: bool = False,
    ) -> Self:
        """A model from a Hugging Face directory (config.json, safetensors, tokenizer if present).

        Raises:
            UserError: what is missing, damaged or unsupported, by file and tensor name; a head of
                another kind.
        """
        config = ModelConfig.from_hf(hf.read_config(path))
        if config.head != cls.head:
            raise UserError(
                f"{path}: {config.architecture} has a head for {_HEADS[config.head]}, and one for "
                f"{_HEADS[cls.head]} is needed here"
            )
        tokenizer = hf.load_tokenizer(path) if hf.has_tokenizer(path) else None
        generation_config = hf.read_generation_config(path)
        with hf.open_weights(path, config, device) as weights:
            return cls(config, plan, weights, device, tokenizer, generation_config, frozen)

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        plan: PrecisionPlan,
        seed: int = 0,
        device: str | torch.device = "cpu",
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> Self:
        """A model with random weights from the contents of a config.json."""
        model = ModelConfig.from_hf(config)
        check_device(model, plan, torch.device(device))  # where the weights are made
        return cls(model, plan, random_weights(model, seed, device), device, tokenizer)

    def save_pretrained(
        self,
        path: str | Path,
        dtype: Literal["bfloat16", "float32", "fp8"] = "bfloat16",
        overwrite: bool = False,
    ) -> None:
        """Write a Hugging Face directory; dtype bfloat16, float32 or fp8 (block-scaled, as vLLM and
        transformers read it; the layers that the plan keeps in BF16 are BF16 there too)."""
        assert not self.frozen, "a frozen model has no masters to save"
        weights = {name: master.detach() for name, master in self._masters.items()}
        hf.save_model(
            path,
            self.config,
            weights,
            dtype,
            tokenizer=self.tokenizer,
            generation_config=self.generation_config or None,
            bf16_layers=[
                layer
                for layer in range(self.config.num_layers)
                if self.plan.keeps_bf16(layer, self.config.num_layers)
            ],
            scales=self.plan.scales,
            overwrite=overwrite,
        )

    def named_masters(self) -> dict[str, nn.Parameter]:
        """The FP32 master weights by name, the very parameters that the optimizer changes."""
        return self._masters

    def weight_scales(self) -> dict[str, Tensor]:
        """The scales, float32, of each FP8 working copy, by its layer's name."""
        linears = [module for module in self.decoder.modules() if isinstance(module, Linear)]
        return {linear.name: scales for linear in linears for scales in linear.weight_scales()}

    def requantize(self) -> None:
        """Make the working copies from the masters: call it after every change of the masters."""
        assert not self.frozen, "a frozen model has no masters to round"
        with torch.no_grad():
            self.decoder.requantize()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """While it is used, an offloaded model is on its device; else in CPU memory."""
        if self._offloaded:
            self.move(self.device)
        try:
            yield
        finally:
            if self._offloaded:
                self.move("cpu")

    def offload(self) -> None:
        """Keeps a frozen model in CPU memory from now on, but while it is `used`."""
        self._offloaded = self.device.type != "cpu"
        if self._offloaded:
            self.move("cpu")

    def move(self, device: str | torch.device) -> None:
        """Puts the weights of a frozen model elsewhere, with the same bits: to the CPU between two
        uses, and back."""
        assert self.frozen, "the masters of a model that is trained stay where they are"
        self.decoder.move(torch.device(device))

    def check_sequences(self, sequences: Sequence[Sequence[int]]) -> None:
        """UserError naming the first sequence that this model cannot take."""
        limit, vocabulary = self.config.max_position_embeddings, self.config.vocab_size
        for index, sequence in enumerate(sequences):
            if not 1 <= len(sequence) <= limit:
                raise UserError(
                    f"sequence {index} has {len(sequence)} tokens; the model takes 1 to {limit}"
                )
            if min(sequence) < 0 or max(sequence) >= vocabulary:
                bad = next(t for t in sequence if not 0 <= t < vocabulary)
                raise UserError(f"sequence {index}: token id {bad} is outside [0, {vocabulary})")


def check_device(config: ModelConfig, plan: PrecisionPlan, device: torch.device) -> None:
    """UserError for a device, or a model on it, that no kernel is there for."""
    if device.type == "cpu":
        return
    if device.type != "cuda" or not torch.cuda.is_available():
        raise UserError(f"device {device}: not there; use run.device=cpu")
    hopper("precision.hopper.gemm").require_hopper(device)
    group = config.num_heads // config.num_kv_heads
    if plan.kv != "fp32" and (config.head_dim not in (64, 128) or group > 16):
        raise UserError(
            f"the GPU's attention takes head_dim 64 or 128 and at most 16 query heads a key "
            f"head, not {config.head_dim} and {group}; use run.device=cpu, or the fp32 preset"
        )
    if plan.train_linear == "fp8" and plan.grad_output == "e5m2":
        raise UserError("precision.grad_output=e5m2: Hopper's block-scaled GEMM takes e4m3 only")


_HEADS: dict[Head, str] = {
    "lm": "tokens (ForCausalLM)",
    "score": "scores (ForSequenceClassification)",
}


class _Passing(Mapping[str, nn.Parameter]):
    """Weights that are put on a device one at a time, when they are asked for, and not kept."""

    def __init__(self, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self._weights, self._device = weights, device

    def __getitem__(self, name: str) -> nn.Parameter:
        return nn.Parameter(
            self._weights[name].to(self._device, torch.float32), requires_grad=False
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
